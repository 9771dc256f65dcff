"""One single-threaded process per core. Data and code reach the workers by fork, so neither is copied nor pickled.

A message that several clients receive is written once, into memory that all processes share, and uploads come back the
same way. Forking takes some milliseconds and needs the data in place, so workers start after loading, not beside it.
"""

import mmap
import multiprocessing
import os
import signal
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

import torch

from protofed.clients import (
    ClientSide,
    Failed,
    FeatureStore,
    Job,
    Predict,
    Prepared,
    Project,
    Result,
    Summarise,
    Train,
    Trained,
    TrainedGroup,
    TrainGroup,
    feature_store,
)
from protofed.records import Bytes, Message
from protofed.system import die_with_parent


class SharedBuffer:
    """Anonymous shared memory, as long as what was last written; made before the fork, gone with its last process."""

    def __init__(self) -> None:
        self._file = os.memfd_create("protofed")

    def write(self, blob: bytes) -> None:
        """Replace what is written. Whoever reads must have done so."""
        os.ftruncate(self._file, len(blob))
        if blob:
            with mmap.mmap(self._file, len(blob)) as view:
                view[:] = blob

    def read(self) -> bytes:
        """What is written."""
        if os.fstat(self._file).st_size == 0:
            return b""
        with mmap.mmap(self._file, 0, access=mmap.ACCESS_READ) as view:
            return view[:]

    def close(self) -> None:
        """Give the memory back, once everybody else has."""
        os.close(self._file)


class WorkersEngine:
    """Hands jobs to persistent processes. What they answer does not depend on which of them does what, or when."""

    name = "workers"
    scattered = False
    trains_groups = True

    def __init__(self, prepared: Prepared, workers: int) -> None:
        self.workers = workers
        self._prepared = prepared
        self._context = prepared.context
        self._board = SharedBuffer()
        self._features = feature_store(prepared.context)  # made here, so that the workers have it together
        self._crew = [self._hire() for _ in range(workers)]

    def perform(self, jobs: Sequence[tuple[Job, Message]]) -> Iterator[tuple[Job, Result]]:
        """The results as they come; the longest jobs are handed out first so that no core waits for a straggler."""
        waiting = deque(sorted(jobs, key=lambda entry: self._effort(entry[0]), reverse=True))
        posted = _most_common(jobs)
        if posted is not None:
            self._board.write(posted.blob)
        busy: dict[Connection, tuple[_Worker, Job]] = {}

        def occupy(worker: _Worker) -> None:
            if waiting:
                job, message = waiting.popleft()
                worker.give(job, message, on_board=message is posted)
                busy[worker.line] = (worker, job)

        for worker in self._crew:
            occupy(worker)
        while busy:
            for line in wait(list(busy)):
                assert isinstance(line, Connection)
                worker, job = busy.pop(line)
                result = worker.answer()
                # It goes on while its result is looked at here.
                occupy(self._successor(worker) if worker.dead else worker)
                yield job, result

    def close(self) -> None:
        """End the workers, also those in the middle of a job."""
        for worker in self._crew:
            worker.dismiss()
        if self._crew:
            self._board.close()
        self._crew = []

    def _successor(self, dead: "_Worker") -> "_Worker":
        self._crew.remove(dead)
        self._crew.append(self._hire())
        return self._crew[-1]

    def _hire(self) -> "_Worker":
        return _Worker(self._prepared, self._features, self._board)

    def _effort(self, job: Job) -> int:
        """How much work a job is, relative to others of its kind."""
        if isinstance(job, TrainGroup):
            return sum(self._context.sizes[client] for client in job.clients)
        if isinstance(job, Train | Summarise | Project):
            return self._context.sizes[job.client]
        if isinstance(job, Predict) or job.domain is not None:
            return len(self._context.dataset.domains[str(job.domain)].test)
        return self._context.sizes[str(job.client)]


def _most_common(jobs: Sequence[tuple[Job, Message]]) -> Message | None:
    """The message that most jobs have in common, if any two have one."""
    by_identity = {id(message): message for _, message in jobs}
    counted = Counter(id(message) for _, message in jobs).most_common(1)
    return by_identity[counted[0][0]] if counted and counted[0][1] > 1 else None


class _Worker:
    """The parent's end of one process; it remembers which message the process has at hand, to send it only once."""

    def __init__(self, prepared: Prepared, features: FeatureStore | None, board: SharedBuffer) -> None:
        fork = multiprocessing.get_context("fork")
        self.line, far_end = fork.Pipe()
        self.dead = False
        self._at_hand: Message | None = None
        self._upload = SharedBuffer()
        self._process: BaseProcess = fork.Process(
            target=_serve, args=(far_end, self.line, board, self._upload, prepared, features), daemon=True
        )
        self._process.start()
        far_end.close()

    def give(self, job: Job, message: Message, *, on_board: bool) -> None:
        """Start a job; the message lies on the board, or goes with it unless it is at hand already."""
        known = self._at_hand is message
        self._at_hand = message
        content: Message | Bytes | None = None if known else message.size if on_board else message
        # A dead process is noticed when its answer is awaited.
        with suppress(BrokenPipeError):
            self.line.send((job, content))

    def answer(self) -> Result:
        """The result of the job it was given."""
        try:
            result: Result = self.line.recv()
        except (EOFError, OSError):
            self._process.join()
            self.dead = True
            self._upload.close()
            return Failed(f"its process ended with code {self._process.exitcode}")
        return replace(result, blob=self._upload.read()) if isinstance(result, Trained | TrainedGroup) else result

    def dismiss(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()
        self.line.close()
        self._upload.close()


def _serve(
    line: Connection,
    parents_end: Connection,
    board: SharedBuffer,
    upload: SharedBuffer,
    prepared: Prepared,
    features: FeatureStore | None,
) -> None:
    """The life of a worker: perform what comes until the parent is gone."""
    die_with_parent()
    parents_end.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides what ends
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    side = ClientSide(prepared, features)
    at_hand: Message | None = None
    with suppress(EOFError, BrokenPipeError):
        while True:
            job, content = line.recv()
            if content is not None:
                at_hand = Message(board.read(), content) if isinstance(content, Bytes) else content
            assert at_hand is not None
            result = side.perform(job, at_hand)
            if isinstance(result, Trained | TrainedGroup):
                upload.write(result.blob)
                result = replace(result, blob=b"")
            line.send(result)

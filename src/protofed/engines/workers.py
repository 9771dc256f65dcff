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
        """Replace the content, once all readers are done with it."""
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
        """Close this process' end; the memory is freed with the last one."""
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
        self._shared_message = SharedBuffer()
        self._features = feature_store(prepared.context)  # made here, so that the workers have it together
        self._processes = [self._start_worker() for _ in range(workers)]

    def perform(self, jobs: Sequence[tuple[Job, Message]]) -> Iterator[tuple[Job, Result]]:
        """The results as they come; the longest jobs are handed out first so that no core waits for a straggler."""
        waiting = deque(sorted(jobs, key=lambda entry: self._effort(entry[0]), reverse=True))
        shared = _most_common(jobs)
        if shared is not None:
            self._shared_message.write(shared.blob)
        busy: dict[Connection, tuple[_Worker, Job]] = {}

        def assign(worker: _Worker) -> None:
            if waiting:
                job, message = waiting.popleft()
                worker.send(job, message, is_shared=message is shared)
                busy[worker.connection] = (worker, job)

        for worker in self._processes:
            assign(worker)
        while busy:
            for connection in wait(list(busy)):
                assert isinstance(connection, Connection)
                worker, job = busy.pop(connection)
                result = worker.receive()
                # The worker goes on while its result is processed here.
                assign(self._replacement(worker) if worker.dead else worker)
                yield job, result

    def close(self) -> None:
        """End the workers, also those in the middle of a job."""
        for worker in self._processes:
            worker.kill()
        if self._processes:
            self._shared_message.close()
        self._processes = []

    def _replacement(self, dead: "_Worker") -> "_Worker":
        self._processes.remove(dead)
        self._processes.append(self._start_worker())
        return self._processes[-1]

    def _start_worker(self) -> "_Worker":
        return _Worker(self._prepared, self._features, self._shared_message)

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
    """The parent's end of one process; it remembers the last message sent, to send it only once."""

    def __init__(self, prepared: Prepared, features: FeatureStore | None, shared_message: SharedBuffer) -> None:
        fork = multiprocessing.get_context("fork")
        self.connection, child_end = fork.Pipe()
        self.dead = False
        self._last_message: Message | None = None
        self._upload = SharedBuffer()
        self._process: BaseProcess = fork.Process(
            target=_serve,
            args=(child_end, self.connection, shared_message, self._upload, prepared, features),
            daemon=True,
        )
        self._process.start()
        child_end.close()

    def send(self, job: Job, message: Message, *, is_shared: bool) -> None:
        """Start a job; the message is in shared memory, or sent along unless the process has it already."""
        unchanged = self._last_message is message
        self._last_message = message
        content: Message | Bytes | None = None if unchanged else message.size if is_shared else message
        # A dead process is noticed when its answer is awaited.
        with suppress(BrokenPipeError):
            self.connection.send((job, content))

    def receive(self) -> Result:
        """The result of the job it was given."""
        try:
            result: Result = self.connection.recv()
        except (EOFError, OSError):
            self._process.join()
            self.dead = True
            self._upload.close()
            return Failed(f"its process ended with code {self._process.exitcode}")
        return replace(result, blob=self._upload.read()) if isinstance(result, Trained | TrainedGroup) else result

    def kill(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()
        self.connection.close()
        self._upload.close()


def _serve(
    connection: Connection,
    parent_end: Connection,
    shared_message: SharedBuffer,
    upload: SharedBuffer,
    prepared: Prepared,
    features: FeatureStore | None,
) -> None:
    """Main loop of a worker: perform jobs until the parent is gone."""
    die_with_parent()
    parent_end.close()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides what ends
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    side = ClientSide(prepared, features)
    message: Message | None = None
    with suppress(EOFError, BrokenPipeError):
        while True:
            job, content = connection.recv()
            if content is not None:
                message = Message(shared_message.read(), content) if isinstance(content, Bytes) else content
            assert message is not None
            result = side.perform(job, message)
            if isinstance(result, Trained | TrainedGroup):
                upload.write(result.blob)
                result = replace(result, blob=b"")
            connection.send(result)

"""What an engine is: it runs clients somewhere, in any order; and its results in canonical order."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from os import SEEK_END
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import IO, Any, Protocol, runtime_checkable

from protofed.clients import Job, Result, Train, Trained, TrainedGroup
from protofed.guards import UploadWords
from protofed.records import Message


class Engine(Protocol):
    """Performs jobs. Client memory lives in the run's store, so any job may run in any process."""

    name: str
    workers: int
    scattered: bool
    """Whether every client's images are in a place of their own, so that nothing can be done for several at once."""
    trains_groups: bool
    """Whether several clients can be trained in one job, and their uploads added up where they are made."""

    def perform(self, jobs: Sequence[tuple[Job, Message]]) -> Iterator[tuple[Job, Result]]:
        """The results as they come, in any order."""

    def close(self) -> None:
        """Stop all processes it started."""


@runtime_checkable
class MaskingEngine(Engine, Protocol):
    """One whose clients mask their uploads for each other, so that nobody here sees a single one."""

    def train_masked(self, jobs: Sequence[tuple[Train, Message]], words: UploadWords) -> TrainedGroup:
        """The sum of the clients' uploads, and who is in it, in the order of the jobs."""


_WAITING_IN_MEMORY = 32 * 2**20
"""Bytes of uploads that wait in memory for those before them."""


def in_order(results: Iterator[tuple[Any, Any]], jobs: list[Job], folder: Path) -> Iterator[tuple[Job, Any]]:
    """Results in the order of `jobs`, each handed on as soon as all before it have come."""
    expected = iter(jobs)
    following = next(expected, None)
    with SpooledTemporaryFile(_WAITING_IN_MEMORY, dir=str(folder)) as file:
        waiting = _Waiting(file)
        for job, result in results:
            if job != following:
                waiting.put(job, result)
                continue
            yield job, result
            following = next(expected, None)
            while following in waiting:
                assert following is not None
                yield following, waiting.take(following)
                following = next(expected, None)


class _Waiting:
    """Results that came before their turn. The longest jobs are done first, so where clients differ in size most of
    them wait, and their uploads must not fill the memory: they lie in a file.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._results: dict[Job, tuple[Any, int, int]] = {}

    def __contains__(self, job: object) -> bool:
        return job in self._results

    def put(self, job: Job, result: Any) -> None:
        if isinstance(result, Trained | TrainedGroup):
            self._file.seek(0, SEEK_END)
            self._results[job] = (replace(result, blob=b""), self._file.tell(), self._file.write(result.blob))
        else:
            self._results[job] = (result, 0, 0)

    def take(self, job: Job) -> Any:
        result, start, length = self._results.pop(job)
        if isinstance(result, Trained | TrainedGroup):
            self._file.seek(start)
            result = replace(result, blob=self._file.read(length))
        if not self._results:
            self._file.truncate(0)
        return result

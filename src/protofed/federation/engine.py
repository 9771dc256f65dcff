"""What an engine is: where clients run. It performs jobs wherever and in whatever order it likes."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from protofed.clients import Job, Result
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
        """End whatever was started."""

"""One process, one client after the other: the reference engine."""

from collections.abc import Iterator, Sequence

from protofed.clients import ClientSide, Job, Prepared, Result
from protofed.records import Message
from protofed.system import cores


class LoopEngine:
    """Performs jobs in the order given, in this process."""

    name = "loop"
    workers = 1
    scattered = False
    trains_groups = True

    def __init__(self, prepared: Prepared) -> None:
        self._side = ClientSide(prepared, threads=cores())

    def perform(self, jobs: Sequence[tuple[Job, Message]]) -> Iterator[tuple[Job, Result]]:
        """Each job in turn."""
        for job, message in jobs:
            yield job, self._side.perform(job, message)

    def close(self) -> None:
        """Nothing was started."""

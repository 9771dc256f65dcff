"""The memory of a process and everything it has started: proportional set size, in which shared pages count once."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_PROCESSES = Path("/proc")
_EVERY_SECONDS = 0.25


class Peak:
    """The highest sum seen so far, in bytes."""

    bytes = 0


@contextmanager
def watched(process: int) -> Iterator[Peak]:
    """Inside: the process tree is looked at a few times a second."""
    peak, over = Peak(), threading.Event()

    def look() -> None:
        while not over.wait(_EVERY_SECONDS):
            peak.bytes = max(peak.bytes, tree_bytes(process))

    watcher = threading.Thread(target=look, daemon=True)
    watcher.start()
    try:
        yield peak
    finally:
        over.set()
        watcher.join()


def tree_bytes(process: int) -> int:
    """PSS of a process and its descendants now."""
    return sum(_pss(member) for member in _descendants(process))


def _descendants(process: int) -> list[int]:
    found = [process]
    for parent in found:
        with suppress(OSError):
            for task in (_PROCESSES / str(parent) / "task").iterdir():
                found += [int(child) for child in (task / "children").read_text().split()]
    return found


def _pss(process: int) -> int:
    # A process may end while it is looked at.
    with suppress(OSError):
        for line in (_PROCESSES / str(process) / "smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0

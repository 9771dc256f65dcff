"""The memory of this machine: whether something fits into it, and what becomes of it once it is free."""

import ctypes
import sys
from functools import cache
from pathlib import Path

from protofed.errors import UserError

_GROUP = Path("/sys/fs/cgroup")

# Of glibc's malloc.h: how much is kept at the top of the heap, and from which size on a block is a mapping of its own.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEPT, _LARGE = 512 * 2**20, 128 * 2**20


def available() -> int | None:
    """Bytes that can still be used, by this machine or by the container this runs in; None where nobody tells."""
    found = [count for count in (_of_machine(), _of_container()) if count is not None]
    return min(found) if found else None


def refuse_beyond_memory(needed: float, what: str, remedy: str) -> None:
    """An error of the user where `needed` bytes are more than there are."""
    there = available()
    if there is not None and needed > there:
        raise UserError(
            f"{what} needs about {needed / 1e9:.1f} GB of memory, and {there / 1e9:.1f} GB are free; {remedy}"
        )


@cache
def keep_freed_memory() -> None:
    """Let this process use the memory of one training step again in the next, up to half a GiB of it.

    Otherwise the C library returns every large activation to the system, which hands it out again page by page, each of
    them zeroed: a tenth of the time of a step. Only blocks of 128 MiB and more still go back at once. Where the C
    library cannot be told so, nothing happens.
    """
    adjust = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if adjust is not None:
        adjust(_MMAP_THRESHOLD, _LARGE)
        adjust(_TRIM_THRESHOLD, _KEPT)


def _of_machine() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    entries = dict(line.split(":", 1) for line in lines)
    return int(entries["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in entries else None


def _of_container() -> int | None:
    try:
        limit, used = ((_GROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return None
    return None if limit == "max" else max(0, int(limit) - int(used))

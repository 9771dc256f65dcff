"""Whether something fits into the memory of this machine, asked before it is begun."""

from pathlib import Path

from protofed.errors import UserError

_GROUP = Path("/sys/fs/cgroup")


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

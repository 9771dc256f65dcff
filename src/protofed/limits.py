"""How much memory a file may ask for: what it says of itself is weighed before anything is made of it."""

import os
from math import prod
from pathlib import Path

from protofed.errors import UserError

_MOST = 16 * 2**30


def most_bytes() -> int:
    """Half of the machine's memory, and no more than 16 GiB."""
    return min(_MOST, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2)


def refuse_giants(path: Path | str, shape: tuple[int, ...], item: int = 1, what: str = "an array") -> int:
    """The bytes of an array of `shape`, whose items take `item` bytes; too many are refused."""
    size = prod(shape) * item
    if min(shape, default=0) < 0 or size > most_bytes():
        dimensions = "x".join(map(str, shape))
        raise UserError(
            f"{path} asks for {what} of {dimensions}, {size / 2**30:.1f} GiB; at most {most_bytes() / 2**30:.1f} GiB "
            "are read at once here"
        )
    return size

"""USPS: libsvm text, or the h5 file that many tutorials use."""

import bz2
import importlib
from pathlib import Path
from typing import Any

import numpy as np

from protofed.data.images import Images, RawData
from protofed.data.sources.arrays import damaged, from_unit, make_domain, make_images
from protofed.data.sources.idx import DIGITS
from protofed.data.sources.source import Size
from protofed.errors import UserError
from protofed.limits import refuse_giants

_SIDE = 16
# The longest line has 256 pixels; packed text may unfold to any length.
_LONGEST_LINE, _MOST_LINES = 16_384, 1_000_000


def read_usps(folder: Path, _: Size) -> RawData:
    """The libsvm files if they are there, since they need no further package; otherwise the h5 file."""
    if (folder / "usps.bz2").is_file() and (folder / "usps.t.bz2").is_file():
        train, test = _libsvm(folder / "usps.bz2"), _libsvm(folder / "usps.t.bz2")
    else:
        train, test = _h5(folder / "usps.h5")
    return RawData(DIGITS, {"usps": make_domain("usps", train, test, len(DIGITS))})


def _libsvm(path: Path) -> Images:
    """Lines `label index:value ...`: labels 1 to 10 for the digits 0 to 9, pixels from -1 to 1."""
    labels: list[int] = []
    rows: list[np.ndarray] = []
    try:
        with bz2.open(path, "rt", encoding="ascii") as lines:
            while line := lines.readline(_LONGEST_LINE):
                if len(rows) == _MOST_LINES or not line.endswith("\n"):
                    raise ValueError("it has lines or a number of lines that USPS has not")
                label, *pairs = line.split()
                row = np.zeros(_SIDE * _SIDE, dtype=np.float32)
                for pair in pairs:
                    index, _, value = pair.partition(":")
                    row[int(index) - 1] = float(value)
                rows.append(row)
                labels.append(int(float(label)) - 1)
        pixels = from_unit((np.stack(rows) + 1) / 2).reshape(-1, _SIDE, _SIDE)
    except (OSError, EOFError, ValueError, IndexError) as problem:
        raise damaged(path, problem) from None
    return make_images(pixels, labels, str(path))


def _h5(path: Path) -> tuple[Images, Images]:
    """Groups train and test with data N x 256 between 0 and 1, and target."""
    try:
        h5py: Any = importlib.import_module("h5py")
    except ImportError:
        raise UserError(
            f"{path} needs the package h5py to be read (pip install h5py); or put usps.bz2 and usps.t.bz2 beside it"
        ) from None
    parts: list[Images] = []
    try:
        with h5py.File(path, "r") as file:
            for part in ("train", "test"):
                refuse_giants(path, tuple(file[part]["data"].shape), 4)
                refuse_giants(path, tuple(file[part]["target"].shape), 8)
                pixels = np.asarray(file[part]["data"], dtype=np.float32).reshape(-1, _SIDE, _SIDE)
                parts.append(make_images(from_unit(pixels), np.asarray(file[part]["target"]), f"{path}, {part}"))
    except (OSError, KeyError, ValueError, TypeError, AttributeError, RuntimeError) as problem:
        raise damaged(path, problem) from None
    return parts[0], parts[1]

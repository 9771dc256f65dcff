"""npz files, checked before they are unpacked: no Python objects, nothing larger than its header or memory allows."""

import struct
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from protofed.system import check_array_size

# What a damaged archive can make numpy and zipfile raise.
READ_ERRORS = (
    OSError,
    EOFError,
    ValueError,
    KeyError,
    IndexError,
    AttributeError,
    TypeError,
    RuntimeError,
    MemoryError,
    OverflowError,
    SyntaxError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)
_LONGEST_HEADER = 10_000


class ObjectArrayError(ValueError):
    """An array of Python objects, which would be unpickled."""


def read_arrays(path: Path, required: Sequence[str] = ()) -> dict[str, NDArray[Any]]:
    """Every array of an archive by name; raises one of `READ_ERRORS`, or a UserError where it is too large.

    Names in `required` must be there, else KeyError names all that are not.
    """
    # numpy takes a file that is no archive for pickled objects.
    with path.open("rb") as file:
        if not zipfile.is_zipfile(file):
            raise zipfile.BadZipFile("not an npz file")
    with zipfile.ZipFile(path) as archive:
        entries = {entry.filename.removesuffix(".npy"): entry for entry in archive.infolist()}
        missing = [name for name in required if name not in entries]
        if missing:
            raise KeyError(", ".join(missing))
        if len(entries) < len(archive.infolist()):
            raise ValueError("it holds an array twice")
        check_array_size(path, (sum(entry.file_size for entry in entries.values()),), what="arrays")
        return {name: _array(archive, entry) for name, entry in entries.items()}


def _array(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> NDArray[Any]:
    with archive.open(entry) as file:
        version = npy.read_magic(file)
        read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
        shape, _, dtype = read_header(file, max_header_size=_LONGEST_HEADER)
        if dtype.hasobject:
            raise ObjectArrayError(f"{entry.filename} holds Python objects")
        size = check_array_size(f"{archive.filename}: {entry.filename}", shape, dtype.itemsize)
        if size > entry.file_size:
            raise ValueError(f"{entry.filename} is shorter than its header says")
    with archive.open(entry) as file:
        return np.asarray(npy.read_array(file, allow_pickle=False, max_header_size=_LONGEST_HEADER))

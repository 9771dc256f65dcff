"""npz files, checked before they are unpacked: no Python objects, nothing larger than its header or memory allows."""

import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import IO, Any, NamedTuple

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
_PIECE = 32 * 2**20
"""Bytes that are unpacked together where an array is read in pieces."""


class ObjectArrayError(ValueError):
    """An array of Python objects, which would be unpickled."""


class ArrayRows:
    """An array of an archive that is not unpacked yet; raises one of `READ_ERRORS`, or a UserError if too large."""

    def __init__(self, path: Path, name: str) -> None:
        self._path = path
        self._entry = f"{name}.npy"
        with zipfile.ZipFile(path) as archive:
            self.shape, _, self.dtype = self._header = _checked_header(archive, archive.getinfo(self._entry))

    def pieces(self) -> Iterator[NDArray[Any]]:
        """All rows in order, a few at a time; at once where they are not stored row by row."""
        with zipfile.ZipFile(self._path) as archive:
            entry = archive.getinfo(self._entry)
            if _checked_header(archive, entry) != self._header:
                raise ValueError("it changed while it was read")
            row = prod(self.shape[1:]) * self.dtype.itemsize
            if self._header.columns_first or not row:
                yield _array(archive, entry)
                return
            with archive.open(entry) as file:
                _read_header(file)
                for start in range(0, self.shape[0], max(1, _PIECE // row)):
                    wanted = min(max(1, _PIECE // row), self.shape[0] - start) * row
                    content = file.read(wanted)
                    if len(content) < wanted:
                        raise EOFError(f"{self._entry} is shorter than its header says")
                    yield np.frombuffer(content, dtype=self.dtype).reshape(-1, *self.shape[1:])
                file.read(1)  # the end, where the checksum is compared


def unpacked_bytes(path: Path) -> int:
    """What all arrays of an archive take together; 0 where it cannot be read, of which `read_arrays` tells."""
    try:
        with zipfile.ZipFile(path) as archive:
            return sum(entry.file_size for entry in archive.infolist())
    except READ_ERRORS:
        return 0


def read_arrays(path: Path, required: Sequence[str] = (), packed: Sequence[str] = ()) -> dict[str, NDArray[Any]]:
    """Every array of an archive by name; raises one of `READ_ERRORS`, or a UserError where it is too large.

    Names in `required` must be there, else KeyError names all that are not. Those in `packed` are left out, for
    `ArrayRows`.
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
            raise ValueError("it contains an array twice")
        check_array_size(path, (sum(entry.file_size for entry in entries.values()),), what="arrays")
        return {name: _array(archive, entry) for name, entry in entries.items() if name not in packed}


class _ArrayHeader(NamedTuple):
    shape: tuple[int, ...]
    columns_first: bool
    dtype: np.dtype[Any]


def _read_header(file: IO[bytes]) -> _ArrayHeader:
    version = npy.read_magic(file)
    read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    return _ArrayHeader(*read_header(file, max_header_size=_LONGEST_HEADER))


def _checked_header(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> _ArrayHeader:
    """What an array is, if it is plain numbers or text and as large as it says."""
    with archive.open(entry) as file:
        header = _read_header(file)
    if header.dtype.hasobject:
        raise ObjectArrayError(f"{entry.filename} holds Python objects")
    size = check_array_size(f"{archive.filename}: {entry.filename}", header.shape, header.dtype.itemsize)
    if size > entry.file_size:
        raise ValueError(f"{entry.filename} is shorter than its header says")
    return header


def _array(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> NDArray[Any]:
    _checked_header(archive, entry)
    with archive.open(entry) as file:
        return np.asarray(npy.read_array(file, allow_pickle=False, max_header_size=_LONGEST_HEADER))

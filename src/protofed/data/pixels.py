"""The pixels of a data set: a tensor where they are few, a file that is read in pieces where they are many."""

import logging
import mmap
import os
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b
from math import prod
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protofed.errors import UserError
from protofed.system import available_memory, cache_folder, require_memory

log = logging.getLogger("protofed")

MEMORY_LIMIT = 512 * 2**20
"""Bytes of pixels that a data set keeps in memory; one that has more keeps all of them in files."""

_PIECE = 32 * 2**20
"""Bytes of pixels that are looked at together where all of them are."""


class PixelFile:
    """An array in a file that has no name, so that nothing is left behind however a process ends.

    Rows are read and written by their place: threads and forked processes may do so at the same time. Nothing is
    mapped: what was read is forgotten when the caller is done with it.
    """

    def __init__(self, shape: Sequence[int], dtype: type[np.generic] = np.uint8, folder: Path | None = None) -> None:
        self.shape = tuple(shape)
        self.dtype = np.dtype(dtype)
        self._row = prod(self.shape[1:]) * self.dtype.itemsize
        self._folder = folder or cache_folder()
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file = TemporaryFile(dir=self._folder, buffering=0)  # noqa: SIM115 - it lives as long as the array
        _claim(self._file.fileno(), self._row * len(self))

    def __len__(self) -> int:
        return self.shape[0]

    def __setitem__(self, place: int | slice, values: NDArray[Any]) -> None:
        first, last, _ = (place if isinstance(place, slice) else slice(place, place + 1)).indices(len(self))
        rows = np.broadcast_to(values, (last - first, *self.shape[1:]))
        content = np.ascontiguousarray(rows, dtype=self.dtype).reshape(-1).view(np.uint8).data
        offset = first * self._row
        while len(content):
            try:
                written = os.pwrite(self._file.fileno(), content, offset)
            except OSError as problem:
                raise UserError(f"{self._folder}: decoded images cannot be written ({problem.strerror})") from None
            content, offset = content[written:], offset + written

    def __getitem__(self, place: int) -> NDArray[Any]:
        row: NDArray[Any] = self.read(np.array([place]))[0]
        return row

    def read(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        """The rows at these places, in that order; those that lie together are read together."""
        found = np.empty((len(rows), *self.shape[1:]), dtype=self.dtype)
        if not found.size:
            return found
        content = found.reshape(-1).view(np.uint8).data
        breaks = np.flatnonzero(np.diff(rows) != 1) + 1
        for first, last in zip((0, *breaks.tolist()), (*breaks.tolist(), len(rows)), strict=True):
            self._read_into(content[first * self._row : last * self._row], int(rows[first]) * self._row)
        return found

    def _read_into(self, target: memoryview, offset: int) -> None:
        while len(target):
            try:
                count = os.preadv(self._file.fileno(), [target], offset)
            except OSError as problem:
                raise UserError(f"{self._folder}: decoded images cannot be read ({problem.strerror})") from None
            if not count:
                raise UserError(f"{self._folder}: the file of decoded images was truncated; start again")
            target, offset = target[count:], offset + count


def _claim(file: int, size: int) -> None:
    """Take the room on disk before the work begins, so that a full disk is known at once; raises OSError."""
    if size and hasattr(os, "posix_fallocate"):  # not on every system
        os.posix_fallocate(file, 0, size)


class UndecodedPixels:
    """Pixels of files that were decoded before: each is decoded again when it is asked for, and by its hash never.

    The room for them is shared with processes that are forked later: an image is decoded once for all of them, and
    those that nobody asks for take no room.
    """

    def __init__(
        self, shape: Sequence[int], digests: Sequence[bytes], decode: Callable[[Sequence[int]], Sequence[NDArray[Any]]]
    ) -> None:
        """`decode` gives the pixels of some rows; `digests` are the hashes of all."""
        self.shape = tuple(shape)
        self.digests = tuple(digests)
        self._decode = decode
        self._array = np.frombuffer(mmap.mmap(-1, prod(self.shape)), dtype=np.uint8).reshape(self.shape)
        self._decoded = np.frombuffer(mmap.mmap(-1, len(self)), dtype=np.uint8)

    def __len__(self) -> int:
        return self.shape[0]

    def read(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        """The rows at these places, in that order."""
        missing = np.unique(rows[self._decoded[rows] == 0]).tolist()
        # Should two processes do this at once, both write the same.
        for row, pixels in zip(missing, self._decode(missing) if missing else (), strict=True):
            self._array[row] = pixels
        self._decoded[missing] = 1
        found: NDArray[Any] = self._array[rows]
        return found


_Part: TypeAlias = Tensor | PixelFile | UndecodedPixels


class StoredPixels:
    """Images uint8 [N, C, H, W] that are read when they are asked for: an index gives a plain tensor."""

    dtype = torch.uint8
    ndim = 4

    def __init__(self, parts: Sequence[_Part], rows: Tensor | None = None) -> None:
        """Some rows of files, or tensors, laid end to end; without `rows` all of them."""
        self._parts = tuple(parts)
        self._rows = torch.arange(sum(map(len, self._parts))) if rows is None else rows
        self.shape = torch.Size((len(self._rows), *self._parts[0].shape[1:]))

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int | slice | Tensor | list[int]) -> Tensor:
        rows = self._rows[index]
        found = self._read(rows.reshape(-1))
        return found if rows.ndim else found[0]

    def select(self, positions: Tensor) -> "StoredPixels":
        """The images at these positions, still unread."""
        return StoredPixels(self._parts, self._rows[positions])

    def digest(self, index: int) -> bytes | None:
        """The hash of an image, where it is known without its pixels."""
        row = int(self._rows[index])
        for part in self._parts:
            if row < len(part):
                return part.digests[row] if isinstance(part, UndecodedPixels) else None
            row -= len(part)
        raise IndexError(index)

    @staticmethod
    def joined(several: Sequence["Pixels"]) -> "StoredPixels":
        """One after the other, still unread."""
        parts: list[_Part] = []
        rows: list[Tensor] = []
        start = 0
        for pixels in several:
            stored = pixels if isinstance(pixels, StoredPixels) else StoredPixels([pixels])
            parts += stored._parts
            rows.append(stored._rows + start)
            start += sum(map(len, stored._parts))
        return StoredPixels(parts, torch.cat(rows))

    def _read(self, rows: Tensor) -> Tensor:
        found = torch.empty(len(rows), *self.shape[1:], dtype=torch.uint8)
        start = 0
        for part in self._parts:
            here = (rows >= start) & (rows < start + len(part))
            wanted = rows[here] - start
            start += len(part)
            if not len(wanted):
                continue
            content = part[wanted] if isinstance(part, Tensor) else torch.from_numpy(part.read(wanted.numpy()))
            if len(wanted) == len(rows):
                return content.contiguous()
            found[here] = content
        return found


Pixels: TypeAlias = Tensor | StoredPixels
"""uint8 [N, C, H, W]; an index gives a tensor."""

PixelArray: TypeAlias = NDArray[Any] | PixelFile
"""An array to be filled row by row."""


def empty_pixels(shape: Sequence[int], total: int, dtype: type[np.generic] = np.uint8) -> PixelArray:
    """Room for pixels of this shape: in memory, or on disk where `total`, the bytes of the whole data set, are many.

    A disk without room is told, and the memory takes its place where it has enough.
    """
    size = prod(shape) * np.dtype(dtype).itemsize
    if not fits_in_memory(shape, total, dtype):
        try:
            return PixelFile(shape, dtype)
        except OSError as problem:
            why = f"{cache_folder()} has no room for {size / 1e9:.1f} GB of decoded images ({problem.strerror})"
        what = f"{why}; reading {shape[0]} images at {shape[2]}x{shape[3]}"
        require_memory(size, what, "set PROTOFED_CACHE to a folder with more space, or lower --image-size")
        log.warning("%s; they are kept in memory; set PROTOFED_CACHE to a folder with more space", why)
    return np.empty(shape, dtype=dtype)


def fits_in_memory(shape: Sequence[int], total: int, dtype: type[np.generic] = np.uint8) -> bool:
    """Whether pixels of this shape, of a data set of `total` bytes, are kept in memory."""
    free = available_memory()
    return total <= MEMORY_LIMIT and (free is None or prod(shape) * np.dtype(dtype).itemsize <= free)


def filled(array: PixelArray) -> Pixels:
    """What was written, to be read."""
    return StoredPixels([array]) if isinstance(array, PixelFile) else torch.from_numpy(array)


def select(x: Pixels, positions: Tensor) -> Pixels:
    """The images at these positions: of what is in memory a copy, unless they lie in a row; a view of what is not."""
    if isinstance(x, StoredPixels):
        return x.select(positions)
    first, last = (int(positions[0]), int(positions[-1])) if len(positions) else (0, -1)
    in_a_row = last - first + 1 == len(positions) and bool((positions.diff() == 1).all())
    return x[first : last + 1] if in_a_row else x[positions]


def join(several: Sequence[Pixels]) -> Pixels:
    """One after the other: a copy of what is in memory, a view where some are not."""
    tensors = [x for x in several if isinstance(x, Tensor)]
    return torch.cat(tensors) if len(tensors) == len(several) else StoredPixels.joined(several)


def digest_of(x: Pixels, index: int) -> bytes:
    """A hash of the pixels of one image."""
    known = x.digest(index) if isinstance(x, StoredPixels) else None
    return known or pixel_digest(x[index].cpu().numpy())


def pixel_digest(pixels: NDArray[Any]) -> bytes:
    """A hash of the pixels of one image, [C, H, W]."""
    return blake2b(np.ascontiguousarray(pixels).data, digest_size=16).digest()


def pieces(x: Pixels, size: int | None = None) -> Iterator[Tensor]:
    """All images in order, so many at a time, or as many as a bounded memory allows; at least one piece."""
    step = size or max(1, _PIECE // max(1, prod(x.shape[1:])))
    for start in range(0, max(1, len(x)), step):
        yield x[start : start + step]

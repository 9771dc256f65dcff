"""Where the features behind a frozen prefix are kept: in memory that all processes of a run share, the rest on disk."""

import mmap
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryFile
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from protofed.clients.samples import SampleSet

MEMORY_LIMIT = 2 * 2**30
"""Bytes of features a run keeps in memory; those beyond go to a file."""

_ALIGNMENT = 64
_EMPTY, _FILLED, _NO_ROOM = 0, 1, 2


class FeatureKey(NamedTuple):
    """What features are computed from: some samples, and the frozen stages of an architecture."""

    samples: SampleSet
    architecture: int = 0


class FeatureBlock(NamedTuple):
    """Features of one sample set: so many rows of so many numbers."""

    rows: int
    width: int


class FeatureStore:
    """A block for every sample set and architecture, filled when it is first asked for, by whichever process asks.

    Memory and file are reserved before processes are forked and are theirs together: a block is filled once for all of
    them. Pages that nobody writes take no room. The file has no name, so nothing is left behind however a run ends.
    """

    def __init__(
        self,
        blocks: Mapping[FeatureKey, FeatureBlock],
        dtype: torch.dtype,
        folder: Path,
        limit: int = MEMORY_LIMIT,
        passing: Mapping[FeatureKey, FeatureBlock] = MappingProxyType({}),
    ) -> None:
        """`passing` are blocks that are needed once: each is kept until another is asked for, by one process alone."""
        self._blocks = blocks
        self._passing = passing
        self._latest: tuple[FeatureKey, Tensor] | None = None
        self._dtype = dtype
        self._number = {key: number for number, key in enumerate(blocks)}
        self._place: dict[FeatureKey, tuple[bool, int]] = {}
        sizes = {True: 0, False: 0}
        for key, block in blocks.items():
            size = bytes_of(block, dtype)
            in_memory = sizes[True] + size <= limit
            self._place[key] = in_memory, sizes[in_memory]
            sizes[in_memory] += size
        self._state = mmap.mmap(-1, max(1, len(blocks)))
        self._memory = mmap.mmap(-1, sizes[True]) if sizes[True] else None
        self._file: Any = None
        if sizes[False]:
            self._file = TemporaryFile(dir=folder)  # noqa: SIM115 - it lives as long as the store
            os.truncate(self._file.fileno(), sizes[False])
            self._disk = mmap.mmap(self._file.fileno(), sizes[False])

    def rows(self, key: FeatureKey, fill: Callable[[Tensor], None]) -> Tensor | None:
        """The features of a sample set, [rows, width], which `fill` writes once; None where the disk is full."""
        if key in self._passing:
            return self._passed(key, fill)
        number, block = self._number[key], self._blocks[key]
        in_memory, offset = self._place[key]
        if self._state[number] == _EMPTY and not in_memory and not self._reserve(offset, bytes_of(block, self._dtype)):
            self._state[number] = _NO_ROOM
        if self._state[number] == _NO_ROOM:
            return None
        buffer = self._memory if in_memory else self._disk
        count = block.rows * block.width
        view = torch.frombuffer(buffer, dtype=self._dtype, count=count, offset=offset).view(block)
        if self._state[number] == _EMPTY:
            # Should two processes do this at once, both write the same.
            fill(view)
            self._state[number] = _FILLED
        return view

    def _passed(self, key: FeatureKey, fill: Callable[[Tensor], None]) -> Tensor:
        if self._latest is None or self._latest[0] != key:
            rows = torch.empty(*self._passing[key], dtype=self._dtype)
            fill(rows)
            self._latest = key, rows
        return self._latest[1]

    def _reserve(self, offset: int, size: int) -> bool:
        """Claim the disk before the pages are written: a full disk would kill the process that writes them."""
        if not hasattr(os, "posix_fallocate"):
            return True  # not on every system
        try:
            os.posix_fallocate(self._file.fileno(), offset, size)
        except OSError:
            return False
        return True


def bytes_of(block: FeatureBlock, dtype: torch.dtype) -> int:
    """Size of a block in bytes."""
    size = block.rows * block.width * dtype.itemsize
    return -(-size // _ALIGNMENT) * _ALIGNMENT

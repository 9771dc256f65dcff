"""Where the features behind a frozen prefix are kept: in memory that all processes of a run share, the rest on disk."""

import mmap
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

MEMORY_LIMIT = 2 * 2**30
"""Bytes of features a run keeps in memory; those beyond go to a file."""

_ALIGNMENT = 64
_EMPTY, _FILLED, _NO_ROOM = 0, 1, 2


class SampleSet(NamedTuple):
    """Samples that are always looked at together and in one order: what a shelf of features is named after."""

    kind: Literal["train", "validation", "holdout", "test"]
    owner: str
    """The client, or the domain of a test set."""
    architecture: int = 0


class FeatureBlock(NamedTuple):
    """Features of one sample set: so many rows of so many numbers."""

    rows: int
    width: int


class FeatureStore:
    """A shelf for every sample set, filled when it is first asked for, by whichever process asks.

    Memory and file are reserved before processes are forked and are theirs together: a shelf is filled once for all of
    them. Pages that nobody writes take no room. The file has no name, so nothing is left behind however a run ends.
    """

    def __init__(
        self,
        feature_blocks: Mapping[SampleSet, FeatureBlock],
        dtype: torch.dtype,
        folder: Path,
        limit: int = MEMORY_LIMIT,
    ) -> None:
        self._blocks = feature_blocks
        self._dtype = dtype
        self._number = {samples: number for number, samples in enumerate(feature_blocks)}
        self._place: dict[SampleSet, tuple[bool, int]] = {}
        sizes = {True: 0, False: 0}
        for samples, block in feature_blocks.items():
            size = bytes_of(block, dtype)
            in_memory = sizes[True] + size <= limit
            self._place[samples] = in_memory, sizes[in_memory]
            sizes[in_memory] += size
        self._state = mmap.mmap(-1, max(1, len(feature_blocks)))
        self._memory = mmap.mmap(-1, sizes[True]) if sizes[True] else None
        self._file: Any = None
        if sizes[False]:
            self._file = TemporaryFile(dir=folder)  # noqa: SIM115 - it lives as long as the store
            os.truncate(self._file.fileno(), sizes[False])
            self._disk = mmap.mmap(self._file.fileno(), sizes[False])

    def rows(self, samples: SampleSet, fill: Callable[[Tensor], None]) -> Tensor | None:
        """The features of a sample set, [rows, width], which `fill` writes once; None where the disk is full."""
        number, block = self._number[samples], self._blocks[samples]
        in_memory, offset = self._place[samples]
        if self._state[number] == _EMPTY and not in_memory and not self._has_room(offset, bytes_of(block, self._dtype)):
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

    def _has_room(self, offset: int, size: int) -> bool:
        """Claim the disk before the pages are written: a full disk would kill the process that writes them."""
        if not hasattr(os, "posix_fallocate"):
            return True  # not on every system
        try:
            os.posix_fallocate(self._file.fileno(), offset, size)
        except OSError:
            return False
        return True


def bytes_of(block: FeatureBlock, dtype: torch.dtype) -> int:
    """What a shelf takes."""
    size = block.rows * block.width * dtype.itemsize
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class Recall:
    """Knows what comes out of the prefix for the batch that was handed out last, and for no other tensor.

    A method that changes its images has changed tensors, and those are computed from the beginning.
    """

    def __init__(self) -> None:
        self._batch: Tensor | None = None
        self._version = -1
        self._features: Callable[[], Tensor | None] | None = None

    def note(self, x: Tensor, features: Callable[[], Tensor | None]) -> None:
        """This is the batch now at hand."""
        self._batch, self._version, self._features = x, x._version, features

    def forget(self) -> None:
        """There is no batch at hand."""
        self._batch = self._features = None

    def __call__(self, x: Tensor) -> Tensor | None:
        """The features of x, a copy."""
        if x is not self._batch or x._version != self._version or self._features is None:
            return None
        return self._features()

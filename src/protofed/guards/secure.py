"""What goes into a secure sum and what comes out: an upload as words on a grid, and a total from their sum.

The sum itself is that of `guards/masking` in a deployment, where sites mask their words for each other. In one process
there is nobody to hide from, so the words are added up as they are: the results are those of a deployment.
"""

from collections.abc import Iterator, Mapping
from math import ceil, log2
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protofed.errors import BadMessage
from protofed.guards.masking import FEWEST
from protofed.records import Record, Sum, Sums, parts_of
from protofed.records.tally import averaged, weighted
from protofed.records.types import map_tensors


class SecureTally:
    """Takes the place of a `Tally`: uploads go in client by client, and only their sum comes out.

    A participant whose upload was not added has dropped out; the others still come to the sum of theirs.
    """

    def __init__(self, words: "UploadWords", participants: int, like: Record) -> None:
        self.clients: list[str] = []
        self._participants = participants
        self._like = like
        self._words = words
        self._sum = np.zeros(self._words.size, dtype=self._words.grid.word)

    def add(self, client: str, upload: Record) -> None:
        """Take in one client's upload; one whose numbers are too large for the grid cannot be used."""
        self._sum += self._words.of(upload, client)
        self.clients.append(client)

    def total(self) -> Record:
        """The averages, from the sum."""
        if len(self.clients) < FEWEST:
            raise RuntimeError(f"secure aggregation failed: too few of {self._participants} clients stayed to the end")
        return averaged(self._words.sums(self._sum).by_field, self._like)


class UploadWords:
    """Uploads as vectors of words that may be added up, and their sum as an upload's sums again.

    Words have 32 bits, as many as a weight; 64 where the sum itself is used, in float64, as `Sum` fields are.

    Everything here is known to all: how many clients there are, the sizes of their data, what an upload looks like.
    """

    def __init__(self, clients: int, sizes: Mapping[str, int], like: Record, largest: float) -> None:
        sums = any(isinstance(item, Sum) for item in parts_of(like).values())
        self.grid = FixedPointGrid(largest, clients, 64 if sums else 32)
        self._like = like
        self._largest_client = float(max(sizes.values()))
        self._scales = [(tensor.numel(), scale) for tensor, scale in self._summands(like)]

    @property
    def size(self) -> int:
        """How many words an upload has."""
        return sum(number for number, _ in self._scales)

    @property
    def nbytes(self) -> int:
        """How many bytes these take."""
        return self.size * self.grid.word.itemsize

    def of(self, upload: Record, sender: str) -> NDArray[Any]:
        """Weight x value, the weights and the counts of all fields, each divided by its scale, as words."""
        flat = torch.cat([tensor.double().flatten() / scale for tensor, scale in self._summands(upload)])
        return self.grid.words(np.asarray(flat), sender)

    def sums(self, words: NDArray[Any]) -> Sums:
        """The same in reverse, of a sum of words."""
        pieces = torch.split(torch.from_numpy(self.grid.numbers(words)), [size for size, _ in self._scales])
        numbers = (piece * scale for piece, (_, scale) in zip(pieces, self._scales, strict=True))
        return Sums(map_tensors(weighted(self._like), lambda like: next(numbers).reshape(like.shape)))

    def _summands(self, upload: Record) -> Iterator[tuple[Tensor, float]]:
        """Every tensor of the sum with its scale: known to all, and no smaller than what it is multiplied by."""
        parts = weighted(upload)
        for name, item in parts_of(self._like).items():
            weight = torch.as_tensor(item.weight)
            counts = weight.ndim > 0 or float(weight) > 1
            yield from self._scaled(parts[name], self._largest_client if counts else 1.0)

    def _scaled(self, part: Any, scale: float) -> Iterator[tuple[Tensor, float]]:
        if isinstance(part, Tensor):
            yield part, scale
        elif isinstance(part, dict):
            for item in part.values():
                yield from self._scaled(item, scale)
        else:
            for name, item in parts_of(part).items():
                yield from self._scaled(item, self._largest_client if name == "count" else scale)


class FixedPointGrid:
    """Numbers up to `largest` in steps so fine that the sum over all clients still fits into a signed word."""

    def __init__(self, largest: float, clients: int, bits: int = 32) -> None:
        # Powers of two, so that every point of the grid is exact in float64.
        self.largest = 2.0 ** ceil(log2(largest))
        self._step = 2 * self.largest / 2 ** (bits - 1 - ceil(log2(clients)))
        self.bits = bits
        self.word = np.dtype(f"<u{bits // 8}")

    def words(self, vector: NDArray[Any], sender: str) -> NDArray[Any]:
        """The nearest points of the grid, modulo 2^bits."""
        peak = float(np.abs(vector).max(initial=0.0))
        if not peak <= self.largest:
            raise BadMessage(
                f"{sender}: numbers up to {peak:.3g} exceed the range of secure aggregation, {self.largest:g}; "
                "raise secure_range of the guard"
            )
        return np.asarray(np.rint(vector / self._step).astype(np.int64).astype(self.word))

    def numbers(self, words: NDArray[Any]) -> NDArray[Any]:
        """What words stand for."""
        return np.asarray(words.astype(self.word).view(f"<i{self.bits // 8}") * self._step)

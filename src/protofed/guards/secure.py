"""Secure aggregation: the server learns the sum of the uploads and nothing of a single one (SecAgg+, by Flower).

Bell, Bonawitz, Gascón, Lepoint, Raykova. Secure Single-Server Aggregation with (Poly)Logarithmic Overhead. CCS 2020.
Keys, shares, masks and their removal are Flower's; here is what goes in and what comes out: an upload as numbers on a
grid, and a total from their sum. Numbers are put on the grid before Flower sees them, so that its random rounding has
nothing to round and a run can be repeated.
"""

from collections.abc import Iterator, Mapping, Sequence
from math import ceil, log2
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from protofed.errors import BadMessage, UserError
from protofed.records import Record, parts_of
from protofed.records.tally import averaged, weighted
from protofed.records.types import map_tensors

_MAX_SHARES = 17
"""Neighbours among whom a client's keys are shared; all clients, where there are no more."""


def require_flower() -> None:
    """Refuse early where Flower is not installed."""
    try:
        import flwr.client.mod  # noqa: F401
    except ImportError:
        raise UserError("secure aggregation needs Flower: pip install 'protofed[flower]'") from None


class SecureTally:
    """Takes the place of a `Tally`: uploads go in client by client, and only their sum comes out.

    A participant whose upload was not added has dropped out after the keys were agreed upon; the others still come to
    the sum of theirs. In a simulation all parties are in one process, which proves the arithmetic and not the secrecy.
    """

    def __init__(self, participants: Sequence[str], sizes: Mapping[str, int], like: Record, largest: float) -> None:
        self.clients: list[str] = []
        self._participants = list(participants)
        self._like = like
        self._largest_client = float(max(sizes.values()))
        self._grid = _FixedPointGrid(largest, len(self._participants))
        self._vectors: dict[str, NDArray[Any]] = {}

    def add(self, client: str, upload: Record) -> None:
        """Take in one client's upload; one whose numbers are too large for the grid cannot be used."""
        self._vectors[client] = self._grid.nearest(self._flat(upload), client)
        self.clients.append(client)

    def total(self) -> Record:
        """The averages, from the sum."""
        total = _secure_sum(self._participants, self._vectors, self._grid.largest, self._grid.levels)
        return averaged(self._unflat(total), self._like)

    def _flat(self, upload: Record) -> NDArray[Any]:
        """Weight x value, the weights and the counts of all fields, each divided by its scale, in one vector."""
        return np.asarray(torch.cat([tensor.double().flatten() / scale for tensor, scale in self._summands(upload)]))

    def _unflat(self, vector: NDArray[Any]) -> dict[str, Any]:
        """The same in reverse."""
        shapes = [(tensor.numel(), scale) for tensor, scale in self._summands(self._like)]
        pieces = torch.split(torch.from_numpy(vector), [size for size, _ in shapes])
        numbers = (piece * scale for piece, (_, scale) in zip(pieces, shapes, strict=True))
        return map_tensors(weighted(self._like), lambda like: next(numbers).reshape(like.shape))

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


class _FixedPointGrid:
    """Numbers up to `largest` in steps so fine that the sum over all clients still fits into the modulus."""

    def __init__(self, largest: float, clients: int) -> None:
        # Powers of two, so that every point of the grid is exact in float64.
        self.largest = 2.0 ** ceil(log2(largest))
        self.levels = 2 ** (31 - ceil(log2(clients)))

    def nearest(self, vector: NDArray[Any], sender: str) -> NDArray[Any]:
        """The nearest points of the grid."""
        peak = float(np.abs(vector).max(initial=0.0))
        if peak > self.largest:
            raise BadMessage(
                f"{sender}: numbers up to {peak:.3g} do not fit into secure aggregation up to {self.largest:g}; raise "
                "secure_range of the guard"
            )
        step = 2 * self.largest / self.levels
        return np.asarray(np.rint(vector / step) * step)


def _secure_sum(
    participants: Sequence[str], vectors: Mapping[str, NDArray[Any]], largest: float, levels: int
) -> NDArray[Any]:
    """The sum of the vectors by SecAgg+; participants without one drop out when vectors are collected."""
    from protofed.guards.flower_secagg import mean_by_secagg

    shares = min(len(participants), _MAX_SHARES)
    nodes = {number: vectors.get(client) for number, client in enumerate(participants, start=1)}
    mean = mean_by_secagg(nodes, shares, shares // 2 + 1, largest, levels)
    if mean is None:
        raise RuntimeError(f"secure aggregation failed: too few of {len(participants)} clients stayed until the end")
    return mean * len(vectors)

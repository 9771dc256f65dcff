"""Gaussian noise on sums over clients: what each client adds to what it sends, and what the noise leaves of a total.

The parts of an upload (rows and counts of its tables) are one Gaussian mechanism: with a noise multiplier z all of it
is rho-zCDP with rho = 1 / (2 z^2), and a part with the share p of rho gets noise of deviation z / sqrt(p), in units of
what one sample or client can change of it.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from math import sqrt
from typing import Any, TypeVar

import torch
from torch import Tensor

from protofed.guards.guard import Guard
from protofed.guards.random_source import source_of
from protofed.method import At, Method, SumSensitivity
from protofed.records import ClassTable, NoisedTable, Record, Sum, parts_of

R = TypeVar("R", bound=Record)

_FEWEST = 1.0
"""Samples of a class at least, after noise; of a client whose part is bounded as a whole, shared by all classes."""


def sends_sums(upload: Record) -> bool:
    """Whether anything in an upload is added up and never divided."""
    return any(isinstance(item, Sum) for item in parts_of(upload).values())


def sensitivity_of(method: Method, guard: Guard, at: At) -> Mapping[str, SumSensitivity]:
    """What one unit can change of the method's sums, where the guard adds noise to them."""
    return method.sum_sensitivity(guard.unit, guard.effective_row_clip or 1.0, at) if guard.noisy else {}


def noised_form(guard: Guard, upload: R) -> R:
    """The upload in the structure it has under noise: sums have a row for every class, whoever holds it."""
    if not guard.noisy or not sends_sums(upload):
        return upload
    parts = {name: _noised(item, item.value.rows, item.value.count, 1.0) for name, item in parts_of(upload).items()}
    return replace(upload, **parts)  # type: ignore[type-var]


class SumMechanism:
    """Adds a client's noise to its part of the sums."""

    def __init__(self, guard: Guard, upload: Record, sensitivity: Mapping[str, SumSensitivity], at: At) -> None:
        self._sensitivity = sensitivity
        self._source = source_of(guard, at, "sums")
        self._weight = client_weight(guard, sensitivity, at.size, at.classes)
        # One factor for all a client sends: its means stay what they are.
        self._shrink = _shrink(guard.clip or 1.0, upload, sensitivity) if guard.unit == "client" else 1.0
        self._unit = (guard.clip or 1.0) if guard.unit == "client" else 1.0
        self._deviation = noise_multiplier(guard) * self._unit / sqrt(guard.among)

    def field(self, name: str, item: Any) -> Any:
        """A field of the upload as it may leave."""
        table = item.value
        if not len(table.count):
            return _noised(item, table.rows, table.count, self._weight)
        known = self._sensitivity[name]
        rows, count = (part * self._shrink for part in _summed(table))
        rows = rows + self._deviation / sqrt(known.rows) * known.scale * self._source.normal(rows)
        if known.count:
            count = count + self._deviation / sqrt(known.count) * self._source.normal(count)
        else:
            count = torch.ones_like(count)
        return _noised(item, rows.to(table.rows), count.to(table.count), self._weight)


def noise_multiplier(guard: Guard) -> float:
    """Of the mechanism that covers the sums."""
    return guard.noise if guard.unit == "client" else guard.effective_row_noise


def client_weight(guard: Guard, sensitivity: Mapping[str, SumSensitivity], size: int, classes: int) -> float:
    """How much a client's noised part counts in a sum: less where noise is large beside the number of its samples.

    Where noise is shared only the plain sum has enough of it.
    """
    if guard.unit == "client" or guard.among > 1:
        return 1.0
    share = sum(known.count for known in sensitivity.values())
    # Of the noised number of its samples.
    deviation = noise_multiplier(guard) * sqrt(classes / share)
    return size / (size + deviation)


def noise_on_sum(
    guard: Guard, sensitivity: Mapping[str, SumSensitivity], sizes: Collection[int], classes: int
) -> tuple[float, float]:
    """Of the sum over clients of these sizes: the deviation of its noise for a number that has all of the budget, and
    how many units it is of. See `At.noise`."""
    if not guard.noisy or not sensitivity:
        return 0.0, 0.0
    weights = [client_weight(guard, sensitivity, size, classes) for size in sizes]
    deviation = noise_multiplier(guard) * sqrt(sum(weight**2 for weight in weights) / guard.among)
    if guard.unit == "client":
        clip = guard.clip or 1.0
        return deviation * clip, len(weights) * clip
    return deviation, sum(weight * size for weight, size in zip(weights, sizes, strict=True))


def possible_total(guard: Guard, sensitivity: Mapping[str, SumSensitivity], total: R) -> R:
    """Totals after noise as totals can be: no class has less than nothing, no direction negative variance."""
    if not guard.noisy or not sensitivity:
        return total
    changed: dict[str, Any] = {}
    for name, known in sensitivity.items():
        table = getattr(total, name)
        fewest = _FEWEST if guard.unit == "sample" else _FEWEST / max(len(table.count), 1)
        rows = table.rows if known.possible is None else known.possible(table.rows)
        changed[name] = ClassTable(rows, table.count.clamp(min=fewest))
    return replace(total, **changed)  # type: ignore[type-var]


def _shrink(bound: float, upload: Record, sensitivity: Mapping[str, SumSensitivity]) -> float:
    """The factor that leaves no part of the upload with a norm above the bound."""
    norms = [0.0]
    for name, known in sensitivity.items():
        rows, count = _summed(getattr(upload, name).value)
        norms += [float((rows / known.scale).norm()), float(count.norm()) if known.count else 0.0]
    return min(1.0, bound / max(*norms, 1e-12))


def _summed(table: ClassTable) -> tuple[Tensor, Tensor]:
    count = table.count.double()
    return table.rows.double() * count[:, None], count


def _noised(item: Any, rows: Tensor, count: Tensor, weight: float) -> Any:
    weights = torch.full((len(count),), weight, dtype=torch.float64)
    return type(item)(NoisedTable(rows, count), weights)

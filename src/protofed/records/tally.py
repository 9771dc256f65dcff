"""The sum over clients: what turns many uploads into the one thing a method's `aggregate` sees."""

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from protofed.records.types import ClassTable, Each, Mean, Record, map_tensors


class Tally:
    """Folds uploads one by one: `Mean` fields into a running float64 sum, `Each` fields into {client: value}.

    Clients must be added in one canonical order: floating-point sums depend on it, results must not.
    """

    def __init__(self) -> None:
        self.clients: list[str] = []
        self._sums: dict[str, _WeightedSum] = {}
        self._each: dict[str, dict[str, Any]] = {}

    def add(self, client: str, upload: Record) -> None:
        """Take in one client's upload."""
        self.clients.append(client)
        for entry in fields(upload):  # type: ignore[arg-type]
            value = getattr(upload, entry.name)
            if isinstance(value, Mean):
                self._sums.setdefault(entry.name, _WeightedSum()).add(value)
            elif isinstance(value, Each):
                self._each.setdefault(entry.name, {})[client] = value.value
            else:
                raise TypeError(f"upload field {entry.name!r} must be a Mean or an Each, not {type(value).__name__}")

    def total(self) -> SimpleNamespace:
        """The upload's fields by name: Means averaged, Eaches by client."""
        return SimpleNamespace(**{name: total.mean() for name, total in self._sums.items()}, **self._each)


class _WeightedSum:
    """Sum of weight x value and of the weights, divided once at the end."""

    def __init__(self) -> None:
        self._sum: Any = None
        self._like: Any = None

    def add(self, item: Mean[Any]) -> None:
        weighted = _weighted(item.value, torch.as_tensor(item.weight, dtype=torch.float64))
        if self._sum is None:
            self._like, self._sum = item.value, weighted
        else:
            self._sum = _added(self._sum, weighted)

    def mean(self) -> Any:
        return _divided(self._sum, self._like)


class _Weighted(Record):
    """One leaf of the sum: weight x value, and the weight."""

    value: Tensor
    weight: Tensor


class _WeightedTable(Record):
    """A class table inside the sum: its rows are weighted class by class, its counts add up."""

    rows: _Weighted
    count: Tensor


def _weighted(value: Any, weight: Tensor) -> Any:
    if isinstance(value, ClassTable):
        per_class = (weight * value.held).double()
        return _WeightedTable(
            _Weighted(value.rows.double() * per_class[:, None], per_class[:, None]),
            value.count.double() * (per_class > 0),
        )
    if isinstance(value, Tensor):
        return _Weighted(value.double() * weight, weight)
    if isinstance(value, dict):
        return {key: _weighted(item, weight) for key, item in value.items()}
    return {entry.name: _weighted(getattr(value, entry.name), weight) for entry in fields(value)}


def _added(left: Any, right: Any) -> Any:
    """left + right; the large tensors of `left` are reused, because a new model per client would cost more."""
    if isinstance(left, _Weighted):
        return _Weighted(left.value.add_(right.value), left.weight + right.weight)
    if isinstance(left, _WeightedTable):
        return _WeightedTable(_added(left.rows, right.rows), left.count + right.count)
    return {key: _added(left[key], right[key]) for key in left}


def _divided(total: Any, like: Any) -> Any:
    if isinstance(total, _WeightedTable):
        mean = ClassTable(_quotient(total.rows), total.count)
        return map_tensors(mean, lambda tensor: tensor.to(like.rows.dtype))
    if isinstance(total, _Weighted):
        return _quotient(total).to(like.dtype)
    if isinstance(like, dict):
        return {key: _divided(item, like[key]) for key, item in total.items()}
    return type(like)(**{name: _divided(item, getattr(like, name)) for name, item in total.items()})


def _quotient(total: _Weighted) -> Tensor:
    """Zero where nobody has any weight; such a class counts as held by nobody."""
    return torch.where(total.weight > 0, total.value / total.weight.clamp(min=1e-300), 0.0)

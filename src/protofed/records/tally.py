"""The sum over clients: what turns many uploads into the one thing a method's `aggregate` sees."""

from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import islice
from typing import Any, Generic, Protocol

import torch
from torch import Tensor
from typing_extensions import TypeVar

from protofed.records.robust import MEDIAN, Pieces, Robust
from protofed.records.shares import capped
from protofed.records.types import ClassTable, Each, Mean, Record, Sum, Weights, map_tensors, parts_of

U = TypeVar("U", bound=Record, default=Record)


class Sums(Record):
    """What the `Mean` fields of several uploads add up to: weight x value in float64, and the weights."""

    by_field: dict[str, Any]

    @classmethod
    def like(cls, upload: Record) -> "Sums":
        """Sums of the structure that uploads such as this one add up to."""
        return cls(weighted(upload))


class Tally(Generic[U]):
    """Folds uploads one by one: `Mean` fields into a running float64 sum, `Each` fields into {client: value}.

    Clients must be added in one canonical order: floating-point sums depend on it, results must not. Clients may be
    added up in groups, here or elsewhere, and the sums of the groups are then added up in their order. A robust rule,
    and a cap on the share of a client, need all values at once, so with one of them the `Mean` fields of all clients
    are held in memory until the total is taken.
    """

    def __init__(self, robust: Robust | None = None, max_share: float | None = None) -> None:
        self.clients: list[str] = []
        self._robust, self._max_share = robust, max_share
        self._upload: type[U] | None = None
        self._sums: dict[str, _Fold] = {}
        self._each: dict[str, dict[str, Any]] = {}

    def add(self, client: str, upload: U) -> None:
        """Add one client's upload."""
        self.clients.append(client)
        self._upload = type(upload)
        for name, value in parts_of(upload).items():
            if isinstance(value, Mean):
                self._sums.setdefault(name, self._fold()).add(value)
            elif isinstance(value, Each):
                self._each.setdefault(name, {})[client] = value.value
            else:
                raise TypeError(f"upload field {name!r} must be a Mean or an Each, not {type(value).__name__}")

    def end_group(self) -> None:
        """From now on, uploads are added up separately before they join the rest."""
        for total in self._sums.values():
            total.end_group()

    def sums(self) -> Sums:
        """The sums over the clients so far, for a tally elsewhere; only `Mean` fields can be represented this way."""
        return Sums({name: total.sum() for name, total in self._sums.items()})

    def add_group(self, clients: Sequence[str], sums: Sums, like: U) -> None:
        """Add clients that were added up elsewhere, with uploads such as `like`."""
        self.clients += clients
        self._upload = type(like)
        for name, item in parts_of(like).items():
            self._sums.setdefault(name, self._fold()).add_group(sums.by_field[name], item)

    def total(self) -> U:
        """An upload with what the server sees of all clients: Means averaged, Eaches by client."""
        if self._upload is None:
            raise ValueError("there is no total of no uploads")
        each = {name: self._drawn_in(values) for name, values in self._each.items()}
        return self._upload(**{name: total.mean() for name, total in self._sums.items()}, **each)

    def _fold(self) -> "_Fold":
        if self._max_share is not None:
            return _Capped(self._max_share)
        return _WeightedSum() if self._robust is None else _Gathered(self._robust)

    def _drawn_in(self, values: dict[str, Any]) -> dict[str, Any]:
        """Values that are used client by client, as far out as the robust rule allows."""
        if self._robust is None or not can_be_drawn_in(next(iter(values.values()))):
            return values
        one = torch.ones((), dtype=torch.float64)
        cut = [list(_pieces(value, one)) for value in values.values()]
        apart = isinstance(next(iter(values.values())), ClassTable)
        moved = self._robust.draw_in([[piece for piece, _ in pieces] for pieces in cut], apart)
        return {
            client: _assembled(value, iter(zip(rows, (count for _, count in pieces), strict=True)))
            for (client, value), rows, pieces in zip(values.items(), moved, cut, strict=True)
        }


def can_be_drawn_in(value: Any) -> bool:
    """Whether a value that is used client by client can be compared with the others': a table, or a model."""
    return isinstance(value, ClassTable | Weights)


def adds_up(upload: Record) -> bool:
    """Whether only the sum over clients is needed of uploads such as this one."""
    return all(isinstance(value, Mean) for value in parts_of(upload).values())


def weighted(upload: Record) -> dict[str, Any]:
    """What an upload adds to the sum over clients: for each of its `Mean` fields weight x value, and the weights."""
    return {
        name: _weighted(item.value, torch.as_tensor(item.weight, dtype=torch.float64))
        for name, item in parts_of(upload).items()
    }


def averaged(sums: dict[str, Any], like: U) -> U:
    """The averages in a sum of such parts, as an upload such as `like` whose fields hold them."""
    return type(like)(**{name: _seen(sums[name], item) for name, item in parts_of(like).items()})


class _Fold(Protocol):
    """Takes in the values of one field and gives their average."""

    def add(self, item: Mean[Any]) -> None: ...

    def end_group(self) -> None: ...

    def sum(self) -> Any: ...

    def add_group(self, total: Any, like: Mean[Any]) -> None: ...

    def mean(self) -> Any: ...


class _WeightedSum:
    """Sum of weight x value and of the weights, divided once at the end."""

    def __init__(self) -> None:
        self._ended: Any = None
        self._group: Any = None
        self._like: Any = None

    def add(self, item: Mean[Any]) -> None:
        weight = torch.as_tensor(item.weight, dtype=torch.float64)
        if self._group is None:
            self._like, self._group = item, _weighted(item.value, weight)
        else:
            self._group = _grown(self._group, item.value, weight)

    def end_group(self) -> None:
        if self._group is not None:
            self._ended = self._group if self._ended is None else _joined(self._ended, self._group)
            self._group = None

    def sum(self) -> Any:
        self.end_group()
        return self._ended

    def add_group(self, total: Any, like: Mean[Any]) -> None:
        self.end_group()
        self._like, self._group = like, total
        self.end_group()

    def mean(self) -> Any:
        return _seen(self.sum(), self._like)


class _Capped:
    """All clients' values of one field, added up when it is known how much each may count."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._items: list[Mean[Any]] = []

    def add(self, item: Mean[Any]) -> None:
        self._items.append(item)

    def end_group(self) -> None:
        """All are needed one by one in the end."""

    def sum(self) -> Any:
        raise TypeError("a cap on shares knows no sums")

    def add_group(self, total: Any, like: Mean[Any]) -> None:
        raise TypeError("a cap on shares knows no sums")

    def mean(self) -> Any:
        total = _WeightedSum()
        for item in self._added_up() if isinstance(self._items[0], Sum) else self._averaged():
            total.add(item)
        return total.mean()

    def _averaged(self) -> Iterator[Mean[Any]]:
        """With weights that are cut; of a table class by class, among those that hold the class."""
        weights = [_weight_of(item) for item in self._items]
        for item, weight in zip(self._items, capped(torch.stack(weights), self._share), strict=True):
            yield type(item)(item.value, weight)

    def _added_up(self) -> Iterator[Mean[Any]]:
        """As if the client had fewer samples, of every class alike: rows and counts of a sum belong together."""
        samples = torch.stack([_weight_of(item).sum() for item in self._items])
        factors = capped(samples, self._share) / samples.clamp(min=1e-300)
        for item, factor in zip(self._items, factors, strict=True):
            value = item.value
            if isinstance(value, ClassTable):
                value = ClassTable(value.rows, value.count * factor.to(value.count))
            yield type(item)(value, torch.as_tensor(item.weight, dtype=torch.float64) * factor)


def _weight_of(item: Mean[Any]) -> Tensor:
    """What a value counts; of a table one number for each class."""
    weight = torch.as_tensor(item.weight, dtype=torch.float64)
    return (weight * item.value.held).double() if isinstance(item.value, ClassTable) else weight


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


def _grown(total: Any, value: Any, weight: Tensor) -> Any:
    """total + weight x value; the large tensors of the total are reused, because new ones per client cost more."""
    if isinstance(total, _Weighted):
        return _Weighted(total.value.add_(value, alpha=float(weight)), total.weight + weight)
    if isinstance(total, _WeightedTable):
        return _joined(total, _weighted(value, weight))
    parts = value if isinstance(value, dict) else parts_of(value)
    return {name: _grown(part, parts[name], weight) for name, part in total.items()}


def _joined(left: Any, right: Any) -> Any:
    """left + right; the large tensors of `left` are reused."""
    if isinstance(left, _Weighted):
        return _Weighted(left.value.add_(right.value), left.weight + right.weight)
    if isinstance(left, _WeightedTable):
        return _WeightedTable(_joined(left.rows, right.rows), left.count + right.count)
    return {key: _joined(left[key], right[key]) for key in left}


def _seen(total: Any, like: Mean[Any]) -> Any:
    """What the server sees of a field: the sum itself, or the mean in the type of the values."""
    return _undivided(total, like.value) if isinstance(like, Sum) else _divided(total, like.value)


def _undivided(total: Any, like: Any) -> Any:
    if isinstance(total, _WeightedTable):
        return ClassTable(total.rows.value, total.count)
    if isinstance(total, _Weighted):
        return total.value
    if isinstance(like, dict):
        return {key: _undivided(item, like[key]) for key, item in total.items()}
    return type(like)(**{name: _undivided(item, getattr(like, name)) for name, item in total.items()})


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
    """Zero where the total weight is zero; such a class counts as held by no client."""
    return torch.where(total.weight > 0, total.value / total.weight.clamp(min=1e-300), 0.0)


class _Gathered:
    """All clients' values of one field, to be combined by a robust rule; counts, which are claims, by their median."""

    def __init__(self, robust: Robust) -> None:
        self._robust = robust
        self._values: list[Pieces] = []
        self._counts: list[Pieces] = []
        self._like: Any = None

    def add(self, item: Mean[Any]) -> None:
        self._like = item if self._like is None else self._like
        cut = list(_pieces(item.value, torch.as_tensor(item.weight, dtype=torch.float64)))
        self._values.append([value for value, _ in cut])
        self._counts.append([count for _, count in cut])

    def end_group(self) -> None:
        """All are needed one by one in the end."""

    def sum(self) -> Any:
        raise TypeError("a robust rule knows no sums")

    def add_group(self, total: Any, like: Mean[Any]) -> None:
        raise TypeError("a robust rule knows no sums")

    def mean(self) -> Any:
        rule = self._robust.for_sums if isinstance(self._like, Sum) else self._robust
        values, counts = rule.combine(self._values), MEDIAN.combine(self._counts)
        typical = _assembled(self._like.value, iter(zip(values, counts, strict=True)))
        if not isinstance(self._like, Sum):
            return typical
        # What a typical client sends stands for the sum; what is computed from sums hardly depends on their scale.
        weight = typical.count if isinstance(typical, ClassTable) else torch.ones(())
        return _undivided(_weighted(typical, weight.double()), typical)


_Piece = tuple[Tensor | None, Tensor | None]
"""A tensor that is averaged apart and, where it is the row of a class, its count; None where a client has it not."""


def _pieces(value: Any, weight: Tensor) -> Iterator[_Piece]:
    """A value cut into its tensors, and its tables into classes."""
    if isinstance(value, ClassTable):
        here = (weight * value.held) > 0
        for row, count, held in zip(value.rows, value.count, here, strict=True):
            yield (row, count) if held else (None, None)
    elif isinstance(value, Tensor):
        yield (value if weight > 0 else None, None)
    else:
        parts = value.values() if isinstance(value, dict) else (getattr(value, entry.name) for entry in fields(value))
        for part in parts:
            yield from _pieces(part, weight)


def _assembled(like: Any, pieces: Iterator[_Piece]) -> Any:
    """The structure of `like` made of the given pieces; missing ones are zero."""
    if isinstance(like, ClassTable):
        table = ClassTable(torch.zeros_like(like.rows), torch.zeros_like(like.count))
        for k, (row, count) in enumerate(islice(pieces, len(like.count))):
            if row is not None and count is not None:
                table.rows[k], table.count[k] = row, count
        return table
    if isinstance(like, Tensor):
        piece, _ = next(pieces)
        return torch.zeros_like(like) if piece is None else piece.to(like.dtype)
    if isinstance(like, dict):
        return {key: _assembled(item, pieces) for key, item in like.items()}
    return type(like)(**{entry.name: _assembled(getattr(like, entry.name), pieces) for entry in fields(like)})

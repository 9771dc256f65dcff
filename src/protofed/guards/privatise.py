"""Rows are bounded before an upload is made of them; the upload is bounded and noised before it is encoded.

What one unit can change, and so how much noise hides it, is worked out in docs/guards.md.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import sqrt
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from protofed.guards.guard import Guard
from protofed.guards.random_source import source_of
from protofed.guards.sums import SumMechanism, sends_sums
from protofed.method import At, Notes, SumSensitivity
from protofed.records import ClassTable, Each, Record, Weights, parts_of
from protofed.records.types import LabelledRows

R = TypeVar("R", bound=Record)

_COUNT_DEVIATIONS = 2.0
"""How many deviations of its noise a class's count must reach for the class to count as held."""
_ROW_DEVIATIONS = 3.0
"""The same for the squared length of a row, of which noise alone has d on average."""


def guard_rows(guard: Guard, notes: Notes, at: At) -> Notes:
    """Per-sample values as a guard lets an upload see them: some of the samples, none longer than the bound."""
    if guard.subsample < 1:
        size = len(next(iter(notes.values())))
        kept = source_of(guard, at, "subsample").uniform(size) < guard.subsample
        notes = {key: value[kept.to(value.device)] for key, value in notes.items()}
    bound = guard.effective_row_clip
    if bound is None or guard.unit == "client":
        return notes
    return {key: clipped(value, bound) if _is_vector(value) else value for key, value in notes.items()}


def privatise(guard: Guard, upload: R, at: At, sensitivity: Mapping[str, SumSensitivity] | None = None) -> R:
    """The upload as it may leave the client; `sensitivity` is that of its sums."""
    if not guard.noisy:
        return upload
    if sends_sums(upload):
        mechanism: _Mechanism = SumMechanism(guard, upload, sensitivity or {}, at)
    else:
        level = _ClientLevelMechanism if guard.unit == "client" else _SampleLevelMechanism
        mechanism = level(guard, upload, at)
    private = {name: mechanism.field(name, item) for name, item in parts_of(upload).items()}
    return replace(upload, **private)  # type: ignore[type-var]


def clipped(rows: Tensor, bound: float) -> Tensor:
    """Rows no longer than `bound`; shorter ones stay as they are."""
    norms: Tensor = torch.linalg.vector_norm(rows.flatten(1), dim=1).clamp(min=1e-12)
    shrink: Tensor = (bound / norms).clamp(max=1.0).view(-1, *[1] * (rows.ndim - 1))
    return rows * shrink


def tables_in(upload: Record) -> int:
    """How many fields of an upload are class tables."""
    return sum(isinstance(item.value, ClassTable) for item in parts_of(upload).values())


def known_before(upload: Record, down: Record, name: str) -> Weights:
    """What is public about an upload's weights: their values in the broadcast; of a change, which is one
    from zero, the running statistics that come with it."""
    model = getattr(down, "weights", None)
    values = model if isinstance(model, Weights) else Weights({}, {})
    if name in upload.changes:
        return Weights({}, values.stats)
    namesake = getattr(down, name, None)
    return namesake if isinstance(namesake, Weights) else values


class _Mechanism(Protocol):
    """Changes what leaves a client, field by field."""

    def field(self, name: str, item: Any) -> Any: ...


class _SampleLevelMechanism:
    """One sample more or less changes one row of each table by at most `bound`, and one count by 1.

    Weights pass as they are: what DP-SGD made of the samples does not become less private. Labelled rows are noised one
    by one; there nothing is promised, since their labels and their number travel as they are.
    """

    def __init__(self, guard: Guard, upload: Record, at: At) -> None:
        self._noise = guard.effective_row_noise
        self._bound = guard.effective_row_clip or 0.0
        # Rows and counts of all tables together are one Gaussian mechanism with the asked noise.
        self._share = sqrt(2 * max(tables_in(upload), 1))
        self._source = source_of(guard, at, "upload")

    def field(self, name: str, item: Any) -> Any:
        value = item.value
        if isinstance(value, ClassTable):
            return _with(item, self._table(value))
        if isinstance(value, LabelledRows):
            rows = value.rows + self._noise * 2 * self._bound * self._source.normal(value.rows)
            return _with(item, replace(value, rows=rows))
        return _with(item, value)

    def _table(self, table: ClassTable) -> ClassTable:
        deviation = self._noise * self._share
        sums = table.rows * table.count[:, None]
        sums = sums + deviation * self._bound * self._source.normal(sums)
        count = table.count + deviation * self._source.normal(table.count)
        held = count > max(1.0, _COUNT_DEVIATIONS * deviation)
        # Everything from here on looks at noised numbers only. No mean of clipped rows is longer than the bound.
        means = clipped(sums / count.clamp(min=1.0)[:, None], self._bound)
        return ClassTable(torch.where(held[:, None], means, 0.0), torch.where(held, count, 0.0))


class _ClientLevelMechanism:
    """All that a client holds changes the weights by at most `clip`, and each row of a table by at most `row_clip`.

    Its counts do not travel at all: a class counts as held where its row stands out of the noise.
    """

    def __init__(self, guard: Guard, upload: Record, at: At) -> None:
        self._clip = guard.clip or 0.0
        self._row_clip = guard.effective_row_clip or 0.0
        parts = len(parts_of(upload))
        # The fields together are one Gaussian mechanism with the asked noise.
        self._noise = guard.noise * sqrt(parts)
        self._source = source_of(guard, at, "upload")
        self._upload = upload
        self._down = at.down

    def field(self, name: str, item: Any) -> Any:
        value = item.value
        if isinstance(value, ClassTable):
            return _with(item, self._table(value))
        return _with(item, self._weights(value, known_before(self._upload, self._down, name)))

    def _weights(self, value: Weights, start: Weights) -> Weights:
        """The change since the broadcast, clipped as a whole and noised."""
        before, after = start.tensors(), value.tensors()
        change = {name: tensor - before[name] if name in before else tensor for name, tensor in after.items()}
        norm = torch.stack([tensor.double().pow(2).sum() for tensor in change.values()]).sum().sqrt()
        shrink = float(min(1.0, self._clip / max(float(norm), 1e-12)))
        noised = {
            name: tensor * shrink + self._noise * self._clip * self._source.normal(tensor)
            for name, tensor in change.items()
        }
        moved = {name: tensor + before[name] if name in before else tensor for name, tensor in noised.items()}
        # Noise may turn a running variance negative, with which no network can compute.
        stats = {name: moved[name].clamp(min=0) if name.endswith("_var") else moved[name] for name in value.stats}
        return Weights({name: moved[name] for name in value.params}, stats)

    def _table(self, table: ClassTable) -> ClassTable:
        rows = torch.where(table.held[:, None], clipped(table.rows, self._row_clip), 0.0)
        classes, dim = rows.shape
        deviation = self._noise * self._row_clip * sqrt(classes)
        rows = rows + deviation * self._source.normal(rows)
        held = rows.pow(2).sum(1) > deviation**2 * (dim + _ROW_DEVIATIONS * sqrt(2 * dim))
        return ClassTable(torch.where(held[:, None], clipped(rows, self._row_clip), 0.0), held.to(table.count))


def _is_vector(value: Tensor) -> bool:
    """Whether a note holds features or scores; a single number per sample is a confidence, at most 1."""
    return value.is_floating_point() and value.ndim > 1 and value[0].numel() > 1 if len(value) else False


def _with(item: Any, value: Any) -> Any:
    """The field with another value. A weight is the table's new counts where it was its counts, and else 1:
    how many samples a client has does not leave it."""
    if isinstance(item, Each):
        return Each(value)
    per_class = isinstance(value, ClassTable) and torch.as_tensor(item.weight).ndim > 0
    return type(item)(value, value.count.double() if per_class else 1.0)

"""What may travel or be remembered: frozen records whose leaves are tensors.

A field of a record is a tensor, another record, a dictionary of either (keyed by tensor name or client), or a plain
number or string that both sides know already and that therefore never travels.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, dataclass_transform

import torch
from torch import Tensor

T = TypeVar("T")


def _travels_as(kind: str) -> Any:
    """A field whose bytes are counted under `kind`; every other field inherits the kind of what holds it."""
    return field(metadata={"kind": kind})


@dataclass_transform(frozen_default=True, eq_default=False, field_specifiers=(field, _travels_as))
class Record:
    """Base of every message and state; subclasses become frozen dataclasses automatically."""

    #: Fields whose first dimension may differ between two records of the same structure.
    free_rows: ClassVar[frozenset[str]] = frozenset()
    #: Fields of an upload that are changes of weights; all its other weights are new values of what was broadcast.
    changes: ClassVar[frozenset[str]] = frozenset()
    #: What the bytes of each field are counted as; None: as those of what holds the record.
    kinds: ClassVar[dict[str, str | None]] = {}

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        dataclass(frozen=True, eq=False)(cls)
        cls.kinds = {entry.name: entry.metadata.get("kind") for entry in fields(cls)}  # type: ignore[arg-type]

    def to_wire(self) -> dict[str, Any]:
        """The fields as they are encoded; a record that is sparse on the wire overrides this and `from_wire`."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}  # type: ignore[arg-type]

    def wire_template(self) -> dict[str, Any]:
        """What `to_wire` of such a record contains, as far as types and shapes are fixed."""
        return self.to_wire()

    def from_wire(self, parts: dict[str, Any]) -> "Record":
        """A record like this one with the given fields; raises ValueError if they contradict each other."""
        return replace(self, **parts)  # type: ignore[type-var]


class Nothing(Record):
    """The empty record: a client without memory, a method that sends nothing."""


class Weights(Record):
    """A model's tensors by name: learnt parameters and running statistics. Integer counters are never sent."""

    params: dict[str, Tensor] = _travels_as("weights")
    stats: dict[str, Tensor] = _travels_as("other")

    def tensors(self) -> dict[str, Tensor]:
        """Both kinds in one dictionary, ready to be loaded into a model."""
        return {**self.params, **self.stats}


class ClassTable(Record):
    """One row per class: prototypes. `count[k] == 0` means that no client holds class k; its row is zero.

    Dense in memory, so that a loss may index it by label; on the wire only the rows that are held travel.
    """

    free_rows = frozenset({"rows"})

    rows: Tensor = _travels_as("prototypes")  # [C, d]
    count: Tensor = _travels_as("other")  # [C]

    @classmethod
    def empty(cls, classes: int, dim: int, like: Tensor) -> "ClassTable":
        """A table in which no class is held, with the type and device of `like`."""
        return cls(like.new_zeros(classes, dim), like.new_zeros(classes))

    @property
    def held(self) -> Tensor:
        """Which classes have a row, [C] booleans."""
        return self.count > 0

    def or_else(self, other: "ClassTable") -> "ClassTable":
        """This table, with the classes it lacks taken from `other`."""
        held = self.held
        return ClassTable(torch.where(held[:, None], self.rows, other.rows), torch.where(held, self.count, other.count))

    def to_wire(self) -> dict[str, Any]:
        """Only the rows that are held."""
        held = self.held
        return {"rows": self.rows if bool(held.all()) else self.rows[held], "count": self.count}

    def wire_template(self) -> dict[str, Any]:
        """As many rows as there are, which are not copied: they may be many, and any number is expected."""
        return {"rows": self.rows, "count": self.count}

    def from_wire(self, parts: dict[str, Any]) -> "ClassTable":
        """Dense again; the rows must be as many as the counts promise."""
        rows, count = parts["rows"], parts["count"]
        if (count < 0).any():
            raise ValueError("count: a class count is negative")
        held = count > 0
        number = int(held.sum())
        if len(rows) != number:
            raise ValueError(f"rows: {len(rows)} rows for {number} held classes")
        if number == len(count):
            return ClassTable(rows, count)
        dense = rows.new_zeros(len(count), *rows.shape[1:])
        dense[held] = rows
        return ClassTable(dense, count)


class NoisedTable(ClassTable):
    """Class sums under noise: every class has a row, and a count may be any number, even negative."""

    free_rows = frozenset()

    @property
    def held(self) -> Tensor:
        """Which classes a sender really has is what the noise hides."""
        return torch.ones_like(self.count, dtype=torch.bool)

    def to_wire(self) -> dict[str, Any]:
        """All rows."""
        return Record.to_wire(self)

    def from_wire(self, parts: dict[str, Any]) -> "NoisedTable":
        """As it is."""
        return NoisedTable(**parts)


class LabelledRows(Record):
    """Rows with a class each, as many as the sender chose; two kinds follow."""

    free_rows = frozenset({"rows", "labels"})

    rows: Tensor  # [m, ...]
    labels: Tensor = _travels_as("other")  # [m]
    classes: int = 0

    def from_wire(self, parts: dict[str, Any]) -> "LabelledRows":
        """One label per row, each of a class that exists."""
        rows, labels = parts["rows"], parts["labels"]
        if len(rows) != len(labels):
            raise ValueError(f"labels: {len(labels)} labels for {len(rows)} rows")
        if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < self.classes:
            raise ValueError(f"labels: outside 0..{self.classes - 1}")
        return type(self)(rows, labels, self.classes)


class Features(LabelledRows):
    """Embeddings of single samples."""

    rows: Tensor = _travels_as("features")


class PrototypeSet(LabelledRows):
    """Several prototypes per class, such as cluster centres."""

    rows: Tensor = _travels_as("prototypes")

    @classmethod
    def empty(cls, classes: int, dim: int, like: Tensor) -> "PrototypeSet":
        """A set without any prototype, with the type and device of `like`."""
        return cls(like.new_zeros(0, dim), like.new_zeros(0, dtype=torch.long), classes)

    def or_else(self, other: "PrototypeSet") -> "PrototypeSet":
        """This set, with all prototypes of the classes it lacks taken from `other`."""
        lacking = ~torch.isin(other.labels, self.labels)
        rows = torch.cat([self.rows, other.rows[lacking]])
        return PrototypeSet(rows, torch.cat([self.labels, other.labels[lacking]]), self.classes)


class Mean(Record, Generic[T]):
    """An upload field the server sees only as the weighted mean over clients.

    The weight is a number, or for a `ClassTable` one number per class. A class that a client lacks has weight 0 there,
    so `Mean(table, 1.0)` is the plain mean over the owners of each class and `Mean(table, table.count)` the mean
    over their samples.
    """

    value: T
    weight: Any = _travels_as("other")

    def to_wire(self) -> dict[str, Any]:
        """The weight as a tensor: a plain number would count as known to both sides and not be sent."""
        return {"value": self.value, "weight": torch.as_tensor(self.weight, dtype=torch.float64)}

    def from_wire(self, parts: dict[str, Any]) -> "Mean[T]":
        """A negative weight would let one client subtract the others."""
        if bool((parts["weight"] < 0).any()):
            raise ValueError("weight: it is negative")
        return type(self)(parts["value"], parts["weight"])

    if TYPE_CHECKING:
        # `aggregate` is given an upload whose fields hold what the server sees: a type checker reads them like this.
        def __get__(self, total: object, owner: object) -> T: ...


class Sum(Mean[T]):
    """An upload field the server sees only as the sum over clients of weight x value, in float64 and never divided.

    Of a `ClassTable` it sees the sum of each class's rows and the sum of the counts. What one client added can be taken
    away again.
    """


class Each(Record, Generic[T]):
    """An upload field the server receives client by client, as {client: value}."""

    value: T

    if TYPE_CHECKING:

        def __get__(self, total: object, owner: object) -> dict[str, T]: ...


def parts_of(record: Record) -> dict[str, Any]:
    """The fields of a record by name."""
    return {entry.name: getattr(record, entry.name) for entry in fields(record)}  # type: ignore[arg-type]


def map_tensors(value: T, change: Callable[[Tensor], Tensor]) -> T:
    """The same structure with every tensor replaced by `change(tensor)`."""
    if isinstance(value, Tensor):
        return change(value)  # type: ignore[return-value]
    if isinstance(value, dict):
        return {key: map_tensors(item, change) for key, item in value.items()}  # type: ignore[return-value]
    if type(value) in (list, tuple):
        return type(value)(map_tensors(item, change) for item in value)  # type: ignore[call-arg, attr-defined]
    if isinstance(value, Record):
        parts = {entry.name: map_tensors(getattr(value, entry.name), change) for entry in fields(value)}  # type: ignore[arg-type]
        return replace(value, **parts)  # type: ignore[type-var]
    return value

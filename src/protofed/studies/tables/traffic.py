"""What a method sends, exactly, without training: the messages of its rehearsal with every class held."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from protofed.records import Bytes, ClassTable, Features, PrototypeSet, Record, encode
from protofed.runs.assembly import Assembly


@dataclass(frozen=True)
class _Traffic:
    """Bytes of all messages of a run."""

    up: Bytes
    down: Bytes


def traffic(assembly: Assembly, sizes: Mapping[str, int]) -> _Traffic:
    """Of a whole run in which every client takes part in every round and holds every class.

    `sizes` are the clients' training images. Sets of prototypes count with one prototype for each class.
    """
    context, templates = assembly.context, assembly.prepared.templates
    if context.method.pools_data:
        return _Traffic(Bytes(), Bytes())
    known: dict[tuple[str, int], Bytes] = {}

    def size_of(way: str, record: Record, embeddings: int) -> Bytes:
        if (way, embeddings) not in known:
            known[way, embeddings] = encode(_filled(record, embeddings), way).size
        return known[way, embeddings]

    up, down = Bytes(), Bytes()
    bank = dict.fromkeys(sizes, 0)
    for round in range(context.plan.rounds):
        features = context.method.traffic(replace(context.at(round, None), down=templates.down))
        sent = {client: min(features.up, size) for client, size in sizes.items()}
        for client in sizes:
            others = sum(bank.values()) - bank[client]
            up += size_of("up", templates.upload, sent[client])
            down += size_of("down", templates.down, min(features.down, others))
        bank = sent
    return _Traffic(up, down)


def _filled(value: Any, embeddings: int) -> Any:
    """The same message with a prototype for every class, and with so many embeddings."""
    if isinstance(value, ClassTable):
        return ClassTable(value.rows, torch.ones_like(value.count))
    if isinstance(value, Features | PrototypeSet):
        wanted = embeddings if isinstance(value, Features) else value.classes
        rows = value.rows.new_zeros(wanted, *value.rows.shape[1:])
        return replace(value, rows=rows, labels=value.labels.new_zeros(wanted))
    if isinstance(value, dict):
        return {key: _filled(item, embeddings) for key, item in value.items()}
    if isinstance(value, Record):
        parts = {entry.name: _filled(getattr(value, entry.name), embeddings) for entry in fields(value)}  # type: ignore[arg-type]
        return replace(value, **parts)  # type: ignore[type-var]
    return value

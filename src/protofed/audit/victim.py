"""One client as its attacker finds it: what it sent, the model that tells, and the images behind."""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from protofed.audit.membership import distances
from protofed.clients import RunContext
from protofed.data import Images
from protofed.data.partition import stratified_split
from protofed.errors import UserError
from protofed.method import Method
from protofed.models.net import Net
from protofed.records import ClassTable, Features, NoisedTable, PrototypeSet, Record, Sum, Weights
from protofed.runs.opened import OpenRun, batches
from protofed.seeding import numpy_generator

SENT_MODEL = "the model that was sent"
GRANTED_MODEL = "the client's own model, granted to the attacker"


@dataclass(frozen=True)
class SentRows:
    """Rows with labels inside a message: embeddings of samples, or prototypes."""

    kind: str
    field: str
    rows: Tensor
    labels: Tensor
    counts: Tensor | None = None
    """How many samples stand behind each row, where the message says so."""
    adds_up: bool = False
    """Whether the rows are class means that the server adds up, so that each is exactly of the client's samples."""


@dataclass(frozen=True)
class Victim:
    """A client under attack. Pixels are floats in [0, 1]; the attacker has one half of the images."""

    client: str
    net: Net
    model_source: str
    context: RunContext
    members: Images
    outsiders: Images
    attacker: Tensor
    unseen: Tensor
    upload: Record | None
    """None where the run kept no messages."""
    sends_weights: bool
    """Whether the method's uploads hold weights or changes of weights."""

    @property
    def pixels(self) -> Tensor:
        """The client's training images."""
        return self.members.x[:].float() / 255

    def features(self, images: Images, cut: str | None) -> Tensor:
        """What the model makes of images at a stage."""
        return self._run(images, lambda x: self.net.features(x, cut))

    def confidence(self, images: Images) -> Tensor:
        """Log probability of each image's own class, [n]."""
        scores = self._run(images, self.net)
        return scores.log_softmax(1).gather(1, images.y[:, None])[:, 0]

    def sent_rows(self) -> list[SentRows]:
        """Every set of rows in the upload."""
        found = [] if self.upload is None else rows_in(self.upload, self.net.classes)
        return [rows for rows in found if len(rows.labels)]

    def of_own_classes(self, rows: SentRows) -> SentRows:
        """Only rows of classes that the client has: under noise all of them travel."""
        own = torch.isin(rows.labels, self.members.y)
        counts = None if rows.counts is None else rows.counts[own]
        return replace(rows, rows=rows.rows[own], labels=rows.labels[own], counts=counts)

    def stage_of(self, rows: SentRows, preferred: str | None) -> str | None:
        """The stage whose features look like these rows: the one preferred, else the first that fits; None: none."""
        model, shape = self.net.model, self.context.dataset.image_shape
        for stage in dict.fromkeys([preferred or model.cut, model.cut, *model.stage_names]):
            features = model.feature_shape(shape, stage)
            if features == rows.rows.shape[1:] or (rows.rows.ndim == 2 and prod(features) == rows.rows.shape[1]):
                return stage
        return None

    def originals_of(self, rows: SentRows, features: Tensor) -> Tensor:
        """For each embedding the position of the image it was made from: the nearest of its class."""
        distance = distances(rows.rows, features)
        distance[rows.labels[:, None] != self.members.y[None, :]] = float("inf")
        return distance.argmin(1)

    @torch.no_grad()
    def _run(self, images: Images, compute: Any, batch: int = 256) -> Tensor:
        with self.net.eval():
            parts = [
                compute(self.context.dataset.normalise(x, self.context.dtype)).float() for x in batches(images.x, batch)
            ]
        return torch.cat(parts)


def make_victim(opened: OpenRun, client: str) -> Victim:
    """The client at the end of its last round; the run must be opened with its data."""
    context, templates = opened.context, opened.templates
    state = opened.trained_state_of(client)
    if state is None:
        raise UserError(f"{client} never took part in {opened.run.path}; name another with --clients")
    net = Net(deepcopy(context.models[context.architecture_of(client)]))
    net.load(state.model)
    upload: Any = opened.last_upload_of(client)
    source = GRANTED_MODEL
    # A method that says itself how to read a model out of an upload sends changes or parts of one.
    plain = type(context.method).client_weights is Method.client_weights
    if plain and hasattr(upload, "weights"):
        net.load(upload.weights.value)
        source = SENT_MODEL
    members = context.train_images(client)
    if len(members) < 4:
        raise UserError(f"{client} has {len(members)} training images; an attack on it needs at least 4")
    keep, aside = stratified_split(members.y.numpy(), 0.5, numpy_generator(context.seed, "audit halves", client))
    return Victim(
        client=client,
        net=net,
        model_source=source,
        context=context,
        members=members,
        outsiders=_outsiders(context, client),
        attacker=torch.from_numpy(keep),
        unseen=torch.from_numpy(aside),
        upload=upload,
        sends_weights=_holds_weights(templates.upload),
    )


def _outsiders(context: RunContext, client: str) -> Images:
    """Images of the same source that the client did not train on: its hold-out, or its domain's test set."""
    kept = context.partition.holdout[client]
    dataset, domain = context.dataset, context.partition.domain[client]
    return dataset.take_train(kept) if len(kept) else dataset.domains[domain].test


def rows_in(upload: Record, classes: int) -> list[SentRows]:
    """Every set of rows in an upload; a table with several rows for a class, one after another, names it alike."""
    return [replace(rows, labels=rows.labels % classes) for rows in _rows_in(upload)]


def _rows_in(value: Any, path: str = "") -> Iterator[SentRows]:
    if isinstance(value, Sum):
        yield from (replace(rows, adds_up=True) for rows in _rows_in(value.value, path))
    elif isinstance(value, NoisedTable):
        # Of which classes there are any, and how many, noise hides; an attacker divides by what it reads.
        means = value.rows / value.count.clamp(min=1.0)[:, None]
        yield SentRows("prototypes", path, means.float(), torch.arange(len(means)))
    elif isinstance(value, ClassTable):
        held = value.held
        yield SentRows("prototypes", path, value.rows[held].float(), held.nonzero()[:, 0], value.count[held])
    elif isinstance(value, Features | PrototypeSet):
        kind = "features" if isinstance(value, Features) else "prototypes"
        yield SentRows(kind, path, value.rows.float(), value.labels)
    else:
        for name, item in _parts(value):
            yield from _rows_in(item, path if name == "value" else f"{path}/{name}".strip("/"))


def _holds_weights(value: Any) -> bool:
    return isinstance(value, Weights) or any(_holds_weights(item) for _, item in _parts(value))


def _parts(value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, Record):
        return [(entry.name, getattr(value, entry.name)) for entry in fields(value)]  # type: ignore[arg-type]
    return []

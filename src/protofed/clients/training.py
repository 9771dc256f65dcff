"""Local training: the one inner loop, the same for every method; `clients/vectorised.py` is its form for many clients.

What both forms have in common is here: what a client learns from and in which order, and what is kept of it.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import islice
from operator import add
from typing import Any

import torch
from torch import Tensor

from protofed.clients.optimizers import LocalOptimizer, State, kept_state
from protofed.clients.samples import ClientSamples
from protofed.guards import PrivateGradients
from protofed.method import At, Method, Notes, Terms
from protofed.models import normalisation
from protofed.models.net import Net
from protofed.seeding import stable_seed

Precision = Callable[[], AbstractContextManager[Any]]
"""Makes the context a loss is computed in."""


@dataclass(frozen=True)
class TrainingResult:
    """What training leaves behind besides the weights."""

    loss: dict[str, float]
    samples: int
    notes: Notes
    taken: int
    """Optimiser steps done."""
    reach: float | None
    """How far a unit gradient would have moved a weight."""
    optimizer: State
    """What is remembered of the optimisers."""


@dataclass(frozen=True)
class Batch:
    """One batch, its random draw, and whether notes are kept of it."""

    x: Tensor
    y: Tensor
    draw: Any
    noted: bool


def train(
    method: Method,
    net: Net,
    samples: ClientSamples,
    at: At,
    optimizers: list[LocalOptimizer],
    precision: Precision = nullcontext,
    private: PrivateGradients | None = None,
) -> TrainingResult:
    """Train for this round's epochs; with private gradients only the weights depend on the data."""
    like = next(iter(net.params().values()))
    log = TrainingLog(like.dtype)
    if private is None and not at.plan.epochs[at.round]:
        set_modes(method, net)
        return log.result(method, optimizers)
    with _keyed_dropout(at, like.device):
        set_modes(method, net)
        if private is not None:
            return _train_privately(method, net, samples, at, optimizers, private)
        for batch in training_batches(method, samples, at):
            step_at = at if batch.draw is None else replace(at, draw=batch.draw)
            for step, optimizer in zip(method.steps, optimizers, strict=True):
                with precision():
                    terms, notes = terms_and_notes(getattr(method, step.loss)(net, batch.x, batch.y, step_at))
                optimizer.step(reduce(add, terms.values()))
                log.write(terms, notes if batch.noted else {}, len(batch.y))
            log.samples += len(batch.y)
    return log.result(method, optimizers)


def training_batches(method: Method, samples: ClientSamples, at: At) -> Iterator[Batch]:
    """All batches of a client in this round; nothing of it depends on other clients or on the engine."""
    lottery = at.rng("draw")
    last = at.plan.epochs[at.round] - 1
    for epoch, x, y in _batches(method, samples, at):
        noted = method.keeps_notes and (at.plan.unit == "steps" or epoch == last)
        yield Batch(x, y, method.draw(y, at, lottery), noted)


@contextmanager
def _keyed_dropout(at: At, device: torch.device) -> Iterator[None]:
    """Only dropout draws from torch's global generators; this keys it like everything else."""
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(dropout_seed(at))
        if device.type == "cuda":
            torch.cuda.manual_seed(dropout_seed(at))
        yield


def dropout_seed(at: At) -> int:
    """The seed of a client's dropout in a round."""
    return stable_seed(at.seed, "dropout", at.round, at.client)


def terms_and_notes(outcome: Terms | tuple[Terms, Notes]) -> tuple[Terms, Notes]:
    """What a loss returned as a pair of terms and notes."""
    return outcome if isinstance(outcome, tuple) else (outcome, {})


@dataclass
class TrainingLog:
    """Collects the losses and notes of one client's training, step by step."""

    dtype: torch.dtype
    samples: int = 0
    _terms: dict[str, list[tuple[Tensor, int]]] = field(default_factory=dict)
    _notes: list[Notes] = field(default_factory=list)

    def write(self, terms: Terms, notes: Notes, size: int) -> None:
        """The terms of the loss on a batch of `size` samples, and what is kept of them."""
        for name, value in terms.items():
            self._terms.setdefault(name, []).append((value.detach(), size))
        if notes:
            self._notes.append({key: self._in_model_dtype(value.detach()) for key, value in notes.items()})

    def result(self, method: Method, optimizers: list[LocalOptimizer]) -> TrainingResult:
        """The result of the whole round."""
        notes = self._notes
        return TrainingResult(
            {name: _total(batch_means) / self.samples for name, batch_means in self._terms.items()},
            self.samples,
            {key: torch.cat([one[key] for one in notes]) for key in notes[0]} if notes else {},
            optimizers[0].taken,
            optimizers[0].reach,
            kept_state(method, optimizers),
        )

    def _in_model_dtype(self, value: Tensor) -> Tensor:
        """Numbers in the model's own precision, also where the loss was computed in half of it."""
        return value.to(self.dtype) if value.is_floating_point() else value


def _train_privately(
    method: Method,
    net: Net,
    samples: ClientSamples,
    at: At,
    optimizers: list[LocalOptimizer],
    private: PrivateGradients,
) -> TrainingResult:
    """As many steps as an ordinary round, each on samples drawn anew. A step that draws no sample still adds noise."""
    rng = at.rng("augment")
    for _ in range(private.steps):
        x, y = samples.drawn(private.draw(len(samples)), rng)
        for step, optimizer in zip(method.steps, optimizers, strict=True):
            optimizer.follow(private.of(method, step, net, x, y, at))
    return TrainingResult(
        loss={},
        samples=at.plan.epochs[at.round] * len(samples),
        notes={},
        taken=optimizers[0].taken,
        reach=optimizers[0].reach,
        optimizer=kept_state(method, optimizers),
    )


def _total(batch_means: list[tuple[Tensor, int]]) -> float:
    """The sum over samples from the means over batches; all are read at once, to synchronise only once."""
    means: list[float] = torch.stack([mean for mean, _ in batch_means]).tolist()
    return sum(mean * size for mean, (_, size) in zip(means, batch_means, strict=True))


def _batches(method: Method, samples: ClientSamples, at: At) -> Iterator[tuple[int, Tensor, Tensor]]:
    """The batches of this round, each with its epoch."""
    order, rng = at.rng("order"), at.rng("augment")
    amount = 0 if method.sits_out(at) else at.plan.epochs[at.round]
    every = (
        (epoch, x, y)
        for epoch in range(amount)
        for x, y in samples.epoch(at.plan.batch, order, rng)
        if len(y) > 1 or not method.drop_singleton_batch
    )
    # An epoch has at least one batch, so as many epochs as steps are enough for the steps.
    return every if at.plan.unit == "epochs" else islice(every, amount)


def trained_names(method: Method, net: Net) -> set[str]:
    """The tensors that some step trains."""
    return {name for step in method.steps for name in net.names(step.trains)}


def set_modes(method: Method, net: Net) -> None:
    """Training mode, but normalisation that no step trains in evaluation mode, unless the method lets it drift."""
    trained, params = trained_names(method, net), net.params()
    for name, param in params.items():
        param.requires_grad_(name in trained)
    net.model.train()
    if not method.freezes_statistics:
        return
    frozen = (net.names(normalisation) & params.keys()) - trained
    for path in {name.rpartition(".")[0] for name in frozen}:
        net.model.get_submodule(path).eval()

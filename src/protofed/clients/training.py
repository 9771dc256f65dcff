"""Local training: the one inner loop, the same for every method and every engine."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import reduce
from itertools import islice
from operator import add

import torch
from torch import Tensor

from protofed.clients.optimizers import LocalOptimizer
from protofed.clients.samples import ClientSamples
from protofed.guards import PrivateGradients
from protofed.method import At, Method, Notes
from protofed.models import normalisation
from protofed.models.net import Net
from protofed.seeding import stable_seed


@dataclass(frozen=True)
class Learnt:
    """What training leaves behind besides the weights."""

    loss: dict[str, float]
    samples: int
    notes: Notes


def train(
    method: Method,
    net: Net,
    samples: ClientSamples,
    at: At,
    optimizers: list[LocalOptimizer],
    private: PrivateGradients | None = None,
) -> Learnt:
    """Train for this round's epochs; with private gradients nothing but the weights tells what was learnt."""
    lottery = at.rng("draw")
    epochs = at.plan.epochs[at.round]
    terms_seen: dict[str, list[tuple[Tensor, int]]] = {}
    samples_seen = 0
    kept: list[Notes] = []
    with torch.random.fork_rng(devices=[]):
        # Only dropout draws from the global generator; this keys it like everything else.
        torch.default_generator.manual_seed(stable_seed(at.seed, "dropout", at.round, at.client))
        _set_modes(method, net)
        if private is not None:
            return _train_privately(method, net, samples, at, optimizers, private)
        for epoch, x, y in _batches(method, samples, at):
            keeps = method.keeps_notes and (at.plan.unit == "steps" or epoch == epochs - 1)
            drawn = method.draw(y, at, lottery)
            step_at = at if drawn is None else replace(at, draw=drawn)
            for step, optimizer in zip(method.steps, optimizers, strict=True):
                outcome = getattr(method, step.loss)(net, x, y, step_at)
                terms, notes = outcome if isinstance(outcome, tuple) else (outcome, {})
                optimizer.step(reduce(add, terms.values()))
                for name, value in terms.items():
                    terms_seen.setdefault(name, []).append((value.detach(), len(y)))
                if keeps and notes:
                    kept.append({key: value.detach() for key, value in notes.items()})
            samples_seen += len(y)
    return Learnt(
        {name: _total(seen) / samples_seen for name, seen in terms_seen.items()},
        samples_seen,
        {key: torch.cat([notes[key] for notes in kept]) for key in kept[0]} if kept else {},
    )


def _train_privately(
    method: Method,
    net: Net,
    samples: ClientSamples,
    at: At,
    optimizers: list[LocalOptimizer],
    private: PrivateGradients,
) -> Learnt:
    """As many steps as an ordinary round, each on samples drawn anew. A step that draws nobody still moves by noise."""
    chance = at.rng("augment")
    for _ in range(private.steps):
        x, y = samples.drawn(private.draw(len(samples)), chance)
        for step, optimizer in zip(method.steps, optimizers, strict=True):
            optimizer.follow(private.of(method, step, net, x, y, at))
    return Learnt({}, at.plan.epochs[at.round] * len(samples), {})


def _total(seen: list[tuple[Tensor, int]]) -> float:
    """The sum over samples from the means over batches, in one go: single additions cost more than they add."""
    means, sizes = zip(*seen, strict=True)
    return float(torch.stack(means).double().cpu() @ torch.tensor(sizes, dtype=torch.float64))


def _batches(method: Method, samples: ClientSamples, at: At) -> Iterator[tuple[int, Tensor, Tensor]]:
    """The batches of this round, each with its epoch."""
    order, chance = at.rng("order"), at.rng("augment")
    amount = at.plan.epochs[at.round]
    every = (
        (epoch, x, y)
        for epoch in range(amount)
        for x, y in samples.epoch(at.plan.batch, order, chance)
        if len(y) > 1 or not method.drop_singleton_batch
    )
    # An epoch has at least one batch, so as many epochs as steps are enough for the steps.
    return every if at.plan.unit == "epochs" else islice(every, amount)


def _set_modes(method: Method, net: Net) -> None:
    """Training mode, but normalisation that no step trains in evaluation mode: a frozen part must not drift."""
    trained = {name for step in method.steps for name in net.names(step.trains)}
    for name, param in net.params().items():
        param.requires_grad_(name in trained)
    net.model.train()
    frozen = net.names(normalisation) - trained
    for path, module in net.model.named_modules():
        if any(f"{path}.{name}" in frozen for name, _ in module.named_parameters(recurse=False)):
            module.eval()

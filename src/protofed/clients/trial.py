"""What a step of training costs here: a client of the run takes a few steps, and nothing of it is kept."""

import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from protofed.clients.client import ClientSide, ReadyClient
from protofed.clients.jobs import Train
from protofed.clients.optimizers import make_optimizers
from protofed.clients.prepared import Prepared
from protofed.clients.samples import KEPT_NORMALISED
from protofed.clients.training import Precision, set_modes, train, training_batches
from protofed.clients.vectorised import stackable, train_stacked
from protofed.guards import PrivateGradients
from protofed.method import Method
from protofed.models.fast.onnx_frozen import frozen_extractor
from protofed.models.freezing import unwrapped
from protofed.models.net import Net, Shortcut
from protofed.records import encode

_STEPS = 4
_STACKED_CLIENTS = 8
_LONG_STEP = 0.2
"""Seconds of a step that is estimated and not measured."""
_STEP_IN_FORWARD_PASSES = 3
"""A step of training is a forward pass, and twice as much on the way back."""
_PIXELS = 32 * 32 * 32
_MORE = 4
"""Times as many images in the second batch that is tried."""
_EXTRACTED = 4
_WEIGHT_COPIES = 6
"""Of the weights while a client trains among others: as the round began, trained, gradients, moments, temporaries."""


@dataclass(frozen=True)
class _SampleCost:
    """Of training on one sample: processor time, and bytes that the forward pass keeps for the backward pass."""

    seconds: float
    saved_bytes: float


class Trial:
    """Measures the training of the run's first clients, from its first broadcast; nothing is written."""

    def __init__(self, prepared: Prepared) -> None:
        self._context = prepared.context
        # Frozen stages are skipped below rather than run: a trial must not do the work of the run.
        self._frozen = prepared.context.frozen if any(part.prefix for part in prepared.context.frozen) else ()
        self._side = ClientSide(prepared.with_context(frozen=self._frozen))
        self._message = encode(prepared.templates.down, "server")

    @property
    def steps_each(self) -> float:
        """Batches of a client in a round, on average."""
        plan, sizes = self._context.plan, self._context.sizes.values()
        epochs = sum(plan.epochs) / plan.rounds
        if plan.unit == "steps":
            return epochs
        return epochs * sum(math.ceil(size / plan.batch) for size in sizes) / len(sizes)

    def step_seconds(self) -> float:
        """Of a batch, where clients train one after the other."""
        (ready,) = self._first_clients(1, _STEPS)
        guess = self._guess(ready)
        if guess > _LONG_STEP:
            return guess  # what decides is far away, and whole batches would take long
        self._train(_shortened(ready, 1))
        return _seconds(lambda: self._train(ready)) / _STEPS

    def stacked_step_seconds(self) -> float:
        """Of a batch of one client, where clients step together."""
        clients = self._first_clients(_STACKED_CLIENTS, _STEPS)
        self._train_stacked([_shortened(ready, 1) for ready in clients])
        return _seconds(lambda: self._train_stacked(clients)) / (_STEPS * len(clients))

    def check_stacked(self) -> None:
        """One step of two clients together; raises whatever goes wrong."""
        self._train_stacked(self._first_clients(2, 1))

    def sample_cost(self) -> _SampleCost:
        """From one batch, or two of fewer images where they are large."""
        (ready,) = self._first_clients(1, 1)
        held, planned = max(1, len(ready.samples)), self._context.plan.batch
        sizes = sorted({min(size, held) for size in trial_batches(self._context.dataset.image_shape, planned)})
        clients = {
            size: replace(ready, at=replace(ready.at, plan=replace(ready.at.plan, batch=size))) for size in sizes
        }
        # The first time counts what is kept. Gradients of single samples, which a guard may take, cannot be counted.
        saved = _SavedBytes()
        with saved.counting():
            self._train(clients[sizes[0]])
        private = self._context.guard.trains_privately
        seconds = {size: _cpu_seconds(partial(self._train, each, private)) for size, each in clients.items()}
        return _SampleCost(seconds_per_sample(seconds, planned), saved.total / sizes[0])

    def _guess(self, ready: ReadyClient) -> float:
        """About the seconds of a batch, from a forward pass of two images; the first pass warms everything up."""
        net = self._skip_frozen(ready.job.client)
        x, _ = next(ready.samples.batches(2))
        with torch.no_grad(), net.eval():
            forward = min(_seconds(lambda: net.features(x)) for _ in range(3))
        return forward / len(x) * min(self._context.plan.batch, len(ready.samples)) * _STEP_IN_FORWARD_PASSES

    def _first_clients(self, count: int, steps: int) -> list[ReadyClient]:
        """Ready for a few steps only."""
        clients = list(self._context.partition.clients)[:count]
        return [_shortened(self._side.prepare(Train(0, client), self._message), steps) for client in clients]

    def extraction_seconds(self) -> float:
        """Processor time that frozen backbones take for an image of the run; 0 where there is none."""
        if not self._frozen:
            return 0.0
        (ready,) = self._first_clients(1, 1)
        stages = [unwrapped(self._context.model.get_submodule(name)) for name in self._frozen[0].prefix]
        extractor = frozen_extractor(stages, self._context.dataset.image_shape)
        images = ready.samples.clean(slice(0, _EXTRACTED))
        start = time.process_time()
        extractor.features(images)
        return (time.process_time() - start) / len(images)

    def _skip_frozen(self, client: str) -> Net:
        """The client's network, of which the frozen stages cost nothing, as they will from the second epoch on."""
        net, architecture = self._side.net_of(client), self._context.architecture_of(client)
        if self._frozen and self._frozen[architecture].prefix:
            part = self._frozen[architecture]
            like = next(iter(net.params().values()))
            net.shortcut = Shortcut({}, len(part.prefix), lambda x: like.new_zeros(len(x), *part.shape))
        return net

    def _train(self, ready: ReadyClient, private: bool = False) -> None:
        context, net = self._context, self._skip_frozen(ready.job.client)
        optimizers = make_optimizers(context.method, net, context.plan, ready.at.lr)
        gradients = PrivateGradients(context.guard, ready.at) if private else None
        train(context.method, net, ready.samples, ready.at, optimizers, context.precision, gradients)

    def _train_stacked(self, clients: list[ReadyClient]) -> None:
        for group in stackable(clients):
            net = self._side.net_of(group[0].job.client)
            for _ in train_stacked(self._context.method, net, group, self._context.precision):
                pass


def trial_batches(shape: tuple[int, int, int], batch: int) -> tuple[int, ...]:
    """Images of the batches that are tried: 32 of 32x32, fewer of larger ones, but then of two sizes.

    A step costs something whatever its batch, to update weights for one, which must not be taken for the images' cost.
    """
    few = max(2, min(batch, _PIXELS // (shape[1] * shape[2])))
    return (few,) if few >= batch else (few, min(batch, _MORE * few))


def seconds_per_sample(tried: Mapping[int, float], batch: int) -> float:
    """Of a sample in a batch as planned, from the seconds of batches that were tried."""
    sizes = sorted(tried)
    few, more = sizes[0], sizes[-1]
    each = (tried[more] - tried[few]) / (more - few) if more > few else 0.0
    if each <= 0:  # one size, or a moment that was too noisy
        return tried[more] / more
    return each + max(0.0, tried[few] - few * each) / batch


def training_bytes(method: Method, net: Net, ready: ReadyClient, precision: Precision) -> int:
    """About what a client takes while it trains among others: weights, samples, and what a step keeps in between."""
    weights = sum(tensor.nbytes for tensor in ready.at.start.tensors().values())
    batch = next(training_batches(method, ready.samples, ready.at), None)
    if batch is None:
        return _WEIGHT_COPIES * weights
    set_modes(method, net)
    at = replace(ready.at, draw=batch.draw)
    saved = _SavedBytes()
    with torch.random.fork_rng(devices=[]), saved.counting(), precision():
        for step in method.steps:
            getattr(method, step.loss)(net, batch.x, batch.y, at)
    samples = min(len(ready.samples) * batch.x[0].nbytes, KEPT_NORMALISED)
    return _WEIGHT_COPIES * weights + samples + 2 * saved.total  # as much again on the way back


class _SavedBytes:
    """Counts what a forward pass keeps for the backward pass, each storage once."""

    def __init__(self) -> None:
        self._storages: dict[int, int] = {}

    def counting(self) -> AbstractContextManager[None]:
        """Inside: what autograd keeps is counted."""
        hooks: AbstractContextManager[None] = torch.autograd.graph.saved_tensors_hooks(self._note, lambda kept: kept)
        return hooks

    def _note(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self._storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    @property
    def total(self) -> int:
        """So far."""
        return sum(self._storages.values())


def _shortened(ready: ReadyClient, steps: int) -> ReadyClient:
    """The same client with that many batches to train on."""
    plan = ready.at.plan
    return replace(ready, at=replace(ready.at, plan=replace(plan, unit="steps", epochs=(steps,) * plan.rounds)))


def _cpu_seconds(work: Callable[[], object]) -> float:
    """Processor time, which other work hardly moves, of the second time: the first one warms up."""
    work()
    start = time.process_time()
    work()
    return time.process_time() - start


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start

"""Local training of many clients at once: their weights are stacked, and a loss is computed for all of them in one go.

The arithmetic is that of `clients/training.py`, client by client; only the order in which a kernel adds up may differ,
so results agree to rounding. Clients take their n-th step together if their n-th batches have equal shapes. Those
whose batch has another shape, mostly the last of an epoch, step in a group of their own: nothing is padded, so no
method has to know.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from functools import reduce
from operator import add
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.func import vmap

from protofed.clients.client import ReadyClient
from protofed.clients.optimizers import LocalOptimizer, make_optimizers, restore_state
from protofed.clients.training import (
    Batch,
    Precision,
    TrainingLog,
    TrainingResult,
    dropout_seed,
    set_modes,
    terms_and_notes,
    training_batches,
)
from protofed.method import At, Method, Notes, Step, Terms
from protofed.models import torchs_own_kernels
from protofed.models.net import Net
from protofed.records import Record, Weights, map_tensors


class _CannotVectorise(Exception):
    """A loss that cannot be computed for many clients at once, and why."""


def stackable(group: Sequence[ReadyClient]) -> list[list[ReadyClient]]:
    """Clients grouped by what they received and remember: those of a group can be stacked."""
    groups: dict[Hashable, list[ReadyClient]] = {}
    for ready in group:
        # Adam corrects its moments by the number of steps they are made of, SGD counts on from the stride of its last
        # one; both are one number for a whole stack.
        steps = tuple(float(value) for key, value in ready.optimizer.items() if key.endswith(("/steps", "/stride")))
        outline = _outline((ready.at.down, ready.at.memory, ready.at.start)), _outline(ready.optimizer), steps
        groups.setdefault(outline, []).append(ready)
    return list(groups.values())


def train_stacked(
    method: Method, net: Net, ready_clients: Sequence[ReadyClient], precision: Precision
) -> Iterator[tuple[ReadyClient, Weights, TrainingResult]]:
    """Train clients that are alike for this round's epochs; each with the weights it ends with."""
    set_modes(method, net)
    if net.shortcut is not None:
        # Stand-ins are made on demand, which must not be inside a function that is being vectorised.
        tuple(net.shortcut.stand_ins.values())
    stack = _Stack.of(method, net, ready_clients)
    clients = [
        _StackedClient(ready, training_batches(method, ready.samples, ready.at), TrainingLog(_dtype(net)))
        for ready in ready_clients
    ]
    training = dict(enumerate(clients))
    while training:
        for position, client in list(training.items()):
            if not client.next_batch():
                del training[position]
                yield (client.ready, *stack.part_of(position, client.log))
        last = stack
        for members in _by_outline(training):
            complete = len(members) == len(clients)
            part = stack if complete else stack.take(torch.tensor(members, device=stack.device))
            part.step([clients[position] for position in members], precision)
            if not complete:
                stack.write_back(members, part)
            last = part
        stack.copy_counters(last)


@dataclass
class _StackedClient:
    """One client on its way through the round."""

    ready: ReadyClient
    batches: Iterator[Batch]
    log: TrainingLog
    batch: Batch | None = None

    def next_batch(self) -> bool:
        """Fetch the next batch, if there is one."""
        self.batch = next(self.batches, None)
        return self.batch is not None


def _by_outline(training: Mapping[int, _StackedClient]) -> list[list[int]]:
    """The positions of those who can take their next step together."""
    groups: dict[Hashable, list[int]] = {}
    for position, client in training.items():
        batch = client.batch
        assert batch is not None
        groups.setdefault(_outline((batch.x, batch.y, batch.draw, batch.noted)), []).append(position)
    return list(groups.values())


@dataclass
class _Stack:
    """The clients of a group, one above the other, or some of them."""

    method: Method
    net: Net
    trained: dict[str, Tensor]
    stats: dict[str, Tensor]
    frozen: "_Bundle"
    """What no step trains, by name."""
    constants: "_Bundle"
    """What differs between clients and stays as it is during the round: down, memory, start, held, size."""
    at: At
    optimizers: list[LocalOptimizer]
    generators: list[torch.Generator]
    """For each client's dropout."""

    @classmethod
    def of(cls, method: Method, net: Net, group: Sequence[ReadyClient]) -> Self:
        """The clients as their round begins."""
        trainable = set().union(*(net.params(step.trains) for step in method.steps))
        names = [name for name in net.params() if name in trainable]
        starts = [ready.at.start for ready in group]
        trained = _stacked_by_name([start.params for start in starts], names)
        for stack in trained.values():
            stack.requires_grad_()
        stats = _stacked_by_name([start.stats for start in starts], starts[0].stats)
        frozen = [{name: param for name, param in start.params.items() if name not in trainable} for start in starts]
        at = group[0].at
        optimizers = make_optimizers(method, net, at.plan, at.lr, stacks=trained)
        restore_state(method, optimizers, _stacked_by_name([ready.optimizer for ready in group], group[0].optimizer))
        sizes = [torch.tensor(ready.at.size, dtype=_dtype(net), device=at.held.device) for ready in group]
        constants = [
            (ready.at.down, ready.at.memory, ready.at.start, ready.at.held, size)
            for ready, size in zip(group, sizes, strict=True)
        ]
        generators = [torch.Generator(device=at.held.device).manual_seed(dropout_seed(ready.at)) for ready in group]
        return cls(method, net, trained, stats, _Bundle.of(frozen), _Bundle.of(constants), at, optimizers, generators)

    @property
    def device(self) -> torch.device:
        """Where the stacks are."""
        return next(iter(self.trained.values())).device

    def step(self, clients: Sequence[_StackedClient], precision: Precision) -> None:
        """One step of each of the method's optimisers, on the current batch of each client."""
        batch = [client.batch for client in clients if client.batch is not None]
        x, y = _stacked([batch.x for batch in batch]), _stacked([batch.y for batch in batch])
        draw = _Bundle.of([batch.draw for batch in batch])
        for step, optimizer in zip(self.method.steps, self.optimizers, strict=True):
            with precision():
                terms, notes = self._losses(step, x, y, draw, noted=batch[0].noted)
            optimizer.step(reduce(add, terms.values()).sum())
            for row, client in enumerate(clients):
                client.log.write(_row(terms, row), _row(notes, row), y.shape[1])
        for client in clients:
            client.log.samples += y.shape[1]

    def _losses(self, step: Step, x: Tensor, y: Tensor, draw: "_Bundle", *, noted: bool) -> tuple[Terms, Notes]:
        """The terms of every client's loss, and the notes where they are kept."""

        def one(
            trained: dict[str, Tensor],
            stats: dict[str, Tensor],
            frozen: list[Tensor],
            constants: list[Tensor],
            drawn: list[Tensor],
            position: Tensor,
            x: Tensor,
            y: Tensor,
        ) -> tuple[Terms, Notes]:
            down, memory, start, held, size = self.constants.around(constants)
            at = _together(
                self.at, down=down, memory=memory, start=start, held=held, draw=draw.around(drawn), size=size
            )
            tensors = {**trained, **stats, **self.frozen.around(frozen)}
            with self._dropout(position):
                outcome = self.net.bound(tensors, lambda: getattr(self.method, step.loss)(self.net, x, y, at))
            terms, notes = terms_and_notes(outcome)
            return terms, notes if noted else {}

        dims = (0, 0, self.frozen.dims, self.constants.dims, draw.dims, 0, 0, 0)
        position = torch.arange(len(x), device=x.device)
        with torchs_own_kernels(self.net.model):
            result: tuple[Terms, Notes] = vmap(one, in_dims=dims)(
                self.trained, self.stats, self.frozen.tensors, self.constants.tensors, draw.tensors, position, x, y
            )
        return result

    @contextmanager
    def _dropout(self, position: Tensor) -> Iterator[None]:
        """Inside: dropout draws for each client what it would draw alone."""
        layers = [layer for layer in self.net.model.modules() if type(layer) is nn.Dropout]
        for layer in layers:
            layer.forward = self._dropper(layer, position)  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            for layer in layers:
                del layer.forward

    def _dropper(self, layer: nn.Dropout, position: Tensor) -> Callable[[Tensor], Tensor]:
        keep = 1 - layer.p

        def drop(x: Tensor) -> Tensor:
            if not layer.training or layer.p == 0:
                return x
            # Each client's mask is drawn outside of vmap, which would draw one for all of them.
            shape, dtype, device = x.shape, x.dtype, x.device
            with torch._C._DisableFuncTorch():
                masks = [
                    torch.empty(shape, dtype=dtype, device=device).bernoulli_(keep, generator=source)
                    for source in self.generators
                ]
                noise = torch.stack(masks).div_(keep)
            return x * noise[position]

        return drop

    def take(self, clients: Tensor) -> Self:
        """Some of the clients, to step apart from the others."""
        trained = {name: tensor.detach()[clients].requires_grad_() for name, tensor in self.trained.items()}
        return type(self)(
            self.method,
            self.net,
            trained,
            {name: tensor[clients] for name, tensor in self.stats.items()},
            self.frozen.take(clients),
            self.constants.take(clients),
            self.at,
            [optimizer.over(trained, lambda tensor: tensor[clients]) for optimizer in self.optimizers],
            [self.generators[client] for client in clients.tolist()],
        )

    def write_back(self, members: Sequence[int], part: "_Stack") -> None:
        """Put clients that stepped apart back in their places."""
        clients = torch.tensor(members, device=self.device)
        for mine, theirs in ((self.trained, part.trained), (self.stats, part.stats)):
            for name, tensor in mine.items():
                tensor.detach().index_copy_(0, clients, theirs[name].detach())
        for optimizer, partial in zip(self.optimizers, part.optimizers, strict=True):
            optimizer.write_back(clients, partial)

    def copy_counters(self, other: "_Stack") -> None:
        """Take over the step counts of the optimisers: all clients still training have done equally many."""
        for optimizer, partial in zip(self.optimizers, other.optimizers, strict=True):
            optimizer.copy_counters(partial)

    def part_of(self, position: int, log: TrainingLog) -> tuple[Weights, TrainingResult]:
        """One client's weights and training result."""
        trained = {name: tensor.detach()[position] for name, tensor in self.trained.items()}
        params = {**trained, **self.frozen.of_client(position)}
        weights = Weights(params, {name: tensor[position] for name, tensor in self.stats.items()})
        optimizers = [optimizer.over(trained, lambda tensor: tensor[position]) for optimizer in self.optimizers]
        return weights, log.result(self.method, optimizers)


@dataclass
class _Bundle:
    """Values of one structure, one for each client: their tensors stacked, or one for all where all have the same."""

    like: Any
    tensors: list[Tensor] = field(default_factory=list)
    dims: list[int | None] = field(default_factory=list)

    @classmethod
    def of(cls, values: Sequence[Any]) -> Self:
        """Stacked leaf by leaf."""
        bundle = cls(values[0])
        for same in zip(*(_leaves(value) for value in values), strict=True):
            first = same[0]
            common = all(other is first or torch.equal(other, first) for other in same[1:])
            bundle.tensors.append(first if common else _stacked(same))
            bundle.dims.append(None if common else 0)
        return bundle

    def around(self, tensors: Sequence[Tensor]) -> Any:
        """The structure with these tensors in it."""
        following = iter(tensors)
        return map_tensors(self.like, lambda _: next(following))

    def take(self, clients: Tensor) -> Self:
        """Of some clients."""
        pairs = zip(self.tensors, self.dims, strict=True)
        return type(self)(self.like, [t if dim is None else t[clients] for t, dim in pairs], self.dims)

    def of_client(self, position: int) -> Any:
        """Of one client."""
        pairs = zip(self.tensors, self.dims, strict=True)
        return self.around([tensor if dim is None else tensor[position] for tensor, dim in pairs])


@dataclass(frozen=True)
class _At(At):
    """Where the loss of many clients stands: the same for all but for its tensors, and the size is one of them."""

    sizes: Tensor = field(default_factory=lambda: torch.zeros(0))

    @property
    def size(self) -> int:
        """Of each client."""
        return self.sizes  # type: ignore[return-value]

    def __getattribute__(self, name: str) -> Any:
        if name == "client":
            raise _CannotVectorise("its loss asks which client it is computed for (at.client)")
        return super().__getattribute__(name)


def _together(at: At, *, size: Tensor, **tensors: Any) -> _At:
    """Where all of them stand."""
    common = {entry.name: getattr(at, entry.name) for entry in fields(At)}
    return _At(**{**common, **tensors}, sizes=size)


def _outline(value: Any) -> Hashable:
    """All of a structure but the numbers in its tensors."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    if isinstance(value, dict):
        return tuple((key, _outline(item)) for key, item in value.items())
    if isinstance(value, list | tuple):
        return tuple(_outline(item) for item in value)
    if isinstance(value, Record):
        return type(value), tuple(_outline(getattr(value, entry.name)) for entry in fields(value))  # type: ignore[arg-type]
    return value  # type: ignore[no-any-return]


def _leaves(value: Any) -> list[Tensor]:
    """The tensors of a structure, in the order in which `map_tensors` comes by."""
    leaves: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        leaves.append(tensor)
        return tensor

    map_tensors(value, note)
    return leaves


def _stacked_by_name(each: Sequence[Mapping[str, Tensor]], names: Iterable[str]) -> dict[str, Tensor]:
    return {name: _stacked([tensors[name] for tensors in each]) for name in names}


def _stacked(tensors: Sequence[Tensor]) -> Tensor:
    # In the standard layout: what many clients share a kernel for has no channels that could come last.
    return torch.stack([tensor.contiguous() for tensor in tensors])


def _row(values: Mapping[str, Tensor], row: int) -> dict[str, Tensor]:
    return {name: value.detach()[row] for name, value in values.items()}


def _dtype(net: Net) -> torch.dtype:
    return next(iter(net.params().values())).dtype

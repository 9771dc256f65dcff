"""A model at given weights: all that a method ever sees of a network."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _NormBase

from protofed.models.groups import Group, everything, tensors
from protofed.models.passed import PassedImages
from protofed.models.split import Split, evaluation_mode
from protofed.records import ClassTable, PrototypeSet, Weights

T = TypeVar("T")


@dataclass(frozen=True)
class Shortcut:
    """What may be done instead of running stages that are not trained; it holds for the weights they now have."""

    stand_ins: Mapping[str, nn.Module]
    """Other modules that compute the same as these stages."""
    prefix: int
    """The number of leading stages of which `lookup` may know what comes out."""
    lookup: Callable[[Tensor], Tensor | None]
    """What comes out of the prefix for a batch; None where that is not known."""


class Net:
    """A `Split` with its weights bound in, so that a training step costs what it costs in plain PyTorch."""

    def __init__(self, model: Split, at: Weights | None = None) -> None:
        self.model = model
        self.shortcut: Shortcut | None = None
        """Set by the code that loads the weights."""
        self._at = None if at is None else {f"model.{name}": tensor for name, tensor in at.tensors().items()}
        own = dict(model.named_parameters())
        self._stats = {name: tensor for name, tensor in tensors(model).items() if name not in own}
        self._params = own if at is None else {**own, **at.params}
        self._names: dict[Group, frozenset[str]] = {}

    @property
    def classes(self) -> int:
        """Number of classes the head distinguishes."""
        return self.model.classes

    @property
    def dim(self) -> int:
        """Length of the feature vector."""
        return self.model.dim

    def features(self, x: Tensor, cut: str | None = None) -> Tensor:
        """The features of a batch, at the model's own cut or after a named stage."""
        if self.shortcut is None:
            return self._run("features", x, cut)
        first, end = 0, self.model.stages_until(cut)
        if end >= self.shortcut.prefix and (known := self.shortcut.lookup(x)) is not None:
            first, x = self.shortcut.prefix, known
        return self._run("between", x, first, end, self.shortcut.stand_ins)

    def head(self, h: Tensor, cut: str | None = None) -> Tensor:
        """Logits from features taken at the same cut."""
        if self.shortcut is None:
            return self._run("head", h, cut)
        model = self.model
        return self._run("between", h, model.stages_until(cut), len(model.stage_names), self.shortcut.stand_ins)

    def __call__(self, x: Tensor) -> Tensor:
        """Logits of a batch."""
        return self.head(self.features(x))

    def call(self, part: str, *arguments: Tensor) -> Tensor:
        """The output of a part that was attached to the model."""
        return self._run(part, *arguments)

    def entered(self, prefix: int, h: Tensor, like: Tensor) -> Tensor:
        """Images such as `like` whose output after the first `prefix` stages is `h`; for this net only."""
        x = PassedImages(like, len(h))
        self.shortcut = Shortcut({}, prefix, lambda other: h if other is x else None)
        return x

    def using(self, weights: Weights) -> "Net":
        """The same network at other weights, for instance a frozen reference; what `weights` lacks is shared.

        So is what is known of its first stages, unless `weights` has others for them.
        """
        stats = {name: tensor.clone() for name, tensor in weights.stats.items()}
        other = Net(self.model, Weights(weights.params, stats))
        if self.shortcut is not None:
            known = tuple(f"{stage}." for stage in self.model.stage_names[: self.shortcut.prefix])
            if not any(name.startswith(known) for name in weights.tensors()):
                # Stand-ins are made when they are first needed, which must not be while a loss is being vectorised.
                other.shortcut = Shortcut({}, self.shortcut.prefix, self.shortcut.lookup)
        return other

    def _run(self, function: str, *arguments: Any) -> Tensor:
        call = getattr(self.model, function)
        result: Tensor
        result = call(*arguments) if self._at is None else self._with(self._at, call, *arguments)
        return result

    def bound(self, tensors: Mapping[str, Tensor], call: Callable[[], T]) -> T:
        """What `call` returns while the network uses these tensors, for instance a stack of many clients' tensors."""
        params, stats = self._params, self._stats
        self._params = {name: tensors[name] for name in params}
        self._stats = {name: tensors[name] for name in stats}
        try:
            return self._with({f"model.{name}": tensor for name, tensor in tensors.items()}, call)
        finally:
            self._params, self._stats = params, stats

    def _with(self, tensors: dict[str, Tensor], call: Callable[..., T], *arguments: Any) -> T:
        return functional_call(_Caller(self.model), tensors, (call, *arguments))  # type: ignore[no-any-return]

    def names(self, group: Group) -> frozenset[str]:
        """The names of the tensors in `group`, looked up once."""
        if group not in self._names:
            self._names[group] = group.names(self.model)
        return self._names[group]

    def params(self, group: Group = everything) -> dict[str, Tensor]:
        """The live learnable tensors of a group."""
        return {name: param for name, param in self._params.items() if name in self.names(group)}

    def pick(self, group: Group = everything) -> Weights:
        """A copy of the tensors in `group` that later training does not change."""
        names = self.names(group)
        return Weights(
            {name: param.detach().clone() for name, param in self._params.items() if name in names},
            {name: stat.clone() for name, stat in self._stats.items() if name in names},
        )

    def empty_table(self) -> ClassTable:
        """An empty table of prototypes for this model's features."""
        return ClassTable.empty(self.classes, self.dim, like=next(iter(self._params.values())).detach())

    def empty_set(self) -> PrototypeSet:
        """The same for several prototypes per class."""
        return PrototypeSet.empty(self.classes, self.dim, like=next(iter(self._params.values())).detach())

    @torch.no_grad()
    def load(self, weights: Weights, group: Group = everything) -> None:
        """Overwrite the tensors of `group` that `weights` names; the others stay as they are."""
        names = self.names(group)
        for own, given in ((self._params, weights.params), (self._stats, weights.stats)):
            for name, value in given.items():
                if name in names:
                    own[name].copy_(value)

    @contextmanager
    def eval(self) -> Iterator[None]:
        """Evaluation mode inside the context; afterwards every module returns to its previous mode."""
        with evaluation_mode(self.model):
            yield

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Inside the context, batch statistics are used without updating the running ones (for a second pass over a
        batch)."""
        norms = [module for module in self.model.modules() if isinstance(module, _NormBase)]
        momenta = [norm.momentum for norm in norms]
        for norm in norms:
            norm.momentum = 0.0
        try:
            yield
        finally:
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum


class _Caller(nn.Module):
    """Lets `functional_call`, which knows `forward` only, call any function of a model."""

    def __init__(self, model: Split) -> None:
        super().__init__()
        self.model = model

    def forward(self, call: Callable[..., T], *arguments: Any) -> T:
        return call(*arguments)

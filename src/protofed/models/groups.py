"""Which tensors of a model: groups that are chosen by stage or by type of module, and can be added and subtracted."""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from protofed.errors import UserError, unknown_name
from protofed.models.split import Split


def tensors(model: nn.Module) -> dict[str, Tensor]:
    """The learnable parameters and floating-point buffers by name; integer buffers only count batches."""
    buffers = {name: buffer for name, buffer in model.named_buffers() if buffer.is_floating_point()}
    return {**dict(model.named_parameters()), **buffers}


class Group(ABC):
    """Selects tensors of any model; `+` is the union of two groups, `-` the difference."""

    @abstractmethod
    def names(self, model: nn.Module) -> frozenset[str]:
        """The names of the chosen parameters and floating-point buffers."""

    def __add__(self, other: "Group") -> "Group":
        return _Combined(self, "+", other)

    def __sub__(self, other: "Group") -> "Group":
        return _Combined(self, "-", other)


def part(*names: str) -> Group:
    """The tensors of the named stages or attached parts."""
    return _Parts(names)


def of_type(*module_types: type[nn.Module]) -> Group:
    """The tensors of all modules of these types, and of the modules inside them."""
    return _OfType(module_types, f"of_type({', '.join(module_type.__name__ for module_type in module_types)})")


# Groups are data rather than functions, so that they can be compared and sent to a worker process.


@dataclass(frozen=True)
class _Combined(Group):
    left: Group
    sign: Literal["+", "-"]
    right: Group

    def names(self, model: nn.Module) -> frozenset[str]:
        left, right = self.left.names(model), self.right.names(model)
        return left | right if self.sign == "+" else left - right

    def __str__(self) -> str:
        right = f"({self.right})" if isinstance(self.right, _Combined) else str(self.right)
        return f"{self.left} {self.sign} {right}"


@dataclass(frozen=True)
class _Everything(Group):
    def names(self, model: nn.Module) -> frozenset[str]:
        return frozenset(tensors(model))

    def __str__(self) -> str:
        return "everything"


@dataclass(frozen=True)
class _Nothing(Group):
    def names(self, model: nn.Module) -> frozenset[str]:
        return frozenset()

    def __str__(self) -> str:
        return "nothing"


@dataclass(frozen=True)
class _Buffers(Group):
    def names(self, model: nn.Module) -> frozenset[str]:
        return frozenset(tensors(model)) - frozenset(name for name, _ in model.named_parameters())

    def __str__(self) -> str:
        return "running_statistics"


@dataclass(frozen=True)
class _OfType(Group):
    module_types: tuple[type[nn.Module], ...]
    label: str

    def names(self, model: nn.Module) -> frozenset[str]:
        owners = [path for path, module in model.named_modules() if isinstance(module, self.module_types)]
        return _below(model, owners)

    def __str__(self) -> str:
        return self.label


@dataclass(frozen=True)
class _Parts(Group):
    wanted: tuple[str, ...]

    def names(self, model: nn.Module) -> frozenset[str]:
        splits = _splits(model, self)
        known = {name for split in splits.values() for name, _ in split.named_children()}
        for name in self.wanted:
            if name not in known:
                raise unknown_name("part of the model", name, known)
        return _below(model, [_join(path, name) for path in splits for name in self.wanted])

    def __str__(self) -> str:
        return f"part({', '.join(self.wanted)})"


@dataclass(frozen=True)
class _SideOfCut(Group):
    side: Literal["features", "head"]

    def names(self, model: nn.Module) -> frozenset[str]:
        paths = []
        for path, split in _splits(model, self).items():
            end = split.stage_names.index(split.cut) + 1
            names = split.stage_names[:end] if self.side == "features" else split.stage_names[end:]
            paths += [_join(path, name) for name in names]
        return _below(model, paths)

    def __str__(self) -> str:
        return self.side


def _splits(model: nn.Module, group: Group) -> dict[str, Split]:
    """The models with named stages by their path: `model` itself, or those inside it."""
    splits = {path: module for path, module in model.named_modules() if isinstance(module, Split)}
    if not splits:
        raise UserError(f"{group} needs a model with named stages (a Split), not a {type(model).__name__}")
    return splits


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _below(model: nn.Module, paths: Iterable[str]) -> frozenset[str]:
    """The tensors of the modules at these paths."""
    prefixes = tuple(f"{path}." if path else "" for path in paths)
    return frozenset(name for name in tensors(model) if name.startswith(prefixes))


everything: Group = _Everything()
nothing: Group = _Nothing()
features: Group = _SideOfCut("features")
head: Group = _SideOfCut("head")
normalisation: Group = _OfType((_NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm), "normalisation")
running_statistics: Group = _Buffers()
"""What no optimiser trains: the floating-point buffers, above all the running means of batch normalisation."""

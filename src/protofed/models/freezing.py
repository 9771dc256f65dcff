"""What of a network is trained: the rest is frozen, and no longer belongs to what is sent, stored or optimised."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, Self

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from protofed.errors import UserError
from protofed.models.groups import tensors
from protofed.models.split import Split

TRAIN = ("all", "last", "head", "stages=N")


class Frozen(nn.Module):
    """A stage at weights that never change and are the same for all clients.

    It computes as in evaluation, and its weights are hidden from `parameters` and `buffers`. So they are part of no
    group: nothing of them is trained, sent or stored, and copies of the network share them.
    """

    def __init__(self, stage: nn.Module) -> None:
        super().__init__()
        # In a tuple, because a module that is an attribute would be registered.
        self._hidden = (stage.eval().requires_grad_(False),)

    @property
    def stage(self) -> nn.Module:
        """The stage itself."""
        return self._hidden[0]

    def forward(self, x: Tensor) -> Tensor:
        """What the stage makes of x."""
        result: Tensor = self.stage(x)
        return result

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        """Another precision or device: of a copy, since networks share the stage; where nothing changes, of none."""
        if all(fn(tensor) is tensor for tensor in tensors(self.stage).values()):
            return self
        self._hidden = (deepcopy(self.stage)._apply(fn, recurse),)  # type: ignore[no-untyped-call]
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "Frozen":
        return Frozen(self.stage)


def unwrapped(stage: nn.Module) -> nn.Module:
    """The stage itself, also where it is frozen."""
    return stage.stage if isinstance(stage, Frozen) else stage


def freeze(model: Split, stages: tuple[str, ...]) -> Split:
    """The same network with these stages frozen; those without weights are left as they are."""
    for name in stages:
        stage = model.get_submodule(name)
        if not isinstance(stage, Frozen) and tensors(stage):
            model.set_submodule(name, Frozen(stage))
    return model


def freeze_normalisation(model: Split) -> Split:
    """The same network with the batch normalisation of its trained stages frozen as well.

    Its running statistics come from far more images than a client has; batches of a few of them would spoil it.
    """
    norms = [path for path, module in model.named_modules() if isinstance(module, _BatchNorm)]
    for path in norms:
        model.set_submodule(path, Frozen(model.get_submodule(path)))
    return model


def thawed(model: Split) -> Split:
    """A copy of the network whose modules are all its own, with the weights of those that were frozen."""
    copy = deepcopy(model)
    for path, module in model.named_modules():
        if isinstance(module, Frozen):
            copy.set_submodule(path, deepcopy(module.stage))
    return copy


def frozen_tensors(model: nn.Module) -> dict[str, Tensor]:
    """All weights that are frozen, under the names they would have if they were trained."""
    return {
        f"{path}.{key}": tensor
        for path, module in model.named_modules()
        if isinstance(module, Frozen)
        for key, tensor in tensors(module.stage).items()
    }


def untrained_stages(model: Split, train: str) -> tuple[str, ...]:
    """The stages that `--train` leaves as they are: all | last | head | stages=N."""
    if train == "all":
        return ()
    end = model.stages_until(None)
    if train == "head":
        return model.stage_names[:end]
    units = _units(model)
    count = 1 if train == "last" else _number(train)
    if count > len(units):
        raise UserError(f"--train {train}: this network has {len(units)} stages before its head; use --train all")
    return model.stage_names[: model.stage_names.index(units[-count])]


def _units(model: Split) -> list[str]:
    """The stages that are counted: the layers of a residual or similar network, else every stage with weights."""
    before_head = model.stages()
    names = [name for name in model.stage_names[: model.stages_until(None)] if tensors(before_head[name])]
    return [name for name in names if name.startswith("layer")] or names


def _number(train: str) -> int:
    key, _, value = train.partition("=")
    if key != "stages" or not value.isdecimal() or int(value) < 1:
        raise UserError(f"--train {train} is not valid; use {' | '.join(TRAIN)}, for example stages=2")
    return int(value)


def complete_tensors(model: Split, trained: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All tensors of a network: what was trained, and its frozen stages."""
    return {**frozen_tensors(model), **trained}


def parameter_count(model: nn.Module) -> int:
    """Learnable numbers, also those that are frozen."""
    hidden = (module.stage for module in model.modules() if isinstance(module, Frozen))
    parameters = [*model.parameters(), *(param for stage in hidden for param in stage.parameters())]
    return sum(param.numel() for param in parameters)

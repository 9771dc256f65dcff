"""Adapters: small bottlenecks between the stages of a residual network, which may itself stay frozen."""

from typing import Literal

from torch import Tensor, nn
from torch.nn import functional

from protofed.errors import UserError
from protofed.models.catalog import model_names
from protofed.models.freezing import unwrapped
from protofed.models.split import Split

AdapterInit = Literal["zero_up", "kaiming"]

_STAGES = ("layer1", "layer2", "layer3", "layer4")


class Adapter(nn.Module):
    """u + W_up relu(W_down u); W_down leaves one in `reduction` channels, and at least one."""

    def __init__(self, channels: int, reduction: int = 16, kernel: int = 1, init: AdapterInit = "zero_up") -> None:
        super().__init__()
        narrow = max(1, channels // reduction)
        self.down = nn.Conv2d(channels, narrow, kernel, padding="same")
        self.up = nn.Conv2d(narrow, channels, kernel, padding="same")
        init_convolution(self.down)
        init_convolution(self.up)
        if init == "zero_up":
            nn.init.zeros_(self.up.weight)  # the adapter is the identity until it is trained

    def forward(self, u: Tensor) -> Tensor:
        """The input, adapted."""
        adapted: Tensor = u + self.up(functional.relu_(self.down(u)))
        return adapted


def with_adapters(base: Split, *, reduction: int, kernel: int, init: AdapterInit, last: int = len(_STAGES)) -> Split:
    """The model with stages `adapter1` to `adapter4`, one after each of the `last` stages of the residual network."""
    stages = base.stages()
    if not stages.keys() >= set(_STAGES):
        residual = ", ".join(name for name in model_names() if name.startswith(("efficientnet", "resnet")))
        raise UserError(
            f"adapters follow the stages {_STAGES[0]} to {_STAGES[-1]} of a residual network, and this model has "
            f"{', '.join(stages)}; use one of {residual}"
        )
    adapted: dict[str, nn.Module] = {}
    for name, stage in stages.items():
        adapted[name] = stage
        if name in _STAGES[-last:]:
            channels = output_channels(unwrapped(stage))
            adapted[name.replace("layer", "adapter")] = Adapter(channels, reduction, kernel, init)
    return Split(adapted, cut=base.cut, dim=base.dim, classes=base.classes)


def output_channels(*stages: nn.Module) -> int:
    """Channels of the feature maps that come out of these stages: those of their last convolution; 0: no maps."""
    convolutions = [module for stage in stages for module in stage.modules() if isinstance(module, nn.Conv2d)]
    return convolutions[-1].out_channels if convolutions else 0


def init_convolution(convolution: nn.Conv2d) -> None:
    """Kaiming weights (fan-out) and a bias of zero, for layers on top of a backbone."""
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    assert convolution.bias is not None
    nn.init.zeros_(convolution.bias)

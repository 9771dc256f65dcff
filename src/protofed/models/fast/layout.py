"""The memory layout of a network, and how it convolves: this changes its speed, and results only in the last bits."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import nn

from protofed.errors import UserError
from protofed.models.efficientnet import SameConv2d
from protofed.models.layers import ConvPoolReLU

LAYOUTS = ("auto", "standard", "channels-last", "strips")

M = TypeVar("M", bound=nn.Module)

_ENOUGH_CHANNELS = 16

_FORMATS = {
    "standard": torch.contiguous_format,
    "channels-last": torch.channels_last,
    "strips": torch.contiguous_format,
}


def choose_layout(
    name: str, models: Iterable[nn.Module], dtype: torch.dtype, device: torch.device, autocast: bool = False
) -> str:
    """The layout behind `auto`: in float32, strips for a network that supports them, channels last if it convolves.

    It depends on nothing that differs between machines or runs, so that the same command gives the same bits.
    """
    models = list(models)
    convolve = all(map(_convolutions, models))
    broken = any(map(_breaks_channels_last, models))
    if name == "channels-last" and broken:
        raise UserError(
            "layout=channels-last: on a CPU, torch corrupts memory in strided channels-last 1x1 convolutions of "
            f"fewer than {_ENOUGH_CHANNELS} channels, and this model has one; use --layout auto, or a wider model"
        )
    in_strips = convolve and all(map(_fits_strips, models)) and device.type == "cpu" and not autocast
    if name == "strips" and not in_strips:
        raise UserError(
            "layout=strips needs a network whose convolutions are all pooled and unpadded, such as lenet5, on a "
            "CPU and without --autocast; use --layout auto"
        )
    if name != "auto":
        return name
    if dtype != torch.float32 or not convolve:
        return "standard"
    return "strips" if in_strips else "standard" if broken else "channels-last"


def _convolutions(model: nn.Module) -> list[nn.Conv2d]:
    return [part for part in model.modules() if isinstance(part, nn.Conv2d)]


def _breaks_channels_last(model: nn.Module) -> bool:
    """With torch 2.13 and 4 or 8 channels, the gradient of these kernels is written beyond its memory."""
    return any(
        max(convolution.stride) > 1 and convolution.kernel_size == (1, 1) and convolution.in_channels < _ENOUGH_CHANNELS
        for convolution in _convolutions(model)
    )


def _fits_strips(model: nn.Module) -> bool:
    """Whether all convolutions of a model can be computed in strips."""
    fitting = {part.conv for part in _strippable(model)}
    return all(part in fitting for part in _convolutions(model))


def laid_out(model: M, layout: str) -> M:
    """The model itself with its kernels in `layout`; their inputs follow."""
    for part in _strippable(model):
        part.in_strips = layout == "strips"
    for module in model.modules():
        if isinstance(module, SameConv2d):
            module.in_pieces = layout == "channels-last"
    return model.to(memory_format=_FORMATS[layout])  # type: ignore[call-overload, no-any-return]


@contextmanager
def torchs_own_kernels(model: nn.Module) -> Iterator[None]:
    """Inside, the model uses torch's own operators only: `torch.func` and exporters know no others."""
    ways = ("in_strips", "in_pieces")
    changed = [(part, way) for part in model.modules() for way in ways if getattr(part, way, False)]
    for part, way in changed:
        setattr(part, way, False)
    try:
        yield
    finally:
        for part, way in changed:
            setattr(part, way, True)


def _strippable(model: nn.Module) -> list[ConvPoolReLU]:
    return [part for part in model.modules() if isinstance(part, ConvPoolReLU) and part.fits_strips]

"""How the tensors of a network lie in memory: a matter of speed, and of results only in their last bits."""

from collections.abc import Iterable
from typing import TypeVar

import torch
from torch import nn

from protofed.errors import UserError

LAYOUTS = ("auto", "standard", "channels-last")

M = TypeVar("M", bound=nn.Module)

_ENOUGH_CHANNELS = 16

_FORMATS = {"standard": torch.contiguous_format, "channels-last": torch.channels_last}


def choose_layout(name: str, models: Iterable[nn.Module], dtype: torch.dtype) -> str:
    """The layout behind `auto`: channels last where a network convolves in float32.

    It depends on nothing that differs between machines or runs, so that the same command gives the same bits.
    """
    convolutions = [[part for part in model.modules() if isinstance(part, nn.Conv2d)] for model in models]
    broken = any(_breaks_channels_last(part) for found in convolutions for part in found)
    if name == "channels-last" and broken:
        raise UserError(
            "layout=channels-last: on a CPU, torch corrupts memory in strided 1x1 convolutions of fewer than "
            f"{_ENOUGH_CHANNELS} channels that lie last, and this model has one; use --layout auto, or a wider model"
        )
    if name != "auto":
        return name
    return "channels-last" if all(convolutions) and not broken and dtype == torch.float32 else "standard"


def _breaks_channels_last(convolution: nn.Conv2d) -> bool:
    """Seen with torch 2.13: the gradient of its kernels, with 4 and 8 channels, is written beyond its memory."""
    strided = max(convolution.stride) > 1 and convolution.kernel_size == (1, 1)
    return strided and convolution.in_channels < _ENOUGH_CHANNELS


def laid_out(model: M, layout: str) -> M:
    """The model itself with its kernels in `layout`; what they are convolved with follows them."""
    return model.to(memory_format=_FORMATS[layout])  # type: ignore[call-overload, no-any-return]

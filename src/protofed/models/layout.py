"""How the tensors of a network lie in memory: a matter of speed, and of results only in their last bits."""

from collections.abc import Iterable
from typing import TypeVar

import torch
from torch import nn

LAYOUTS = ("auto", "standard", "channels-last")

M = TypeVar("M", bound=nn.Module)

_FORMATS = {"standard": torch.contiguous_format, "channels-last": torch.channels_last}


def choose_layout(name: str, models: Iterable[nn.Module], dtype: torch.dtype) -> str:
    """The layout behind `auto`: channels last where a network convolves in float32.

    It depends on nothing that differs between machines or runs, so that the same command gives the same bits.
    """
    if name != "auto":
        return name
    convolves = all(any(isinstance(part, nn.Conv2d) for part in model.modules()) for model in models)
    return "channels-last" if convolves and dtype == torch.float32 else "standard"


def laid_out(model: M, layout: str) -> M:
    """The model itself with its kernels in `layout`; what they are convolved with follows them."""
    return model.to(memory_format=_FORMATS[layout])  # type: ignore[call-overload, no-any-return]

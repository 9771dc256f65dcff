"""Turning uint8 pixels into the floats a network sees."""

from dataclasses import dataclass

import torch
from torch import Tensor

from protofed.errors import unknown_name

_NAMED: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "mnist": ((0.1307,), (0.3081,)),
    "half": ((0.5,), (0.5,)),
    "medical": ((128 / 255,), (1.0,)),
}

NORMALISATIONS = tuple(_NAMED)


@dataclass(frozen=True)
class Normalise:
    """(pixel / 255 - mean) / std, one mean and std per channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def named(cls, name: str, channels: int) -> "Normalise":
        """A known normalisation fitted to the number of channels.

        One value serves every channel; a colour normalisation serves grey images by the mean over its channels.
        """
        if name not in _NAMED:
            raise unknown_name("normalisation", name, _NAMED)
        mean, std = _NAMED[name]
        return cls(_fit(mean, channels), _fit(std, channels))

    @classmethod
    def default(cls, channels: int) -> "Normalise":
        """What the papers use: ImageNet's for colour, MNIST's for grey."""
        return cls.named("mnist" if channels == 1 else "imagenet", channels)

    def __call__(self, x: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        """Floats of `dtype` from pixels [n, C, H, W]: uint8, or floats already between 0 and 1 (after augmentation)."""
        full = 1.0 if x.dtype.is_floating_point else 255.0
        mean = torch.tensor(self.mean, dtype=dtype, device=x.device).view(-1, 1, 1)
        std = torch.tensor(self.std, dtype=dtype, device=x.device).view(-1, 1, 1)
        # In place on a copy: new memory for every intermediate costs several times the arithmetic. The copy is
        # contiguous whatever the layout of `x`: a network follows its input's layout, and would round differently.
        plain = x.to(dtype, copy=True, memory_format=torch.contiguous_format)
        return plain.sub_(full * mean).div_(full * std)


def _fit(values: tuple[float, ...], channels: int) -> tuple[float, ...]:
    if len(values) == channels:
        return values
    return (sum(values) / len(values),) * channels

"""The attacker's network: from what was sent back to the image, trained on pairs the attacker has.

Zhou et al., FedMP, 2025, attack with transposed convolutions and the squared error of pixels; their number is not said.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import log2

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protofed.models import ImageShape
from protofed.seeding import generator, stable_seed

_SMALLEST_SIDE = 7
_NARROWEST, _WIDEST = 32, 512
_LEAST_SPREAD = 0.1
"""Of the spread of the feature that moves most; with less a feature is not enlarged further."""
_TIMED_STEPS = 3
_SILENCE = 5.0
"""Seconds after which a person wants to know how far it is."""


@dataclass(frozen=True)
class Effort:
    """How hard the attacker tries."""

    steps: int = 800
    batch: int = 32
    lr: float = 2e-3


class Decoder(nn.Module):
    """Features of one shape to pixels in [0, 1]; a vector is first unfolded to a small map.

    Every block doubles the side and halves the channels, until the image's size is reached.
    """

    def __init__(self, features: Tensor, image_shape: ImageShape) -> None:
        super().__init__()
        channels, height, width = image_shape
        self.size = (height, width)
        across = (0,) if features.ndim == 2 else (0, *range(2, features.ndim))
        self.mean, self.scale = features.mean(across, keepdim=True), _scale(features.std(across, keepdim=True))
        if features.ndim == 2:
            doublings = max(1, int(log2(max(2, min(self.size) / _SMALLEST_SIDE))))
            start = tuple(-(-side // 2**doublings) for side in self.size)
            wide = _wide(doublings)
            self.entry: nn.Module = nn.Sequential(
                nn.Linear(features.shape[1], wide * start[0] * start[1]), nn.Unflatten(1, (wide, *start))
            )
        else:
            doublings = max(0, round(log2(min(self.size) / min(features.shape[2:]))))
            wide = _wide(doublings)
            self.entry = nn.Conv2d(features.shape[1], wide, 3, padding=1)
        blocks: list[nn.Module] = [nn.BatchNorm2d(wide), nn.ReLU()]
        for _ in range(doublings):
            narrow = max(wide // 2, _NARROWEST)
            blocks += [nn.ConvTranspose2d(wide, narrow, 4, stride=2, padding=1), nn.BatchNorm2d(narrow), nn.ReLU()]
            wide = narrow
        self.blocks = nn.Sequential(*blocks, nn.Conv2d(wide, channels, 3, padding=1))

    def forward(self, h: Tensor) -> Tensor:
        """Images of the size that was asked for."""
        pixels = self.blocks(self.entry((h - self.mean) / self.scale))
        if pixels.shape[2:] != self.size:
            pixels = F.interpolate(pixels, self.size, mode="bilinear")
        return torch.sigmoid(pixels)


def train_decoder(
    features: Tensor,
    images: Tensor,
    effort: Effort,
    seed: int,
    *keys: object,
    progress: Callable[[int, float], None] = lambda _step, _seconds_left: None,
) -> Decoder:
    """A decoder for pairs of features [n, ...] and images [n, C, H, W] in [0, 1]; `keys` say whose and of what.

    `progress` is called every few seconds, with the steps done and the estimated seconds left.
    """
    channels, height, width = images.shape[1:]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(stable_seed(seed, "audit decoder", *keys))
        decoder = Decoder(features, (channels, height, width))
    # Where maps are large it takes two thirds of the time then.
    decoder.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.Adam(decoder.parameters(), effort.lr, fused=True)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, effort.steps)
    rng = generator(seed, "audit batches", *keys)
    begun = told = time.monotonic()
    for step in range(effort.steps):
        if step and (now := time.monotonic()) - told > _SILENCE:
            told = now
            progress(step, (now - begun) / step * (effort.steps - step))
        pick = torch.randint(len(images), (min(effort.batch, 2 * len(images)),), generator=rng)
        optimizer.zero_grad()
        F.mse_loss(decoder(features[pick]), images[pick]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    return decoder.eval()


def decoder_step_seconds(feature_shape: Sequence[int], image_shape: ImageShape, effort: Effort) -> float:
    """Processor time of a step of training, from a few on noise."""
    features, images = torch.rand(effort.batch, *feature_shape), torch.rand(effort.batch, *image_shape)

    def seconds(steps: int) -> float:
        start = time.process_time()
        train_decoder(features, images, replace(effort, steps=steps), 0)
        return time.process_time() - start

    warming_up = seconds(1)
    begun = min(warming_up, seconds(1))
    return max(0.0, seconds(1 + _TIMED_STEPS) - begun) / _TIMED_STEPS


@torch.no_grad()
def rebuilt(decoder: Decoder, features: Tensor, batch: int = 256) -> Tensor:
    """The images an attacker makes of features."""
    return torch.cat([decoder(part) for part in torch.split(features, batch)])


def _scale(std: Tensor) -> Tensor:
    """By what features are divided.

    Many of a pretrained network are nought on all of the attacker's images: what such a feature is on another image
    says nothing to a decoder that never saw it move, and must not drown the others.
    """
    return torch.where(std > 0, std.clamp(min=_LEAST_SPREAD * std.max()), torch.inf)


def _wide(doublings: int) -> int:
    return int(min(_WIDEST, _NARROWEST * 2**doublings))

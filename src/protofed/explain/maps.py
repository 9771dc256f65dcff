"""Where a prototype was found: maps over the image, and the box around their peak."""

from typing import NamedTuple

import numpy as np
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

COARSE = 8
"""Positions along a side below which a map says little about the place: a box is made of a few large squares."""

PERCENTILE = 95.0
_WIDE = 1 / 3
"""Share of an image above which a box is too large to locate anything: its peaks are far apart."""
_FLAT_SHARE = 0.25
"""Largest share of an image that a peak may cover; beyond it the percentile is the ground, not the peak."""
_FLAT_RANGE = 1e-3
"""Least range of a map, in parts of its largest value; below it a peak is hardly more than rounding."""
_EVEN = 12
"""Grey levels, of 256."""


class Box(NamedTuple):
    """Rows [top, bottom) and columns [left, right)."""

    top: int
    bottom: int
    left: int
    right: int

    @property
    def height(self) -> int:
        """Number of rows."""
        return self.bottom - self.top

    @property
    def width(self) -> int:
        """Number of columns."""
        return self.right - self.left

    @property
    def area(self) -> int:
        """Number of pixels."""
        return self.height * self.width

    def contains(self, row: float, column: float) -> bool:
        """Whether a position is inside."""
        return self.top <= row < self.bottom and self.left <= column < self.right

    def overlap(self, other: "Box") -> float:
        """Intersection over union."""
        rows = min(self.bottom, other.bottom) - max(self.top, other.top)
        columns = min(self.right, other.right) - max(self.left, other.left)
        shared = max(0, rows) * max(0, columns)
        return shared / (self.area + other.area - shared)


def random_box(box: Box, size: tuple[int, int], rng: np.random.Generator) -> Box:
    """A box of the same height and width, anywhere in an image."""
    top = int(rng.integers(0, size[0] - box.height + 1))
    left = int(rng.integers(0, size[1] - box.width + 1))
    return Box(top, top + box.height, left, left + box.width)


def enlarged(maps: Tensor, size: tuple[int, int]) -> Tensor:
    """Maps [..., h, w] at the size of the image, by bicubic interpolation."""
    flat = maps.reshape(-1, 1, *maps.shape[-2:])
    return F.interpolate(flat, size=size, mode="bicubic", align_corners=False).reshape(*maps.shape[:-2], *size)


class Peak(NamedTuple):
    """Where a map is highest."""

    box: Box
    scattered: bool
    """There are other peaks far away, and the box is around the highest only."""


def peak_of(values: NDArray[np.floating]) -> Peak | None:
    """The tight box around the values at or above the 95th percentile; None for a flat map.

    In a flat map all values are nearly equal, or none stands out from the many that are equal to the percentile. Where
    the values lie so far apart that their box would tell no place, it is around the region that holds the highest.
    """
    from scipy import ndimage  # scipy takes long to import

    if np.ptp(values) <= _FLAT_RANGE * np.abs(values).max():
        return None
    level = np.percentile(values, PERCENTILE)
    upper = values >= level
    if upper.mean() > _FLAT_SHARE:
        upper = values > level
    if not upper.any():
        return None
    box = _around(upper)
    if box.area <= _WIDE * values.size:
        return Peak(box, scattered=False)
    regions, count = ndimage.label(upper)
    return Peak(_around(regions == regions.flat[int(values.argmax())]), scattered=count > 1)


def peak_box(values: NDArray[np.floating]) -> Box | None:
    """The box of the peak; None for a flat map."""
    peak = peak_of(values)
    return None if peak is None else peak.box


def even(part: NDArray[np.uint8]) -> bool:
    """Whether a part of an image, [C, h, w], is nearly of one brightness, so that a reader sees nothing in it."""
    low, high = np.percentile(part.mean(0), (5, 95))
    return bool(high - low < _EVEN)


def _around(mask: NDArray[np.bool_]) -> Box:
    rows, columns = np.nonzero(mask.any(1))[0], np.nonzero(mask.any(0))[0]
    return Box(int(rows[0]), int(rows[-1]) + 1, int(columns[0]), int(columns[-1]) + 1)

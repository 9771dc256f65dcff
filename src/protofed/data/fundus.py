"""Cuts the round field of view out of a fundus photograph: edges, a robust circle through them, black elsewhere."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

FloatArray = NDArray[np.float64]

# The side of the copy on which edges are sought, and the black border put around the photograph before that.
_WORKING_SIDE = 1000
_BORDER = 100
_SIGMA = _WORKING_SIDE / 50
_LOW, _HIGH = 0.99, 1.0
_STEPS = 100


@dataclass(frozen=True)
class Circle:
    """Centre and radius in pixels; pixel i spans i - 0.5 to i + 0.5."""

    x: float
    y: float
    r: float

    def distances(self, points: FloatArray) -> FloatArray:
        """Distance of each point [n, 2] from the centre."""
        return np.asarray(np.hypot(points[:, 0] - self.x, points[:, 1] - self.y))


def fit_circle(points: FloatArray, weights: FloatArray | None = None) -> Circle | None:
    """The weighted algebraic fit of a circle to points [n, 2]; None where the points are collinear."""
    w = np.full(len(points), 1.0) if weights is None else weights
    w = w / w.sum()
    centre = w @ points
    u, v = (points - centre).T
    suu, svv, suv = w @ (u * u), w @ (v * v), w @ (u * v)
    determinant = suu * svv - suv * suv
    if not determinant > 1e-12 * (suu + svv) ** 2:
        return None
    p, q = w @ (u * (u * u + v * v)) / 2, w @ (v * (u * u + v * v)) / 2
    uc, vc = (svv * p - suv * q) / determinant, (suu * q - suv * p) / determinant
    return Circle(float(centre[0] + uc), float(centre[1] + vc), float(np.sqrt(uc * uc + vc * vc + suu + svv)))


def anneal_circle(points: FloatArray, start: Circle) -> tuple[Circle, FloatArray] | None:
    """The circle most points agree on, and the share of each in the last fit: nearly uniform first, sharp last."""
    circle = start
    weights = np.full(len(points), 1 / len(points))
    for step in range(_STEPS):
        penalty = 0.01 / (_STEPS - step) * (circle.distances(points) - circle.r) ** 2
        weights = np.exp(penalty.min() - penalty)
        weights /= weights.sum()
        fitted = fit_circle(points, weights)
        if fitted is None:
            return None
        circle = fitted
    return circle, weights


def find_circle(image: NDArray[np.uint8]) -> Circle | None:
    """The rim of the field of view in a photograph [H, W, 3]; None where there is no edge to go by."""
    height, width = image.shape[:2]
    side = max(height, width) + 2 * _BORDER
    top, left = (side - height) // 2, (side - width) // 2
    padded = np.zeros((side, side, 3), dtype=np.uint8)
    padded[top : top + height, left : left + width] = image
    copy = Image.fromarray(padded).resize((_WORKING_SIDE, _WORKING_SIDE), Image.Resampling.BILINEAR)
    rows, columns = np.nonzero(_edges(np.asarray(copy, dtype=np.float64).mean(2)))
    if not len(rows):
        return None
    # Back from the copy to the photograph in full size.
    points = (np.stack([columns, rows], 1) + 0.5) * (side / _WORKING_SIDE) - 0.5
    start = Circle((side - 1) / 2, (side - 1) / 2, side / 2 - _BORDER)
    fitted = anneal_circle(points, start)
    return None if fitted is None else Circle(fitted[0].x - left, fitted[0].y - top, fitted[0].r)


def circle_crop(image: NDArray[np.uint8], size: tuple[int, int]) -> NDArray[np.uint8] | None:
    """The disc of a photograph [H, W, 3] filling an image of `size`, black around it; None where no circle is found.

    What lies outside the original frame is black too: many photographs are cut off at the top and the bottom.
    """
    circle = find_circle(image)
    if circle is None or circle.r < 1:
        return None
    left, top = circle.x + 0.5 - circle.r, circle.y + 0.5 - circle.r
    right, bottom = left + 2 * circle.r, top + 2 * circle.r
    box = (int(np.floor(left)), int(np.floor(top)), int(np.ceil(right)), int(np.ceil(bottom)))
    if box[2] - box[0] > 4 * max(image.shape[:2]):
        return None
    square = Image.fromarray(image).crop(box)
    inside = (left - box[0], top - box[1], right - box[0], bottom - box[1])
    resized = square.resize((size[1], size[0]), Image.Resampling.BILINEAR, box=inside)
    y = top + (np.arange(size[0]) + 0.5) * (2 * circle.r / size[0])
    x = left + (np.arange(size[1]) + 0.5) * (2 * circle.r / size[1])
    in_frame = ((y > 0) & (y < image.shape[0]))[:, None] & ((x > 0) & (x < image.shape[1]))
    in_disc = (y[:, None] - circle.y - 0.5) ** 2 + (x - circle.x - 0.5) ** 2 <= circle.r**2
    return np.where((in_frame & in_disc)[..., None], np.asarray(resized), 0).astype(np.uint8)


def _edges(grey: FloatArray) -> NDArray[np.bool_]:
    """Canny: blur, gradient, keep ridges of the gradient, then follow weak ridges from strong ones."""
    from scipy import ndimage  # a noticeable part of what importing protofed would take

    smooth = ndimage.gaussian_filter(grey, _SIGMA, mode="constant")
    down, across = ndimage.sobel(smooth, axis=0), ndimage.sobel(smooth, axis=1)
    strength = np.hypot(down, across)
    rows, columns = np.nonzero(strength >= _LOW)
    weak = np.zeros(grey.shape, dtype=bool)
    if len(rows):
        here = strength[rows, columns]
        step = np.stack([down[rows, columns], across[rows, columns]]) / here
        place = np.stack([rows, columns])
        ahead, behind = (ndimage.map_coordinates(strength, place + sign * step, order=1) for sign in (1, -1))
        ridge = (here >= ahead) & (here > behind)
        weak[rows[ridge], columns[ridge]] = True
    groups, _ = ndimage.label(weak, structure=np.ones((3, 3)))
    strong = np.unique(groups[weak & (strength >= _HIGH)])
    return np.asarray(np.isin(groups, strong[strong > 0]))

"""The circle crop of fundus photographs: GT-38, and photographs made with a known circle."""

import numpy as np
import pytest

from protofed.data.fundus import Circle, anneal_circle, circle_crop, find_circle, fit_circle

ANGLES = np.deg2rad(np.arange(0, 360, 60))
RIM = np.stack([50 + 30 * np.cos(ANGLES), 40 + 30 * np.sin(ANGLES)], 1)
WITH_OUTLIER = np.vstack([RIM, [55, 42]])


def photograph(height=300, width=400, centre=(195, 155), radius=140):
    """A disc of one colour with a bright spot and a dark line in it."""
    y, x = np.mgrid[:height, :width]
    inside = (x - centre[0]) ** 2 + (y - centre[1]) ** 2 <= radius**2
    image = np.zeros((height, width, 3), np.uint8)
    image[inside] = (160, 90, 40)
    image[(x - centre[0] + 60) ** 2 + (y - centre[1]) ** 2 <= 20**2] = (250, 240, 200)
    image[inside & (abs(x - centre[0] - 20) < 3)] = (90, 40, 20)
    return image


def as_numbers(circle):
    return circle.x, circle.y, circle.r


def test_gt38_exact_fit():
    assert as_numbers(fit_circle(RIM)) == pytest.approx((50, 40, 30), abs=1e-9)


def test_gt38_one_outlier_uniform():
    assert as_numbers(fit_circle(WITH_OUTLIER)) == pytest.approx((49.31504, 39.72601, 27.87922), abs=1e-5)


def test_gt38_one_outlier_annealed():
    circle, weights = anneal_circle(WITH_OUTLIER, Circle(45, 45, 28))
    assert as_numbers(circle) == pytest.approx((49.99794, 39.99918, 29.99383), abs=1e-5)
    assert weights[-1] == pytest.approx(4.25e-4, abs=1e-6)
    assert weights.sum() == pytest.approx(1)


def test_points_on_a_line_have_no_circle():
    line = np.stack([np.arange(5.0), 2 * np.arange(5.0)], 1)
    assert fit_circle(line) is None
    assert anneal_circle(line, Circle(0, 0, 1)) is None


@pytest.mark.parametrize("radius", [120, 170])
def test_the_circle_is_found(radius):
    """The larger one is cut off at the top and the bottom of the frame."""
    found = find_circle(photograph(radius=radius))
    assert as_numbers(found) == pytest.approx((195, 155, radius), abs=2)


def test_the_crop_fills_the_disc_and_blackens_the_rest():
    disc = circle_crop(photograph(radius=170), (64, 64))
    assert disc.shape == (64, 64, 3)
    assert disc.dtype == np.uint8
    assert not disc[[0, -1]].any(), "the frame ends before the disc does"
    assert not disc[:6, :6].any(), "corners lie outside the disc"
    assert disc[32, 2:-2, 0].min() > 80


def test_no_edge_is_reported():
    assert find_circle(np.zeros((40, 50, 3), np.uint8)) is None
    assert circle_crop(np.zeros((40, 50, 3), np.uint8), (8, 8)) is None

import numpy as np
import pytest
import torch

from protofed.explain.maps import Box, enlarged, even, peak_box, peak_of


def test_gt37_boxes() -> None:
    values = np.zeros((10, 10))
    values[2:4, 5:8] = 1.0
    values[3, 6] = 2.0
    assert np.percentile(values, 95) == 1.0
    assert peak_box(values) == Box(2, 4, 5, 8)
    ramp = np.arange(100.0).reshape(10, 10)
    assert np.percentile(ramp, 95) == pytest.approx(94.05)
    assert peak_box(ramp) == Box(9, 10, 5, 10)


@pytest.mark.parametrize(
    "flat",
    [
        np.zeros((8, 8)),
        np.where(np.arange(64).reshape(8, 8) == 0, -1.0, 3.0),
        -7.0 + 1e-4 * np.arange(64).reshape(8, 8),  # hardly more than rounding
    ],
)
def test_a_flat_map_has_no_box(flat: np.ndarray) -> None:
    assert peak_box(flat) is None


def test_of_peaks_far_apart_the_highest_is_boxed() -> None:
    values = np.zeros((20, 20))
    values[16:19, 15:18] = 1.0
    assert peak_of(values) == (Box(16, 19, 15, 18), False)  # less than 5 %, so the percentile is the ground
    values[1:4, 1:4] = 1.0
    values[17, 16] = 2.0
    assert peak_of(values) == (Box(16, 19, 15, 18), True)
    values[1:4, 1:4] = 0.0
    values[12:15, 15:18] = 1.0  # nearer: one box around both
    assert peak_of(values) == (Box(12, 19, 15, 18), False)


def test_an_even_part_shows_nothing() -> None:
    dark = np.full((3, 10, 10), 2, dtype=np.uint8)
    assert even(dark)
    dark[:, 0, :2] = 200  # a little of the rim
    assert even(dark)
    dark[:, 3:7, 3:7] = 90
    assert not even(dark)


def test_overlap_of_boxes() -> None:
    box = Box(0, 4, 0, 4)
    assert box.overlap(box) == 1.0
    assert box.overlap(Box(2, 6, 2, 6)) == pytest.approx(4 / 28)
    assert box.overlap(Box(4, 8, 4, 8)) == 0.0
    assert box.contains(3.9, 0)
    assert not box.contains(4, 0)


def test_enlarged_maps_keep_the_place_of_the_peak() -> None:
    maps = torch.zeros(2, 8, 8)
    maps[0, 1, 6] = maps[1, 5, 2] = 1.0
    large = enlarged(maps, (64, 64)).numpy()
    for number, place in enumerate([(12, 52), (44, 20)]):
        box = peak_box(large[number])
        assert box is not None
        assert box.contains(*place)
        assert box.area < 20 * 20


def test_enlarged_maps_cover_the_image_as_their_places_do() -> None:
    """The second of four places stands for pixels 10 to 19 of 40, so its peak lies between 14 and 15."""
    maps = torch.zeros(4, 4)
    maps[1, 1] = 1.0
    row, column = np.unravel_index(int(enlarged(maps, (40, 40)).argmax()), (40, 40))
    assert row in (14, 15)
    assert column in (14, 15)

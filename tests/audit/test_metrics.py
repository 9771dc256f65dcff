"""The measures of a reconstruction: golden vectors, and what must hold for any images."""

import math

import pytest
import torch

from protofed.audit import frechet_distance, frechet_distance_of_moments, psnr, rms_distance, ssim, ssim_of_whole

ORIGINAL = torch.tensor([[0, 0.5], [1, 0.25]]).view(1, 1, 2, 2)
REBUILT = torch.tensor([[0.1, 0.5], [0.8, 0.25]]).view(1, 1, 2, 2)


def images(n=3, channels=3, side=16, seed=0):
    return torch.rand(n, channels, side, side, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def features(n, d, seed=0):
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_gt39_distance_is_the_root_mean_square():
    distance = rms_distance(ORIGINAL, REBUILT)
    assert distance.tolist() == pytest.approx([0.111803], abs=1e-5)
    assert (distance * math.sqrt(4)).tolist() == pytest.approx([0.223607], abs=1e-5), "the Euclidean distance"
    assert distance.square().tolist() == pytest.approx([0.0125], abs=1e-5), "the mean square"


def test_psnr_of_the_same_pair():
    assert psnr(ORIGINAL, REBUILT).tolist() == pytest.approx([-10 * math.log10(0.0125)], abs=1e-4)


def test_gt40_frechet_distance_in_one_dimension():
    mean, variance = torch.tensor, lambda value: torch.tensor([[value]])
    distance = frechet_distance_of_moments(mean([0.0]), variance(1.0), mean([1.0]), variance(4.0))
    assert float(distance) == pytest.approx(2, abs=1e-5)


def test_gt41_similarity_with_the_image_as_the_window():
    assert ssim_of_whole(ORIGINAL, REBUILT).tolist() == pytest.approx([0.941303], abs=1e-5)


def test_similarity_of_one_window_by_hand():
    """An image as large as the window has one position, whose weighted moments can be written out."""
    x, y = images(1, 1, 11, seed=1), images(1, 1, 11, seed=2)
    steps = torch.arange(11, dtype=torch.float64) - 5
    w = torch.exp(-(steps[:, None] ** 2 + steps[None] ** 2) / (2 * 1.5**2))
    w = w / w.sum()
    mx, my = (w * x[0, 0]).sum(), (w * y[0, 0]).sum()
    vx, vy = (w * (x[0, 0] - mx) ** 2).sum(), (w * (y[0, 0] - my) ** 2).sum()
    cxy = (w * (x[0, 0] - mx) * (y[0, 0] - my)).sum()
    expected = (2 * mx * my + 1e-4) * (2 * cxy + 9e-4) / ((mx**2 + my**2 + 1e-4) * (vx + vy + 9e-4))
    assert float(ssim(x, y)) == pytest.approx(float(expected), abs=1e-9)


def test_similarity_is_the_mean_over_positions_and_channels():
    x, y = images(2, 3, 13, seed=3), images(2, 3, 13, seed=4)
    windows = [
        ssim(x[:, c : c + 1, i : i + 11, j : j + 11], y[:, c : c + 1, i : i + 11, j : j + 11])
        for c in range(3)
        for i in range(3)
        for j in range(3)
    ]
    assert torch.allclose(ssim(x, y), torch.stack(windows).mean(0), atol=1e-12)


def test_an_image_is_nearest_to_itself():
    x = images()
    assert rms_distance(x, x).tolist() == [0, 0, 0]
    assert psnr(x, x).tolist() == [math.inf] * 3
    assert ssim(x, x).tolist() == pytest.approx([1, 1, 1])
    assert ssim_of_whole(x, x).tolist() == pytest.approx([1, 1, 1])
    assert (ssim(x, images(seed=1)) < 0.5).all(), "unlike noise"


@pytest.mark.parametrize("measure", [rms_distance, psnr, ssim, ssim_of_whole])
def test_measures_are_symmetric_and_image_by_image(measure):
    x, y = images(seed=1), images(seed=2)
    assert torch.allclose(measure(x, y), measure(y, x), atol=1e-12)
    assert torch.allclose(measure(x, y), torch.cat([measure(a[None], b[None]) for a, b in zip(x, y, strict=True)]))


def test_more_noise_is_farther_by_every_measure():
    x, noise = images(1), images(1, seed=9) - 0.5
    near, far = (x + 0.05 * noise).clamp(0, 1), (x + 0.5 * noise).clamp(0, 1)
    assert rms_distance(x, near) < rms_distance(x, far)
    assert psnr(x, near) > psnr(x, far)
    assert ssim(x, near) > ssim(x, far)


def test_frechet_distance_is_zero_for_equal_features_and_symmetric():
    x, y = features(50, 4), features(40, 4, seed=1) * 2 + 1
    assert float(frechet_distance(x, x)) == pytest.approx(0, abs=1e-9)
    assert float(frechet_distance(x, y)) == pytest.approx(float(frechet_distance(y, x)), abs=1e-9)


def test_frechet_distance_of_a_shift_is_its_squared_length():
    x = features(50, 4)
    assert float(frechet_distance(x, x + 3)) == pytest.approx(4 * 9, abs=1e-8)


def test_frechet_distance_of_covariances_that_do_not_commute():
    """Against the root of the product itself, by its eigenvalues, which are real although it is not symmetric."""
    (m1, m2), (a, b) = features(2, 3, seed=5), (features(3, 3, seed=6), features(3, 3, seed=7))
    S1, S2 = a @ a.T, b @ b.T
    root = torch.linalg.eigvals(S1 @ S2).real.sqrt().sum()
    expected = (m1 - m2).square().sum() + S1.trace() + S2.trace() - 2 * root
    assert float(frechet_distance_of_moments(m1, S1, m2, S2)) == pytest.approx(float(expected), abs=1e-9)


def test_fewer_samples_than_features_is_finite():
    x, y = features(4, 16).float(), features(5, 16, seed=1).float()
    assert math.isfinite(frechet_distance(x, y))
    assert float(frechet_distance(x, x)) == pytest.approx(0, abs=1e-6)


def test_a_singular_covariance_gets_a_ridge():
    zero, one = torch.zeros(2, 2), torch.eye(2)
    expected = 2 * (1 + 1e-6 - 2 * math.sqrt(1e-6))
    assert float(frechet_distance_of_moments(torch.zeros(2), zero, torch.zeros(2), one)) == pytest.approx(expected)


@pytest.mark.parametrize("measure", [rms_distance, psnr, ssim, ssim_of_whole])
def test_images_of_different_shapes_are_refused(measure):
    with pytest.raises(ValueError, match="same shape"):
        measure(images(3), images(1))


def test_windows_need_room():
    with pytest.raises(ValueError, match="at least 11x11"):
        ssim(images(side=10), images(side=10))


def test_one_row_has_no_covariance():
    with pytest.raises(ValueError, match="at least two rows"):
        frechet_distance(features(1, 3), features(4, 3))

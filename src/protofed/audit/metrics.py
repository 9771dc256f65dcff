"""How near a reconstruction comes to its original: pure functions on batches of images in [0, 1], one value per image.

The pixel distance is the root mean square, the measure in which the threshold of 0.1 for "memorised" is stated.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

_WINDOW, _SIGMA = 11, 1.5
_C1, _C2 = 0.01**2, 0.03**2  # (0.01 L)^2 and (0.03 L)^2 with L = 1
_RIDGE = 1e-6


def rms_distance(x: Tensor, y: Tensor) -> Tensor:
    """Root of the mean squared pixel difference, [n]."""
    return _mean_square(x, y).sqrt()


def psnr(x: Tensor, y: Tensor) -> Tensor:
    """Peak signal-to-noise ratio in decibels, [n]; infinite where two images are equal."""
    return -10 * _mean_square(x, y).log10()


def ssim(x: Tensor, y: Tensor) -> Tensor:
    """Structural similarity of images [n, C, H, W], [n].

    Moments are taken in a Gaussian window (11x11, sigma 1.5) that lies wholly inside the image; the mean is over its
    positions and the channels.
    """
    _same_shape(x, y)
    if x.ndim != 4 or min(x.shape[2:]) < _WINDOW:
        raise ValueError(f"images must be [n, C, H, W] of at least {_WINDOW}x{_WINDOW} pixels, not {list(x.shape)}")
    moments = (_windowed(values) for values in (x, y, x * x, y * y, x * y))
    return _similarity(*moments).mean((1, 2, 3))


def ssim_of_whole(x: Tensor, y: Tensor) -> Tensor:
    """Structural similarity with the image as the one window, every pixel counting the same, [n]; for tiny images."""
    _same_shape(x, y)
    moments = (values.flatten(2).mean(2) for values in (x, y, x * x, y * y, x * y))
    return _similarity(*moments).mean(1)


def frechet_distance(x: Tensor, y: Tensor) -> Tensor:
    """Fréchet distance of two sets of features [n, d] and [m, d], taken for Gaussian; a scalar.

    It is the FID if the features are those of Inception-v3. It depends on how many samples there are, so report that.
    """
    return frechet_distance_of_moments(*_moments(x), *_moments(y))


def frechet_distance_of_moments(m1: Tensor, S1: Tensor, m2: Tensor, S2: Tensor) -> Tensor:
    """|m1 - m2|^2 + Tr(S1 + S2 - 2 (S1 S2)^(1/2)) for means [d] and covariances [d, d]."""
    m1, m2, S1, S2 = m1.double(), m2.double(), _regular(S1.double()), _regular(S2.double())
    # S1 S2 has the eigenvalues of the symmetric S1^(1/2) S2 S1^(1/2), of which real roots can be taken safely.
    values, vectors = torch.linalg.eigh(S1)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    overlap = torch.linalg.eigvalsh(root @ S2 @ root).clamp(min=0).sqrt().sum()
    distance: Tensor = (m1 - m2).square().sum() + S1.trace() + S2.trace() - 2 * overlap
    return distance.clamp(min=0)


def _similarity(mx: Tensor, my: Tensor, mxx: Tensor, myy: Tensor, mxy: Tensor) -> Tensor:
    """SSIM from the means of x, y, x^2, y^2 and x y."""
    vx, vy, cxy = mxx - mx * mx, myy - my * my, mxy - mx * my
    return (2 * mx * my + _C1) * (2 * cxy + _C2) / ((mx * mx + my * my + _C1) * (vx + vy + _C2))


def _windowed(x: Tensor) -> Tensor:
    """Weighted means in every position of the window; the Gaussian is separable."""
    offsets = torch.arange(_WINDOW, dtype=x.dtype, device=x.device) - _WINDOW // 2
    weights = (-(offsets**2) / (2 * _SIGMA**2)).exp()
    column = (weights / weights.sum()).view(1, 1, -1, 1)
    means = F.conv2d(F.conv2d(x.flatten(0, 1).unsqueeze(1), column), column.transpose(2, 3))
    return means.view(*x.shape[:2], *means.shape[2:])


def _moments(features: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and covariance (divided by n - 1) of rows; float64, because covariances of features cancel."""
    if features.ndim != 2 or len(features) < 2:
        raise ValueError(f"features must be [n, d] with at least two rows, not {list(features.shape)}")
    rows = features.double()
    return rows.mean(0), torch.cov(rows.T).view(rows.shape[1], rows.shape[1])


def _regular(S: Tensor) -> Tensor:
    """The covariance, with 1e-6 I added where it is singular: with fewer samples than features it always is."""
    if int(torch.linalg.matrix_rank(S, hermitian=True)) == len(S):
        return S
    return S + _RIDGE * torch.eye(len(S), dtype=S.dtype, device=S.device)


def _mean_square(x: Tensor, y: Tensor) -> Tensor:
    _same_shape(x, y)
    return (x - y).square().flatten(1).mean(1)


def _same_shape(x: Tensor, y: Tensor) -> None:
    """Refuse what broadcasting would silently compare otherwise."""
    if x.shape != y.shape:
        raise ValueError(f"images to compare must have the same shape, not {list(x.shape)} and {list(y.shape)}")

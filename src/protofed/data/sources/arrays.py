"""Arrays out of published files as labelled images."""

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from protofed.data.images import Domain, Images
from protofed.errors import UserError


def make_images(pixels: NDArray[np.generic], labels: ArrayLike, where: str) -> Images:
    """uint8 pixels N x H x W or N x H x W x C and one label each."""
    stacked = pixels[..., None] if pixels.ndim == 3 else pixels
    y = np.asarray(labels).reshape(-1).astype(np.int64)
    if stacked.ndim != 4 or stacked.dtype != np.uint8 or stacked.shape[3] not in (1, 3):
        raise UserError(f"{where} holds {pixels.dtype} of shape {pixels.shape}, not 8-bit images; download it again")
    if len(stacked) != len(y) or not len(y):
        raise UserError(f"{where} holds {len(stacked)} images and {len(y)} labels; download it again")
    x = np.require(stacked.transpose(0, 3, 1, 2), requirements=["C", "W"])
    return Images(torch.from_numpy(x), torch.from_numpy(y))


def from_unit(values: NDArray[np.floating]) -> NDArray[np.uint8]:
    """Numbers between 0 and 1 as bytes; what strays beyond is cut off."""
    return np.asarray(np.rint(np.clip(values, 0, 1) * 255), dtype=np.uint8)


def make_domain(name: str, train: Images, test: Images, classes: int) -> Domain:
    """A domain whose labels are checked against the number of classes."""
    for part in (train, test):
        low, high = int(part.y.min()), int(part.y.max())
        if low < 0 or high >= classes:
            raise UserError(f"{name}: labels run from {low} to {high}, but there are {classes} classes")
    return Domain(name, train, test)


def damaged(path: object, problem: BaseException) -> UserError:
    """The line for a file that is not what its name says."""
    reason = str(problem).partition("\n")[0] or type(problem).__name__
    return UserError(f"{path} cannot be read ({reason}); download it again")

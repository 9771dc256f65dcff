"""SVHN: the cropped digits, as MATLAB files."""

from pathlib import Path

import numpy as np

from protofed.data.images import Images, RawData
from protofed.data.sources.arrays import damaged, make_domain, make_images
from protofed.data.sources.idx import DIGITS
from protofed.data.sources.source import Size
from protofed.errors import UserError
from protofed.limits import refuse_giants


def read_svhn(folder: Path, _: Size) -> RawData:
    """Training and test set; the extra images are not used."""
    train, test = (_part(folder / f"{part}_32x32.mat") for part in ("train", "test"))
    return RawData(DIGITS, {"svhn": make_domain("svhn", train, test, len(DIGITS))})


def _part(path: Path) -> Images:
    """X is height x width x 3 x N; in y the digit 0 is written as 10."""
    try:
        from scipy.io import loadmat, whosmat

        for name, shape, _ in whosmat(path):
            if name in ("X", "y"):
                refuse_giants(path, tuple(shape))
        content = loadmat(path, variable_names=["X", "y"])
        pixels, labels = np.asarray(content["X"]).transpose(3, 0, 1, 2), np.asarray(content["y"]).reshape(-1) % 10
    except UserError:
        raise
    except Exception as problem:
        # A damaged file can surface anywhere in the reader, as any exception.
        raise damaged(path, problem) from None
    return make_images(pixels, labels, str(path))

"""MedMNIST: one npz file per set, in one or several sizes."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from protofed.data.images import RawData
from protofed.data.npz import READ_ERRORS, read_arrays
from protofed.data.sources.arrays import damaged, make_domain, make_images
from protofed.data.sources.source import Size

_SIDES = (28, 64, 128, 224)


def medmnist_reader(stem: str, classes: Sequence[str]) -> Callable[[Path, Size], RawData]:
    """The reader of one set, whose files begin with `stem`."""

    def read(folder: Path, size: Size) -> RawData:
        """Validation images are trained on: a run takes its own validation images out of the training images."""
        path = _fitting(folder, stem, size)
        try:
            archive = read_arrays(path)
            x = np.concatenate([archive["train_images"], archive["val_images"]])
            y = np.concatenate([archive["train_labels"].reshape(-1), archive["val_labels"].reshape(-1)])
            test = make_images(archive["test_images"], archive["test_labels"], f"{path}, test")
        except READ_ERRORS as problem:
            raise damaged(path, problem) from None
        return RawData(tuple(classes), {stem: make_domain(stem, make_images(x, y, str(path)), test, len(classes))})

    return read


def _fitting(folder: Path, stem: str, size: Size) -> Path:
    """The smallest file with the size asked for, or else the largest there is; without a wish the smallest."""
    names = {side: folder / (f"{stem}.npz" if side == 28 else f"{stem}_{side}.npz") for side in _SIDES}
    present = {side: path for side, path in names.items() if path.is_file()}
    enough = [side for side in present if size is None or side >= max(size)]
    return present[min(enough)] if enough else present[max(present)]

"""CIFAR-10: pickled batches, read without running anything they may contain."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch

from protofed.data.images import Images, RawData
from protofed.data.pixels import join
from protofed.data.sources.arrays import damaged, make_domain, make_images
from protofed.data.sources.source import Size
from protofed.errors import UserError

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def _latin1(text: str, encoding: str) -> bytes:
    """Bytes as version 2 pickles hold them; other codecs could double a text again and again."""
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"it encodes text as {encoding}, which image data does not need")
    return text.encode(encoding)


_REBUILD_ARRAY = np.empty(0).__reduce__()[0]
# All that a pickled array of numbers needs; numpy moved its own function in version 2.
_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _REBUILD_ARRAY,
    ("numpy._core.multiarray", "_reconstruct"): _REBUILD_ARRAY,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): _latin1,
}


def read_cifar10(folder: Path, _: Size) -> RawData:
    """Five training batches and the test batch."""
    batches = [_batch(folder / f"data_batch_{number}") for number in range(1, 6)]
    train = Images(join([batch.x for batch in batches]), torch.cat([batch.y for batch in batches]))
    return RawData(CLASSES, {"cifar10": make_domain("cifar10", train, _batch(folder / "test_batch"), len(CLASSES))})


class _Unpickler(pickle.Unpickler):
    """Knows arrays and nothing else, so a pickle cannot call anything."""

    def find_class(self, module: str, name: str) -> Any:
        """One of the few things arrays are made with."""
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which image data does not need")
        return _ALLOWED[module, name]


def _batch(path: Path) -> Images:
    """A dictionary with data, N x 3072 bytes in planes of red, green and blue, and labels."""
    try:
        with path.open("rb") as file:
            content = _Unpickler(file, encoding="bytes").load()
        pixels = np.asarray(content[b"data"]).reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        labels = np.asarray(content[b"labels"], dtype=np.int64)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; complete the original files") from None
    except Exception as problem:
        # Bytes that are no pickle make it raise almost anything.
        raise damaged(path, problem) from None
    return make_images(pixels, labels, str(path))

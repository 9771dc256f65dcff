"""MNIST and EMNIST: idx files, plain or gzipped."""

import gzip
import struct
import zlib
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from numpy.typing import NDArray

from protofed.data.images import Images, RawData
from protofed.data.sources.arrays import damaged, make_domain, make_images
from protofed.data.sources.source import Size
from protofed.errors import UserError
from protofed.limits import refuse_giants

DIGITS = tuple("0123456789")
_UNSIGNED_BYTES = 8


def read_mnist(folder: Path, _: Size) -> RawData:
    """MNIST with its official test set."""
    train, test = (
        _part(folder, f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte") for part in ("train", "t10k")
    )
    return RawData(DIGITS, {"mnist": make_domain("mnist", train, test, len(DIGITS))})


def read_emnist(
    folder: Path,
    _: Size,
    *,
    emnist_split: Annotated[Literal["bymerge", "balanced"], "which of EMNIST's own divisions is read"] = "bymerge",
) -> RawData:
    """EMNIST with 47 classes; its images are stored transposed and are turned upright here."""
    stem = f"emnist-{emnist_split}"
    classes = _mapping(folder / f"{stem}-mapping.txt")
    train, test = (
        _part(folder, f"{stem}-{part}-images-idx3-ubyte", f"{stem}-{part}-labels-idx1-ubyte")
        for part in ("train", "test")
    )
    train, test = (Images(part.x.transpose(2, 3).contiguous(), part.y) for part in (train, test))
    return RawData(classes, {"emnist": make_domain("emnist", train, test, len(classes))})


def read_idx(path: Path) -> NDArray[np.uint8]:
    """An idx file of bytes: two zeros, the type, the number of dimensions, big-endian sizes, then the values."""
    present = next((each for each in (path, path.with_name(f"{path.name}.gz")) if each.is_file()), None)
    if present is None:
        raise UserError(f"{path} is not there, nor {path.name}.gz; complete the original files")
    try:
        with gzip.open(present) if present.suffix == ".gz" else present.open("rb") as file:
            zeros, kind, dimensions = struct.unpack(">HBB", file.read(4))
            if zeros or kind != _UNSIGNED_BYTES:
                raise ValueError("not an idx file of bytes")
            shape = struct.unpack(f">{dimensions}I", file.read(4 * dimensions))
            # What is packed may be far larger than the file: no more is unpacked than the header promises.
            content = file.read(refuse_giants(present, shape) + 1)
        return np.frombuffer(content, dtype=np.uint8).reshape(shape)
    except (OSError, EOFError, ValueError, struct.error, zlib.error) as problem:
        raise damaged(present, problem) from None


def _part(folder: Path, pixels: str, labels: str) -> Images:
    return make_images(read_idx(folder / pixels), read_idx(folder / labels), str(folder / pixels))


def _mapping(path: Path) -> tuple[str, ...]:
    """The characters of the labels: a line is a label and the codes of its characters, of which the first counts."""
    try:
        lines = [[int(number) for number in line.split()] for line in path.read_text().splitlines() if line.strip()]
        codes = {label: code for label, code, *_ in lines}
        return tuple(chr(codes[label]) for label in range(len(codes)))
    except OSError:
        raise UserError(f"{path} is not there; choose another with --set data.emnist_split=..., or add it") from None
    except (ValueError, KeyError) as problem:
        raise damaged(path, problem) from None

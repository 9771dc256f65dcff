"""Digits: MNIST and EMNIST (idx files), USPS, SVHN (MATLAB files), and the image folders of SYN and MNIST-M."""

import bz2
import gzip
import importlib
import struct
import zlib
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray

from protofed.data.files import LabelledFile
from protofed.data.images import Images, RawData
from protofed.data.sources.arrays import damaged, from_unit, make_domain, make_images
from protofed.data.sources.csv_files import find_image, first_match
from protofed.data.sources.pictures import class_folders, read_files
from protofed.data.sources.source import Size
from protofed.errors import UserError, missing_extra
from protofed.system import check_array_size

DIGITS = tuple("0123456789")
_UNSIGNED_BYTES = 8
_USPS_SIDE = 16
# The longest line of USPS has 256 pixels; packed text may unfold to any length.
_LONGEST_LINE, _MOST_LINES = 16_384, 1_000_000
# The originals of Synthetic Digits are 128x128, of which the papers use a quarter; the other digits are no larger.
_SYN_SIZE = (32, 32)
_TRAIN_FOLDERS = ("imgs_train", "train", "training", "trainset")
_TEST_FOLDERS = ("imgs_valid", "valid", "val", "test", "testing", "testset")


def read_mnist(folder: Path, _: Size) -> RawData:
    """MNIST with its official test set."""
    train, test = (
        _idx_part(folder, f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte") for part in ("train", "t10k")
    )
    return RawData(DIGITS, {"mnist": make_domain("mnist", train, test, len(DIGITS))})


def read_emnist(
    folder: Path,
    _: Size,
    *,
    emnist_split: Annotated[Literal["bymerge", "balanced"], "which of EMNIST's own splits to read"] = "bymerge",
) -> RawData:
    """EMNIST with 47 classes; its images are stored transposed and are turned upright here."""
    stem = f"emnist-{emnist_split}"
    classes = _mapping(folder / f"{stem}-mapping.txt")
    train, test = (
        _idx_part(folder, f"{stem}-{part}-images-idx3-ubyte", f"{stem}-{part}-labels-idx1-ubyte")
        for part in ("train", "test")
    )
    train, test = (Images(part.x[:].transpose(2, 3).contiguous(), part.y) for part in (train, test))
    return RawData(classes, {"emnist": make_domain("emnist", train, test, len(classes))})


def read_idx(path: Path) -> NDArray[np.uint8]:
    """An idx file of bytes: two zeros, the type, the number of dimensions, big-endian sizes, then the values."""
    present = next((each for each in (path, path.with_name(f"{path.name}.gz")) if each.is_file()), None)
    if present is None:
        raise UserError(f"neither {path} nor {path.name}.gz exists; complete the original files")
    try:
        with gzip.open(present) if present.suffix == ".gz" else present.open("rb") as file:
            zeros, kind, dimensions = struct.unpack(">HBB", file.read(4))
            if zeros or kind != _UNSIGNED_BYTES:
                raise ValueError("not an idx file of bytes")
            shape = struct.unpack(f">{dimensions}I", file.read(4 * dimensions))
            # What is packed may be far larger than the file: no more is unpacked than the header promises.
            content = file.read(check_array_size(present, shape) + 1)
        return np.frombuffer(content, dtype=np.uint8).reshape(shape)
    except (OSError, EOFError, ValueError, struct.error, zlib.error) as problem:
        raise damaged(present, problem) from None


def _idx_part(folder: Path, pixels: str, labels: str) -> Images:
    return make_images(read_idx(folder / pixels), read_idx(folder / labels), str(folder / pixels))


def _mapping(path: Path) -> tuple[str, ...]:
    """The characters of the labels: a line is a label and the codes of its characters, of which the first counts."""
    try:
        lines = [[int(number) for number in line.split()] for line in path.read_text().splitlines() if line.strip()]
        codes = {label: code for label, code, *_ in lines}
        return tuple(chr(codes[label]) for label in range(len(codes)))
    except OSError:
        raise UserError(f"{path} does not exist; choose another with --set data.emnist_split=..., or add it") from None
    except (ValueError, KeyError) as problem:
        raise damaged(path, problem) from None


def read_usps(folder: Path, _: Size) -> RawData:
    """The libsvm files if they are there, since they need no further package; otherwise the h5 file."""
    if (folder / "usps.bz2").is_file() and (folder / "usps.t.bz2").is_file():
        train, test = _libsvm(folder / "usps.bz2"), _libsvm(folder / "usps.t.bz2")
    else:
        train, test = _h5(folder / "usps.h5")
    return RawData(DIGITS, {"usps": make_domain("usps", train, test, len(DIGITS))})


def _libsvm(path: Path) -> Images:
    """Lines `label index:value ...`: labels 1 to 10 for the digits 0 to 9, pixels from -1 to 1."""
    labels: list[int] = []
    rows: list[np.ndarray] = []
    try:
        with bz2.open(path, "rt", encoding="ascii") as lines:
            while line := lines.readline(_LONGEST_LINE):
                if len(rows) == _MOST_LINES or not line.endswith("\n"):
                    raise ValueError("its lines or their number differ from those of USPS")
                label, *pairs = line.split()
                row = np.zeros(_USPS_SIDE * _USPS_SIDE, dtype=np.float32)
                for pair in pairs:
                    index, _, value = pair.partition(":")
                    row[int(index) - 1] = float(value)
                rows.append(row)
                labels.append(int(float(label)) - 1)
        pixels = from_unit((np.stack(rows) + 1) / 2).reshape(-1, _USPS_SIDE, _USPS_SIDE)
    except (OSError, EOFError, ValueError, IndexError) as problem:
        raise damaged(path, problem) from None
    return make_images(pixels, labels, str(path))


def _h5(path: Path) -> tuple[Images, Images]:
    """Groups train and test with data N x 256 between 0 and 1, and target."""
    try:
        h5py: Any = importlib.import_module("h5py")
    except ImportError:
        raise missing_extra(f"{path} needs h5py (or put usps.bz2 and usps.t.bz2 beside it)", "data") from None
    parts: list[Images] = []
    try:
        with h5py.File(path, "r") as file:
            for part in ("train", "test"):
                check_array_size(path, tuple(file[part]["data"].shape), 4)
                check_array_size(path, tuple(file[part]["target"].shape), 8)
                pixels = np.asarray(file[part]["data"], dtype=np.float32).reshape(-1, _USPS_SIDE, _USPS_SIDE)
                parts.append(make_images(from_unit(pixels), np.asarray(file[part]["target"]), f"{path}, {part}"))
    except (OSError, KeyError, ValueError, TypeError, AttributeError, RuntimeError) as problem:
        raise damaged(path, problem) from None
    return parts[0], parts[1]


def read_svhn(folder: Path, _: Size) -> RawData:
    """Training and test set; the extra images are not used."""
    train, test = (_mat_part(folder / f"{part}_32x32.mat") for part in ("train", "test"))
    return RawData(DIGITS, {"svhn": make_domain("svhn", train, test, len(DIGITS))})


def _mat_part(path: Path) -> Images:
    """X is height x width x 3 x N; in y the digit 0 is written as 10."""
    try:
        from scipy.io import loadmat, whosmat

        for name, shape, _ in whosmat(path):
            if name in ("X", "y"):
                check_array_size(path, tuple(shape))
        content = loadmat(path, variable_names=["X", "y"])
        pixels, labels = np.asarray(content["X"]).transpose(3, 0, 1, 2), np.asarray(content["y"]).reshape(-1) % 10
    except UserError:
        raise
    except Exception as problem:
        # A damaged file can surface anywhere in the reader, as any exception.
        raise damaged(path, problem) from None
    return make_images(pixels, labels, str(path))


def read_syn(folder: Path, size: Size) -> RawData:
    """Synthetic Digits: a folder per digit in a training and a validation folder, which serves as the test set."""
    return read_files({"syn": _folder_parts(folder)}, DIGITS, size or _SYN_SIZE)


def read_mnist_m(folder: Path, size: Size) -> RawData:
    """MNIST-M as its authors hand it out, with lists of labels; or with a folder per digit."""
    if not (folder / "mnist_m_train_labels.txt").is_file():
        return read_files({"mnist_m": _folder_parts(folder)}, DIGITS, size)
    files = [file for part in ("train", "test") for file in _listed(folder, part)]
    return read_files({"mnist_m": files}, DIGITS, size)


def _folder_parts(folder: Path) -> list[LabelledFile]:
    return [
        LabelledFile(picture.path, picture.label, part)
        for part, names in (("train", _TRAIN_FOLDERS), ("test", _TEST_FOLDERS))
        for picture in class_folders(first_match(folder, *names), DIGITS)
    ]


def _listed(folder: Path, part: str) -> list[LabelledFile]:
    table = folder / f"mnist_m_{part}_labels.txt"
    try:
        rows = [line.split() for line in table.read_text().splitlines() if line.strip()]
        pairs = [(name, label) for name, label in rows]
    except (OSError, ValueError) as problem:
        raise damaged(table, problem) from None
    return [LabelledFile(find_image([folder / f"mnist_m_{part}"], name, table), label, part) for name, label in pairs]

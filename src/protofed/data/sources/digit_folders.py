"""Synthetic Digits and MNIST-M: image files in folders."""

from pathlib import Path

from protofed.data.files import LabelledFile
from protofed.data.images import RawData
from protofed.data.sources.arrays import damaged
from protofed.data.sources.csv_files import find_image, first_match
from protofed.data.sources.idx import DIGITS
from protofed.data.sources.pictures import class_folders, read_files
from protofed.data.sources.source import Size

# The originals are 128x128, of which the papers use a quarter; the other digits are no larger.
SYN_SIZE = (32, 32)
TRAIN_FOLDERS = ("imgs_train", "train", "training", "trainset")
TEST_FOLDERS = ("imgs_valid", "valid", "val", "test", "testing", "testset")


def read_syn(folder: Path, size: Size) -> RawData:
    """Synthetic Digits: a folder per digit in a training and a validation folder, which serves as the test set."""
    return read_files({"syn": _parts(folder)}, DIGITS, size or SYN_SIZE)


def read_mnist_m(folder: Path, size: Size) -> RawData:
    """MNIST-M as its authors hand it out, with lists of labels; or with a folder per digit."""
    if not (folder / "mnist_m_train_labels.txt").is_file():
        return read_files({"mnist_m": _parts(folder)}, DIGITS, size)
    files = [file for part in ("train", "test") for file in _listed(folder, part)]
    return read_files({"mnist_m": files}, DIGITS, size)


def _parts(folder: Path) -> list[LabelledFile]:
    return [
        LabelledFile(picture.path, picture.label, part)
        for part, names in (("train", TRAIN_FOLDERS), ("test", TEST_FOLDERS))
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

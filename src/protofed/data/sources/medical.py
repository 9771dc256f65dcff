"""Chest X-rays (tuberculosis, COVID-QU-Ex), breast ultrasound (BUSI), newborns' skin (NeoJaundice), and MedMNIST."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

import numpy as np

from protofed.data.files import LabelledFile
from protofed.data.images import RawData
from protofed.data.npz import READ_ERRORS, read_arrays
from protofed.data.sources.arrays import damaged, make_domain, make_images
from protofed.data.sources.csv_files import find_image, first_match, read_rows
from protofed.data.sources.pictures import PHOTO_SIZE, GroupedFile, class_folders, images_in, read_files, split_80_20
from protofed.data.sources.source import Size
from protofed.errors import UserError

TB_CLASSES = ("normal", "tuberculosis")
COVID_CLASSES = ("COVID-19", "Non-COVID", "Normal")
BUSI_CLASSES = ("normal", "benign", "malignant")
JAUNDICE_CLASSES = ("low bilirubin", "high bilirubin")


def read_montgomery(folder: Path, size: Size) -> RawData:
    """Montgomery County: the last digit of a file name, 0 or 1, is the label."""
    return _tuberculosis("montgomery", _by_last_digit(folder / "CXR_png"), size)


def read_shenzhen(folder: Path, size: Size) -> RawData:
    """Shenzhen No. 3 Hospital, named as Montgomery's files are."""
    return _tuberculosis("shenzhen", _by_last_digit(folder / "CXR_png"), size)


def read_india(folder: Path, size: Size) -> RawData:
    """Dataset A of New Delhi: file names begin with n for normal, p for positive. Dataset B is DICOM and not read."""
    pictures: list[GroupedFile] = []
    for part in ("Training", "Testing"):
        for path in images_in(folder / part):
            if path.name[0].lower() not in "np":
                raise UserError(f"{path}: the name starts neither with n (normal) nor with p (positive)")
            pictures.append(GroupedFile(path, TB_CLASSES[path.name[0].lower() == "p"]))
    return _tuberculosis("india", pictures, size)


def read_covid_qu_ex(folder: Path, size: Size) -> RawData:
    """The part of COVID-QU-Ex with lung masks; its validation images are trained on, a run takes out its own."""
    files = [
        LabelledFile(path, label, "test" if part == "Test" else "train")
        for part in ("Train", "Val", "Test")
        for label in COVID_CLASSES
        for path in _beside_masks(folder / part / label)
    ]
    return read_files({"covid_qu_ex": files}, COVID_CLASSES, size or PHOTO_SIZE)


def _by_last_digit(folder: Path) -> list[GroupedFile]:
    pictures: list[GroupedFile] = []
    for path in images_in(folder):
        if path.stem[-2:] not in ("_0", "_1"):
            raise UserError(f"{path}: the name does not end in _0 (normal) or _1 (tuberculosis)")
        pictures.append(GroupedFile(path, TB_CLASSES[int(path.stem[-1])]))
    return pictures


def _tuberculosis(name: str, pictures: list[GroupedFile], size: Size) -> RawData:
    return read_files({name: split_80_20(name, pictures)}, TB_CLASSES, size or PHOTO_SIZE)


def _beside_masks(folder: Path) -> list[Path]:
    """The images of a class: in a folder `images` beside one of masks, or directly in the folder of the class."""
    return images_in(folder / "images" if (folder / "images").is_dir() else folder)


def read_busi(folder: Path, size: Size) -> RawData:
    """BUSI without the masks of its tumours."""
    pictures = [one for one in class_folders(folder, BUSI_CLASSES) if "_mask" not in one.path.stem]
    return read_files({"busi": split_80_20("busi", pictures)}, BUSI_CLASSES, size or PHOTO_SIZE)


def read_neojaundice(
    folder: Path,
    size: Size,
    *,
    bilirubin: Annotated[float, "serum bilirubin in mg/dL from which a newborn counts as high"] = 12.9,
) -> RawData:
    """NeoJaundice of MedFMC: three photographs of each newborn, which stay together."""
    table = first_match(folder, "*.csv")
    rows = read_rows(table, image=("image_idx",), patient=("patient_id",), blood=("blood(mg/dL)",))
    pictures: list[GroupedFile] = []
    for row in rows:
        try:
            high = float(row["blood"]) >= bilirubin
        except ValueError:
            raise UserError(
                f"{table}: {row['image']} has the bilirubin {row['blood']!r}, which is not a number"
            ) from None
        path = find_image([folder / "images", folder], row["image"], table)
        pictures.append(GroupedFile(path, JAUNDICE_CLASSES[high], row["patient"]))
    files = {"neojaundice": split_80_20("neojaundice", pictures)}
    return read_files(files, JAUNDICE_CLASSES, size or PHOTO_SIZE)


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

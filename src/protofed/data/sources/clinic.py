"""Breast ultrasound (BUSI) and photographs of newborns' skin (NeoJaundice)."""

from pathlib import Path
from typing import Annotated

from protofed.data.images import RawData
from protofed.data.sources.csv_files import find_image, first_match, read_rows
from protofed.data.sources.pictures import PHOTO_SIZE, GroupedFile, class_folders, read_files, split_80_20
from protofed.data.sources.source import Size
from protofed.errors import UserError

BUSI_CLASSES = ("normal", "benign", "malignant")
JAUNDICE_CLASSES = ("low bilirubin", "high bilirubin")


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
            raise UserError(f"{table}: {row['image']} has the bilirubin {row['blood']!r}, which is no number") from None
        path = find_image([folder / "images", folder], row["image"], table)
        pictures.append(GroupedFile(path, JAUNDICE_CLASSES[high], row["patient"]))
    files = {"neojaundice": split_80_20("neojaundice", pictures)}
    return read_files(files, JAUNDICE_CLASSES, size or PHOTO_SIZE)

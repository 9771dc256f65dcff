"""Fundus photographs graded for diabetic retinopathy: APTOS, IDRiD, Retino, Kaggle DR and EyePACS with its sites."""

from collections import Counter
from pathlib import Path
from typing import Annotated

from protofed.data.files import LabelledFile
from protofed.data.images import RawData
from protofed.data.sources.csv_files import Row, find_image, first_match, read_rows, whole_number
from protofed.data.sources.pictures import PHOTO_SIZE, GroupedFile, read_files, split_80_20
from protofed.data.sources.source import Size
from protofed.errors import UserError

GRADES = ("No DR", "Mild", "Moderate", "Severe", "Proliferative")
EYEPACS_SITES = 5
# What EyePACS calls the photograph that shows macula and disc, and what its graders call good enough.
_FIELD_WITH_BOTH = ("field 1", "1", "1.0")
_GOOD_ENOUGH = ("adequate", "good", "excellent")

CircleCrop = Annotated[bool, "crop every photograph to its round field of view, with black around it"]


def read_aptos(folder: Path, size: Size, *, circle_crop: CircleCrop = False) -> RawData:
    """APTOS 2019: train.csv and train_images; the competition's test images have no labels."""
    table = folder / "train.csv"
    rows = read_rows(table, image=("id_code",), grade=("diagnosis",))
    pictures = [_picture(table, row, [folder / "train_images"]) for row in rows]
    return _read({"aptos": split_80_20("aptos", pictures)}, size, circle_crop)


def read_idrid(folder: Path, size: Size, *, circle_crop: CircleCrop = False) -> RawData:
    """IDRiD, disease grading: its own training and testing set."""
    files: list[LabelledFile] = []
    for part, word in (("train", "Training"), ("test", "Testing")):
        table = first_match(folder, f"**/*{word} Labels.csv")
        photographs = first_match(folder, f"**/*{word} Set")
        rows = read_rows(table, image=("Image name",), grade=("Retinopathy grade",))
        pictures = (_picture(table, row, [photographs]) for row in rows)
        files += [LabelledFile(picture.path, picture.label, part) for picture in pictures]
    return _read({"idrid": files}, size, circle_crop)


def read_retino(folder: Path, size: Size, *, circle_crop: CircleCrop = False) -> RawData:
    """Retino of MedFMC."""
    table = first_match(folder, "*train*.csv", "*.csv")
    rows = read_rows(table, image=("img_id", "image", "image_id"), grade=("label", "grade", "level", "dr_grade"))
    pictures = [_picture(table, row, [folder / "images", folder]) for row in rows]
    return _read({"retino": split_80_20("retino", pictures)}, size, circle_crop)


def read_kaggle_dr(folder: Path, size: Size, *, circle_crop: CircleCrop = False) -> RawData:
    """The training part of Kaggle's competition of 2015; a column `site`, if the table has one, makes the domains."""
    table = folder / "trainLabels.csv"
    rows = read_rows(table, image=("image",), grade=("level",), site=("site", ""))
    sites: dict[str, list[GroupedFile]] = {}
    for row in rows:
        # 10_left and 10_right are the eyes of patient 10.
        picture = _picture(table, row, [folder / "train"], group=row["image"].partition("_")[0])
        sites.setdefault(row["site"] or "kaggle_dr", []).append(picture)
    return _read({name: split_80_20(name, sites[name]) for name in sorted(sites)}, size, circle_crop)


def read_eyepacs(folder: Path, size: Size, *, circle_crop: CircleCrop = False) -> RawData:
    """The five largest sites by their usable photographs, site1 the largest; usable as FedAdapterProto has it."""
    table = first_match(folder, "metadata*.csv", "*.csv")
    rows = read_rows(
        table,
        image=("image_path",),
        grade=("diagnosis_image_dr_level",),
        field=("image_field",),
        quality=("session_image_quality",),
        site=("clinical_siteIdentifier",),
        patient=("patient_id", ""),
    )
    usable = [row for row in rows if _usable(row)]
    sizes = Counter(row["site"] for row in usable)
    largest = sorted(sizes, key=lambda site: (-sizes[site], site))[:EYEPACS_SITES]
    if not largest:
        raise UserError(f"{table} lists no photograph of field 1 with adequate quality, a grade and a site")
    files: dict[str, list[LabelledFile]] = {}
    for number, site in enumerate(largest, 1):
        members = [row for row in usable if row["site"] == site]
        folders = [folder / "images", folder]
        pictures = [_picture(table, row, folders, group=row["patient"]) for row in members]
        files[f"site{number}"] = split_80_20(f"site{number}", pictures)
    return _read(files, size, circle_crop)


def _usable(row: Row) -> bool:
    shows_both = row["field"].lower() in _FIELD_WITH_BOTH
    return (
        shows_both and row["quality"].lower() in _GOOD_ENOUGH and row["grade"] not in ("", "nan") and bool(row["site"])
    )


def _picture(table: Path, row: Row, folders: list[Path], group: str = "") -> GroupedFile:
    grade = whole_number(table, row["grade"])
    if not 0 <= grade < len(GRADES):
        raise UserError(f"{table}: the grade {grade} of {row['image']} is not one of 0 to {len(GRADES) - 1}")
    return GroupedFile(find_image(folders, row["image"], table), GRADES[grade], group)


def _read(files: dict[str, list[LabelledFile]], size: Size, circle_crop: bool) -> RawData:
    return read_files(files, GRADES, size or PHOTO_SIZE, crop=circle_crop)

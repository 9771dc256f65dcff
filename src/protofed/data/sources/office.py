"""Office-Caltech10 and PACS: a folder per domain, in it a folder per class."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from protofed.data.files import LabelledFile, class_order
from protofed.data.images import RawData
from protofed.data.sources.arrays import damaged
from protofed.data.sources.csv_files import first_match
from protofed.data.sources.pictures import EVERY_TENTH, PHOTO_SIZE, class_folders, read_files, split_every_tenth
from protofed.data.sources.source import Size
from protofed.errors import UserError

OFFICE_DOMAINS = ("caltech", "amazon", "webcam", "dslr")
PACS_DOMAINS = ("photo", "art_painting", "cartoon", "sketch")
PACS_CLASSES = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
PacsSplit = Annotated[
    Literal["tenth", "kfold"], "tenth: 80/20 by FPL's rule; kfold: the official train and crossval lists"
]
PacsTest = Annotated[
    Literal["heldout", "all"], "test on what is not used for training, or on the whole domain as earlier code does"
]


def read_office_caltech10(folder: Path, size: Size) -> RawData:
    """The ten classes that Office and Caltech-256 share, divided by FPL's rule."""
    files = {name: split_every_tenth(class_folders(folder / name)) for name in OFFICE_DOMAINS}
    classes = class_order(file.label for members in files.values() for file in members)
    return read_files(files, classes, size or PHOTO_SIZE)


def read_pacs(folder: Path, size: Size, *, pacs_split: PacsSplit = "tenth", pacs_test: PacsTest = "heldout") -> RawData:
    """PACS, trained on one part of each domain and tested on the other, or on all of it."""
    files: dict[str, list[LabelledFile]] = {}
    for name in PACS_DOMAINS:
        everything = class_folders(folder / name, PACS_CLASSES)
        parts = split_every_tenth(everything) if pacs_split == "tenth" else _kfold(folder, name)
        if pacs_test == "all":
            trained = [file for file in parts if file.part == "train"]
            parts = [*trained, *(LabelledFile(picture.path, picture.label, "test") for picture in everything)]
        files[name] = parts
    split = EVERY_TENTH if pacs_split == "tenth" else "the official train and crossval lists"
    tested = "tested on held-out images" if pacs_test == "heldout" else "tested on the whole domain"
    return replace(read_files(files, PACS_CLASSES, size or PHOTO_SIZE), source=f"{split}; {tested}")


def _kfold(folder: Path, domain: str) -> list[LabelledFile]:
    return [*_listed(folder, domain, "train", "train"), *_listed(folder, domain, "crossval", "test")]


def _listed(folder: Path, domain: str, which: str, part: str) -> Sequence[LabelledFile]:
    """Lines `DOMAIN/CLASS/FILE NUMBER`; the class is that of the folder."""
    name = f"{domain}_{which}_kfold.txt"
    table = first_match(folder, name, f"*/{name}", f"*/*/{name}")
    try:
        paths = [Path(line.rsplit(maxsplit=1)[0]) for line in table.read_text().splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as problem:
        raise damaged(table, problem) from None
    for path in paths:
        if not (folder / path).is_file():
            raise UserError(f"{table} names {path}, which is not in {folder}; complete the original files")
    return [LabelledFile(folder / path, path.parent.name, part) for path in paths]

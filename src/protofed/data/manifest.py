"""Reads a MANIFEST.csv: one row per image with its file, label and domain, and optionally its split and patient."""

import csv
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np

from protofed.data.files import LabelledFile, class_order, is_image, majority_labels, read_domains
from protofed.data.images import RawData
from protofed.data.partition import stratified_split
from protofed.errors import UserError
from protofed.seeding import numpy_generator

_REQUIRED = ("file", "label", "domain")
_TEST_PART = 0.2

_Row = dict[str, str]


def read_manifest(path: Path, image_size: tuple[int, int] | None = None) -> RawData:
    """The domains a csv file lists; files are relative to the csv.

    Without a column `split` every domain is divided 80/20 by label, the same way each time. Images of one patient
    always stay together; patients are told apart within a domain, since two sites may number theirs alike.
    """
    rows = _rows(path)
    files: dict[str, list[LabelledFile]] = {}
    for name in dict.fromkeys(row["domain"] for row in rows):
        members = [row for row in rows if row["domain"] == name]
        parts = _given_split(path, members) if "split" in members[0] else _own_split(path, name, members)
        files[name] = [
            LabelledFile(path.parent / row["file"], row["label"], part)
            for row, part in zip(members, parts, strict=True)
        ]
    classes = class_order(row["label"] for row in rows)
    return replace(read_domains(files, classes, image_size), source=f"manifest {path.name}")


def _rows(path: Path) -> list[_Row]:
    """The rows, checked; `line` is added so that later mistakes can be located too."""
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            columns = [(column or "").strip().lower() for column in reader.fieldnames or ()]
            reader.fieldnames = columns
            missing = [column for column in _REQUIRED if column not in columns]
            if missing:
                raise UserError(
                    f"{path} lacks the column {', '.join(missing)}; "
                    "a manifest has the columns file, label, domain, and optionally split and patient"
                )
            rows = [_row(path, reader.line_num, row) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as problem:
        raise UserError(f"{path} cannot be read as a csv file in UTF-8 ({problem})") from None
    if not rows:
        raise UserError(f"{path} lists no images; give one row per image under the columns file, label, domain")
    again = [name for name, times in Counter(os.path.normpath(row["file"]) for row in rows).items() if times > 1]
    if again:
        raise UserError(f"{path} lists {again[0]} more than once; list every file once")
    return rows


def _row(path: Path, line: int, raw: dict[str, str | None]) -> _Row:
    row = {column: (text or "").strip() for column, text in raw.items() if isinstance(column, str)}
    for column in _REQUIRED:
        if not row[column]:
            raise UserError(f"{path} line {line}: the {column} is empty")
    file = path.parent / row["file"]
    if not file.is_file():
        raise UserError(f"{path} line {line}: there is no file {row['file']}; files are relative to the csv")
    if not is_image(file):
        raise UserError(f"{path} line {line}: {row['file']} is not an image file (png, jpg, tif or bmp)")
    return {**row, "line": str(line)}


def _given_split(path: Path, rows: list[_Row]) -> list[str]:
    """The column `split`, with no patient on both sides."""
    side: dict[str, str] = {}
    parts: list[str] = []
    for row in rows:
        part = row["split"].lower()
        if part not in ("train", "test"):
            raise UserError(f"{path} line {row['line']}: split is {row['split']!r}; it must be train or test")
        patient = row.get("patient", "")
        if patient and side.setdefault(patient, part) != part:
            raise UserError(
                f"{path} line {row['line']}: patient {patient} of domain {row['domain']} is in train and in test; "
                "keep all images of a patient in one of them"
            )
        parts.append(part)
    return parts


def _own_split(path: Path, domain: str, rows: list[_Row]) -> list[str]:
    """80/20 by patient, stratified by a patient's most frequent label; a row without a patient stands for itself."""
    # A file can never have the name of a patient here, because the first element of the pair tells them apart.
    groups = [("patient", row["patient"]) if row.get("patient") else ("file", row["file"]) for row in rows]
    # Sorted, so that the order of the rows does not change who is tested on.
    label_of = dict(sorted(majority_labels(groups, [row["label"] for row in rows]).items()))
    if len(label_of) < 2:
        raise UserError(
            f"{path}: domain {domain} has one patient only, so nothing is left to test on; "
            "add patients, or give a column split"
        )
    _, codes = np.unique(np.array(list(label_of.values())), return_inverse=True)
    _, test = stratified_split(codes.astype(np.int64), _TEST_PART, numpy_generator(0, "manifest", domain))
    patients = list(label_of)
    tested = {patients[position] for position in test}
    return ["test" if group in tested else "train" for group in groups]

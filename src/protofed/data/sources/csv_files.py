"""The csv files that come with published images."""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

from protofed.data.decoding import IMAGE_SUFFIXES
from protofed.errors import UserError

Row = dict[str, str]


def read_rows(path: Path, **columns: Sequence[str]) -> list[Row]:
    """The rows of a csv file; each keyword names a column wanted and what it may be called in the file.

    Names are compared without case and surrounding blanks. A first name of "" makes a column optional.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            headers = {(name or "").strip().lower(): name for name in reader.fieldnames or ()}
            column_of = {key: _column(path, headers, names) for key, names in columns.items()}
            rows = [
                {key: str(row[name] or "").strip() if name else "" for key, name in column_of.items()} for row in reader
            ]
    except (OSError, UnicodeDecodeError, csv.Error) as problem:
        raise UserError(f"{path} cannot be read as a csv file ({problem}); download it again") from None
    if not rows:
        raise UserError(f"{path} has no rows; download it again")
    return rows


def whole_number(path: Path, text: str) -> int:
    """A label such as 2 or 2.0."""
    try:
        value = float(text)
    except ValueError:
        value = float("nan")
    if value != value // 1:
        raise UserError(f"{path}: the label {text!r} is not a whole number")
    return int(value)


def find_image(folders: Iterable[Path], name: str, table: Path) -> Path:
    """The image a row names, in one of the folders, with the ending given or any other an image has."""
    stem = Path(name.lstrip("/"))
    for folder in folders:
        if stem.suffix.lower() in IMAGE_SUFFIXES and (folder / stem).is_file():
            return folder / stem
        base = stem.with_suffix("") if stem.suffix.lower() in IMAGE_SUFFIXES else stem
        for suffix in (*IMAGE_SUFFIXES, *(suffix.upper() for suffix in IMAGE_SUFFIXES)):
            candidate = folder / f"{base}{suffix}"
            if candidate.is_file():
                return candidate
    raise UserError(f"{table} names {name}, but there is no such image; complete the original files")


def first_match(folder: Path, *patterns: str) -> Path:
    """The first file or folder that matches one of the patterns."""
    for pattern in patterns:
        matches = sorted(folder.glob(pattern))
        if matches:
            return matches[0]
    raise UserError(f"{folder} has no {' or '.join(patterns)}; complete the original files")


def _column(path: Path, headers: dict[str, str], names: Sequence[str]) -> str:
    for name in names:
        if name and name.lower() in headers:
            return headers[name.lower()]
    if "" in names:
        return ""
    raise UserError(f"{path} has no column {' or '.join(names)}; download it again")

"""Lists a manifest: a csv file with one row per image: its file, label and domain, and maybe its split and group."""

import os
from collections.abc import Iterator
from pathlib import Path

from protofed.data.decoding import IMAGE_KINDS, is_image
from protofed.data.images import RawData
from protofed.data.listing import ListedFile, Listing, ReadOptions, read_listing
from protofed.data.problems import Problem, error, warning
from protofed.data.tables import TextTable, read_table
from protofed.errors import UserError

_COLUMNS = {
    "file": ("file", "filename", "file name", "path", "file path", "image", "image path", "image file"),
    "label": ("label", "class", "target", "diagnosis", "category"),
    "domain": ("domain", "site", "center", "centre", "hospital", "clinic", "institution"),
    "split": ("split", "part", "subset", "partition", "set"),
    "group": (
        "patient",
        "patient id",
        "patient number",
        "subject",
        "subject id",
        "case",
        "case id",
        "group",
        "group id",
        "participant",
        "participant id",
        "person",
        "person id",
    ),
}
_REQUIRED = ("file", "label", "domain")
_PARTS = {
    "train": "train",
    "training": "train",
    "test": "test",
    "testing": "test",
    "val": "validation",
    "valid": "validation",
    "validation": "validation",
    "dev": "validation",
}


def read_manifest(path: Path, image_size: tuple[int, int] | None = None, options: ReadOptions | None = None) -> RawData:
    """The domains a csv file lists; files are relative to the csv.

    Without a column `split` every domain is divided by label, the same way each time. Images of one patient always
    stay together; patients are told apart within a domain, since two sites may number theirs alike.
    """
    return read_listing(list_manifest(path), image_size, options or ReadOptions())


def list_manifest(path: Path) -> Listing:
    """The files of a manifest, with everything that is wrong with its rows."""
    try:
        table = read_table(path, _COLUMNS)
    except OSError as problem:
        raise UserError(f"{path} cannot be read ({problem.strerror})") from None
    missing = [column for column in _REQUIRED if column not in table.headings]
    if missing:
        raise UserError(
            f"{path} lacks the column {', '.join(missing)}; "
            "a manifest has the columns file, label, domain, and optionally split and patient"
        )
    if not table.rows:
        raise UserError(f"{path} lists no images; give one row per image under the columns file, label, domain")
    problems: list[Problem] = [warning("encoding", path, note, "save it in UTF-8") for note in table.notes]
    files = tuple(_files(path, table, problems))
    groups = table.headings.get("group", "")
    # Sites are read one after the other, in the order in which they first appear.
    order = {name: number for number, name in enumerate(dict.fromkeys(file.domain for file in files))}
    return Listing(
        path,
        f"manifest {path.name}",
        tuple(sorted(files, key=lambda file: order[file.domain])),
        (*problems, *_without_test(path, table, files)),
        f"column {groups}" if groups else "",
        "add a column split",
    )


def _files(path: Path, table: TextTable, problems: list[Problem]) -> Iterator[ListedFile]:
    seen: set[str] = set()
    for row in table.rows:
        where = f"{path} line {row['line']}"
        wrong = [*_empty_cells(row, where), *_wrong_part(row, where)]
        name, file = _located(path, row["file"])
        plain = os.path.normpath(name)
        if row["file"] and plain in seen:
            wrong.append(error("listed-twice", where, f"it lists {name} more than once", "list every file once"))
        elif row["file"] and not file.is_file():
            wrong.append(error("no-file", where, f"there is no file {name}", "files are relative to the csv"))
        elif row["file"] and not is_image(file):
            wrong.append(error("not-an-image", where, f"{name} is not an image file ({IMAGE_KINDS})"))
        seen.add(plain)
        problems += wrong
        if not wrong:
            part = _PARTS[row["split"].lower()] if "split" in row else ""
            yield ListedFile(str(file), row["domain"], row["label"], name, part, row.get("group", ""), where)


def _located(path: Path, name: str) -> tuple[str, Path]:
    """A file of the manifest; one that was written on Windows has its folders behind other slashes."""
    file = path.parent / name
    if "\\" in name and not file.exists():
        return name.replace("\\", "/"), path.parent / name.replace("\\", "/")
    return name, file


def _empty_cells(row: dict[str, str], where: str) -> list[Problem]:
    return [
        error("empty-cell", where, f"the {column} is empty", "fill it in, or remove the row")
        for column in _REQUIRED
        if not row[column]
    ]


def _wrong_part(row: dict[str, str], where: str) -> list[Problem]:
    if row.get("split", "train").lower() in _PARTS:
        return []
    return [error("split", where, f"split is {row['split']!r}", "it must be train, test or val")]


def _without_test(path: Path, table: TextTable, files: tuple[ListedFile, ...]) -> list[Problem]:
    """Sites whose column `split` leaves out a part that is needed."""
    if "split" not in table.headings:
        return []
    parts: dict[str, set[str]] = {}
    for file in files:
        parts.setdefault(file.domain, set()).add(file.part)
    return [
        error("no-test", path, f"domain {name} has no {part} images", f"put at least one image of it into {part}")
        for name, there in parts.items()
        for part in ("train", "test")
        if part not in there
    ]

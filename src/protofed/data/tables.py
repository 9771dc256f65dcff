"""Tables as people save them: commas, semicolons or tabs, any usual encoding, headings by any usual name."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from protofed.data.names import loose_form, one_form
from protofed.errors import UserError

_DELIMITERS = (",", ";", "\t", "|")
_FALLBACK = "cp1252"


@dataclass(frozen=True)
class TextTable:
    """Rows of a csv file by the names of its columns."""

    rows: tuple[dict[str, str], ...]
    """Each with its texts, and `line`, where it ends in the file."""
    headings: Mapping[str, str]
    """What each column that was asked for is called in the file."""
    notes: tuple[str, ...]


def read_table(path: Path, columns: Mapping[str, Sequence[str]]) -> TextTable:
    """The columns that are asked for, each by any of its names; case, blanks and separators do not matter.

    A column that the file lacks is missing from `headings`. Raises OSError, and a UserError where it is no table.
    """
    text, encoding = _text(path)
    delimiter = _delimiter(text, columns)
    if text[:4].lower() == "sep=":  # a hint that Excel leaves for itself
        text = text.partition("\n")[2]
    try:
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
        first = next(reader, [])
        place = {key: found for key, names in columns.items() if (found := _place(first, names)) is not None}
        rows = tuple(
            {
                **{key: one_form(row[at]) if at < len(row) else "" for key, at in place.items()},
                "line": str(reader.line_num),
            }
            for row in reader
            if any(cell.strip() for cell in row)
        )
    except csv.Error as problem:
        raise UserError(f"{path} cannot be read as a csv file ({problem}); save it as csv again") from None
    notes = (f"{path.name} is not in UTF-8 and was read as {encoding}",) if encoding == _FALLBACK else ()
    return TextTable(rows, {key: first[at].strip() for key, at in place.items()}, notes)


def _text(path: Path) -> tuple[str, str]:
    content = path.read_bytes()
    encodings = ("utf-16",) if content[:2] in (b"\xff\xfe", b"\xfe\xff") else ("utf-8-sig", _FALLBACK)
    for encoding in encodings:
        try:
            return content.decode(encoding), encoding
        except UnicodeDecodeError:
            continue
    raise UserError(f"{path} cannot be read as a csv file: its encoding is unknown; save it in UTF-8")


def _delimiter(text: str, columns: Mapping[str, Sequence[str]]) -> str:
    """The one with which most of the columns are found in the first line."""
    if text[:4].lower() == "sep=" and len(text) > 4:
        return text[4]
    first = text.partition("\n")[0].strip()

    def found(delimiter: str) -> int:
        cells = next(csv.reader([first], delimiter=delimiter), [])
        return sum(_place(cells, names) is not None for names in columns.values())

    return max(_DELIMITERS, key=found)


def _place(cells: Sequence[str], names: Sequence[str]) -> int | None:
    """The first of the names that is there wins."""
    loose = [loose_form(cell) for cell in cells]
    return next((loose.index(name) for name in map(loose_form, names) if name in loose), None)

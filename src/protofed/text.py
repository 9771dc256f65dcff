"""What people read and write: figures, tables, lists of names."""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

_TERMINAL_CODES = re.compile(r"\x1b(\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(\x07|\x1b\\)?|.)?|\x9b[0-?]*[ -/]*[@-~]")
_LONGEST = 300
_SMALLEST_P = 0.001


def percent(value: float | None) -> str:
    """An accuracy."""
    return "-" if value is None else f"{100 * value:.2f}"


def interval(bounds: Sequence[float] | None) -> str:
    """From where to where a figure may lie."""
    return "-" if bounds is None else f"{percent(bounds[0])} to {percent(bounds[1])}"


def p_value(p: float | None) -> str:
    """Of a test. A small one is never nought."""
    return "-" if p is None else f"< {_SMALLEST_P}" if p < _SMALLEST_P else f"{p:.3f}"


def p_equals(p: float) -> str:
    """The same in a sentence: `p = 0.012`."""
    return f"p {p_value(p)}" if p < _SMALLEST_P else f"p = {p_value(p)}"


def size(count: float | None) -> str:
    """Bytes in decimal units, as communication costs are given in papers."""
    if count is None:
        return "-"
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


def counted(count: int, noun: str) -> str:
    """`1 image`, `2 images`."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def duration(seconds: float) -> str:
    """Time as people say it."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 600:
        return "{} min {} s".format(*divmod(round(seconds), 60))
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def printable(text: str, longest: int = _LONGEST) -> str:
    """Somebody else's text in one line that is safe to show and short enough to keep: without terminal codes, control
    characters or marks that turn the direction of writing.
    """
    # What is cut off anyway is not looked at: a text of 30 MB costs nothing.
    head = _TERMINAL_CODES.sub("", text[: 4 * longest])
    words = "".join(character if character.isprintable() else " " for character in head).split()
    line = " ".join(words)
    return line if len(line) <= longest and len(text) <= 4 * longest else f"{line[: longest - 3]}..."


def setting(value: object) -> str:
    """The value of a setting as --set takes it."""
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def split_names(names: str | Iterable[str] | None) -> list[str] | None:
    """Names as a user gives them: `a,b` or a list; None for all."""
    if names is None:
        return None
    return [part.strip() for part in names.split(",") if part.strip()] if isinstance(names, str) else list(names)


@dataclass(frozen=True)
class Table:
    """A table under a title; its cells are texts, or figures for an output that formats them itself."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    numeric: bool = True
    """Whether the columns after the first hold figures, which are aligned to the right."""

    def markdown(self) -> str:
        """Without the title."""
        rule = [":--", *["--:" if self.numeric else ":--"] * (len(self.columns) - 1)]
        return "\n".join("| " + " | ".join(row) + " |" for row in [self.columns, rule, *self.rows])

    def as_dict(self) -> dict[str, Any]:
        """As the JSON files of galleries hold it."""
        return {"title": self.title, "columns": self.columns, "rows": self.rows}

"""Figures as people read them."""

from collections.abc import Sequence


def percent(value: float | None) -> str:
    """An accuracy."""
    return "-" if value is None else f"{100 * value:.2f}"


def size(count: float | None) -> str:
    """Bytes in decimal units, as communication costs are given in papers."""
    if count is None:
        return "-"
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


def duration(seconds: float) -> str:
    """Time as people say it."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 600:
        return "{} min {} s".format(*divmod(round(seconds), 60))
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column to the left, figures to the right."""
    rule = [":--", *["--:"] * (len(columns) - 1)]
    return "\n".join("| " + " | ".join(row) + " |" for row in [columns, rule, *rows])

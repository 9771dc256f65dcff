"""What results look like in a notebook: rows as a table, a table and a chart under a title."""

from collections.abc import Mapping, Sequence
from typing import Any

from protofed.pages.drawing import Drawing
from protofed.pages.markup import Html, tag
from protofed.text import Table


def frame(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Rows as a pandas DataFrame where pandas is installed, otherwise as a list of dictionaries."""
    try:
        import pandas  # type: ignore[import-untyped,unused-ignore]
    except ImportError:
        return [dict(row) for row in rows]
    return pandas.DataFrame([dict(row) for row in rows])


def notebook_html(title: str, tables: Sequence[Table], drawing: Drawing | None = None) -> str:
    """A result as a notebook shows it."""
    shown = [_table(table) for table in tables if table.rows]
    return tag("div", tag("strong", title), *shown, "" if drawing is None else tag("div", Html(drawing.svg)))


def _table(table: Table) -> Html:
    head = tag("tr", *(tag("th", column, scope="col") for column in table.columns))
    rows = [tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell) for cell in row[1:])) for row in table.rows]
    return tag("table", tag("caption", table.title), tag("thead", head), tag("tbody", *rows))

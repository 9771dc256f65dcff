"""A picture of paired differences with their intervals, group by group."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import Literal, NamedTuple

_ROW, _HEADER, _WIDTH, _MARGIN = 16, 26, 460, 20
_TOP = 40
"""Above the rows: what the marks mean, and the axis, which the picture is too tall to have below alone."""
_MOST = 20.0
"""Points to either side of no difference; what lies beyond is drawn at the edge."""
_APART = 5.0
"""Between the marks of a row, so that one does not hide the other."""

Origin = Literal["scratch", "ImageNet", "paper"]
_COLOURS: dict[Origin, str] = {"scratch": "#8a6d3b", "ImageNet": "#1f6feb", "paper": "#8250df"}
_MEANINGS: dict[Origin, str] = {"scratch": "from scratch", "ImageNet": "from ImageNet", "paper": "the paper"}


class Mark(NamedTuple):
    """A difference in points, with its interval if seeds give one: measured from that start, or published."""

    origin: Origin
    points: float
    interval: tuple[float, float] | None
    text: str


class Row(NamedTuple):
    """What is compared with what."""

    name: str
    marks: Sequence[Mark]


class RowGroup(NamedTuple):
    """Rows that belong together."""

    heading: str
    rows: Sequence[Row]


def forest_plot(groups: Iterable[RowGroup], names: int = 330) -> str:
    """All differences with their intervals, as SVG; `names` is the width of the column to the left."""
    drawn = list(groups)
    used = {mark.origin for group in drawn for row in group.rows for mark in row.marks}
    lines = _legend([origin for origin in _COLOURS if origin in used])
    y = _TOP
    for group in drawn:
        y += _HEADER
        lines.append(f'<text x="{_MARGIN}" y="{y - 8}" class="heading">{escape(group.heading)}</text>')
        for row in group.rows:
            lines += _drawn(row, y, names)
            y += _height(row)
    axis = [line for tick in (-_MOST, -_MOST / 2, 0.0, _MOST / 2, _MOST) for line in _tick(tick, y, names)]
    style = (
        "text{font:12px sans-serif;fill:#444}.heading{font-weight:bold}.grid{stroke:#bbb;stroke-width:.5}"
        ".nought{stroke:#777}@media(prefers-color-scheme:dark){text{fill:#ccc}.grid{stroke:#555}.nought{stroke:#999}}"
    )
    title = "<title>Paired differences in points of accuracy, with 95 % intervals over seeds</title>"
    size = f'width="{names + _WIDTH + _MARGIN}" height="{y + 2 * _MARGIN}"'
    body = "\n".join([f"<style>{style}</style>", title, *axis, *lines])
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n{body}\n</svg>\n'


def _x(points: float, names: int) -> float:
    """Where so many points lie in the picture."""
    inside = max(-_MOST, min(_MOST, points))
    return names + _WIDTH * (inside + _MOST) / (2 * _MOST)


def _legend(origins: Sequence[Origin]) -> list[str]:
    """What the marks mean."""
    return [
        f"{_shape(origin, _MARGIN + 4 + 110 * index, 16, _COLOURS[origin], '')}"
        f'<text x="{_MARGIN + 14 + 110 * index}" y="20">{_MEANINGS[origin]}</text>'
        for index, origin in enumerate(origins)
    ]


def _tick(points: float, bottom: int, names: int) -> list[str]:
    """A line of the grid, with its value at both ends."""
    x, value = f"{_x(points, names):.1f}", f"{points:+.0f}" if points else "0"
    kind = "grid" if points else "nought"
    return [
        f'<line x1="{x}" x2="{x}" y1="{_TOP}" y2="{bottom}" class="{kind}"/>',
        *(f'<text x="{x}" y="{y}" text-anchor="middle">{value}</text>' for y in (_TOP - 8, bottom + 16)),
    ]


def _height(row: Row) -> int:
    return _ROW + max(0, round(_APART * (len(row.marks) - 1)) - 2)


def _drawn(row: Row, y: int, names: int) -> list[str]:
    """Its name, and its marks one below the other."""
    middle = y + _height(row) / 2
    lines = [f'<text x="{names - 10}" y="{middle + 4:.1f}" text-anchor="end">{escape(row.name)}</text>']
    for index, mark in enumerate(row.marks):
        at, colour = middle + _APART * (index - (len(row.marks) - 1) / 2), _COLOURS[mark.origin]
        fill = colour if abs(mark.points) <= _MOST else "none"  # hollow where it lies beyond the edge
        lines.append(_shape(mark.origin, _x(mark.points, names), at, fill, f"{row.name}: {mark.text}"))
        if mark.interval is not None:
            low, high = (_x(bound, names) for bound in mark.interval)
            lines.append(
                f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{at:.1f}" y2="{at:.1f}" '
                f'stroke="{colour}" stroke-width="1.5"/>'
            )
    return lines


def _shape(origin: Origin, x: float, y: float, fill: str, text: str) -> str:
    """A circle for what was measured here, a square for what was published."""
    inside = f' fill="{fill}" stroke="{_COLOURS[origin]}">' + (f"<title>{escape(text)}</title>" if text else "")
    if origin == "paper":
        return f'<rect x="{x - 2.5:.1f}" y="{y - 2.5:.1f}" width="5" height="5"{inside}</rect>'
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{3 if text else 3.5}"{inside}</circle>'

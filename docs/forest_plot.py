"""A picture of paired differences with their intervals, group by group, for docs/make_results.py."""

from collections.abc import Iterable
from html import escape
from typing import NamedTuple

from protofed.studies.statistics import PairedTest
from protofed.studies.tables.result_tables import difference_text

_ROW, _HEADER, _LEFT, _WIDTH, _MARGIN = 16, 26, 330, 460, 20
_TOP = 40
"""Above the rows: what the colours mean, and the axis, which the picture is too tall to have below alone."""
_MOST = 20.0
"""Points to either side of no difference; what lies beyond is drawn at the edge."""
_COLOURS = {"scratch": "#8a6d3b", "ImageNet": "#1f6feb"}


class Group(NamedTuple):
    """Rows of one table against its baseline, and what its networks started from."""

    heading: str
    start: str
    tests: list[tuple[str, PairedTest]]


def forest_plot(groups: Iterable[Group]) -> str:
    """All differences with their intervals, as SVG."""
    lines = _legend()
    y = _TOP
    for heading, start, tests in groups:
        y += _HEADER
        lines.append(f'<text x="{_MARGIN}" y="{y - 8}" class="heading">{escape(heading)}</text>')
        for row, test in tests:
            lines += _drawn(row, test, y, _COLOURS[start])
            y += _ROW
    height = y + 2 * _MARGIN
    axis = [line for tick in (-_MOST, -_MOST / 2, 0.0, _MOST / 2, _MOST) for line in _tick(tick, y)]
    style = (
        "text{font:12px sans-serif;fill:#444}.heading{font-weight:bold}.grid{stroke:#bbb;stroke-width:.5}"
        ".nought{stroke:#777}@media(prefers-color-scheme:dark){text{fill:#ccc}.grid{stroke:#555}.nought{stroke:#999}}"
    )
    title = "<title>Paired differences in points of accuracy, with 95 % intervals over seeds</title>"
    size = f'width="{_LEFT + _WIDTH + _MARGIN}" height="{height}"'
    body = "\n".join([f"<style>{style}</style>", title, *axis, *lines])
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n{body}\n</svg>\n'


def _x(points: float) -> float:
    """Where so many points lie in the picture."""
    inside = max(-_MOST, min(_MOST, points))
    return _LEFT + _WIDTH * (inside + _MOST) / (2 * _MOST)


def _legend() -> list[str]:
    """What the colours mean."""
    return [
        f'<circle cx="{_MARGIN + 4 + 110 * index}" cy="16" r="3.5" fill="{colour}"/>'
        f'<text x="{_MARGIN + 14 + 110 * index}" y="20">from {start}</text>'
        for index, (start, colour) in enumerate(_COLOURS.items())
    ]


def _tick(points: float, bottom: int) -> list[str]:
    """A line of the grid, with its value at both ends."""
    x, value = f"{_x(points):.1f}", f"{points:+.0f}" if points else "0"
    kind = "grid" if points else "nought"
    return [
        f'<line x1="{x}" x2="{x}" y1="{_TOP}" y2="{bottom}" class="{kind}"/>',
        *(f'<text x="{x}" y="{y}" text-anchor="middle">{value}</text>' for y in (_TOP - 8, bottom + 16)),
    ]


def _drawn(row: str, test: PairedTest, y: int, colour: str) -> list[str]:
    """One row: its name, its interval, its mean; hollow where the mean lies beyond the edge."""
    middle = y + _ROW / 2
    points = 100 * test["difference"]
    fill = colour if abs(points) <= _MOST else "none"
    lines = [
        f'<text x="{_LEFT - 10}" y="{middle + 4:.1f}" text-anchor="end">{escape(row)}</text>',
        f'<circle cx="{_x(points):.1f}" cy="{middle:.1f}" r="3.5" fill="{fill}" stroke="{colour}">'
        f"<title>{escape(f'{row}: {difference_text(test)}')}</title></circle>",
    ]
    if test["interval"] is not None:
        low, high = (_x(100 * bound) for bound in test["interval"])
        lines.append(
            f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{middle:.1f}" y2="{middle:.1f}" '
            f'stroke="{colour}" stroke-width="1.5"/>'
        )
    return lines

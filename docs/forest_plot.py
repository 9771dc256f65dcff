"""A picture of paired differences with their intervals, group by group, for docs/make_results.py."""

from collections.abc import Iterable
from html import escape
from typing import NamedTuple

from protofed.studies.statistics import PairedTest
from protofed.studies.tables.result_tables import difference_text

_ROW, _HEADER, _LEFT, _WIDTH, _MARGIN = 16, 26, 330, 460, 20
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
    lines: list[str] = []
    y = _MARGIN
    for heading, start, tests in groups:
        y += _HEADER
        lines.append(f'<text x="{_MARGIN}" y="{y - 8}" class="heading">{escape(heading)}</text>')
        for row, test in tests:
            lines += _drawn(row, test, y, _COLOURS[start])
            y += _ROW
    height = y + 2 * _MARGIN
    axis = [
        f'<line x1="{_x(tick):.1f}" x2="{_x(tick):.1f}" y1="{_MARGIN}" y2="{y}" class="grid"/>'
        f'<text x="{_x(tick):.1f}" y="{y + 16}" text-anchor="middle">{f"{tick:+.0f}" if tick else "0"}</text>'
        for tick in (-_MOST, -_MOST / 2, 0.0, _MOST / 2, _MOST)
    ]
    style = (
        "text{font:12px sans-serif;fill:#444}.heading{font-weight:bold}.grid{stroke:#bbb;stroke-width:.5}"
        "@media(prefers-color-scheme:dark){text{fill:#ccc}.grid{stroke:#555}}"
    )
    title = "<title>Paired differences in points of accuracy, with 95 % intervals over seeds</title>"
    size = f'width="{_LEFT + _WIDTH + _MARGIN}" height="{height}"'
    body = "\n".join([f"<style>{style}</style>", title, *axis, *lines])
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n{body}\n</svg>\n'


def _x(points: float) -> float:
    """Where so many points lie in the picture."""
    inside = max(-_MOST, min(_MOST, points))
    return _LEFT + _WIDTH * (inside + _MOST) / (2 * _MOST)


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

"""Small square charts of one test set each, as finished SVG: reliability and ROC curves, a line for every method."""

from collections.abc import Mapping, Sequence
from math import sqrt
from typing import NamedTuple

from protofed.pages.markup import Html, tag

_SIDE, _LEFT, _TOP, _BOTTOM, _RIGHT = 200, 34, 22, 40, 8
_TICKS = (0, 0.25, 0.5, 0.75, 1)
_DASHES = ("", "7 3", "2 3", "10 3 2 3", "5 5", "1 4", "12 4", "6 2 2 2 2 2")
"""As the script draws methods, so that lines can be told apart without colour."""
_SMALLEST_DOT, _LARGEST_DOT = 2.0, 6.5


class SquareLine(NamedTuple):
    """One method's points, from (0, 0) to (1, 1), and how large each dot is; no sizes: no dots."""

    points: Sequence[tuple[float, float]]
    sizes: Sequence[float] = ()


def square_chart(title: str, axes: tuple[str, str], lines: Mapping[int, SquareLine], said: str) -> Html:
    """A chart over the unit square, in %, with its diagonal; lines by the number of their method."""
    width, height = _LEFT + _SIDE + _RIGHT, _TOP + _SIDE + _BOTTOM
    parts = [
        *(part for value in _TICKS for part in _tick(value)),
        tag("line", class_="axis", x1=_x(0), y1=_y(0), x2=_x(1), y2=_y(1), stroke_dasharray="3 4"),
        *(_drawn(index, line) for index, line in lines.items()),
        tag("text", axes[1], x=0, y=12),
        tag("text", axes[0], x=_x(1), y=height - 6, text_anchor="end"),
    ]
    svg = tag("svg", *parts, viewBox=f"0 0 {width} {height}", role="img", aria_label=f"{title}: {said}")
    return tag("figure", tag("figcaption", title), svg, class_="square")


def side_by_side(charts: Sequence[Html], least: str | None = None) -> Html:
    """As many in a row as there is room for; `least` is the width that one needs."""
    return tag("div", *charts, class_="squares", style=None if least is None else f"--least:{least}")


def _tick(value: float) -> list[Html]:
    label = f"{100 * value:.0f}"
    lines = [
        tag("line", class_="grid", x1=_x(value), y1=_y(0), x2=_x(value), y2=_y(1)),
        tag("line", class_="grid", x1=_x(0), y1=_y(value), x2=_x(1), y2=_y(value)),
    ]
    texts = [
        tag("text", label, x=_x(value), y=_y(0) + 16, text_anchor="middle"),
        tag("text", label, x=_LEFT - 6, y=_y(value) + 4, text_anchor="end"),
    ]
    return [*lines, *texts]


def _drawn(index: int, line: SquareLine) -> Html:
    colour = f"var(--m{index % 8})"
    path = "".join(f"{'L' if k else 'M'}{_x(x)},{_y(y)}" for k, (x, y) in enumerate(line.points))
    most = max(line.sizes, default=1) or 1
    dots = [
        tag("circle", cx=_x(x), cy=_y(y), r=f"{max(_SMALLEST_DOT, _LARGEST_DOT * sqrt(size / most)):.1f}", fill=colour)
        for (x, y), size in zip(line.points, line.sizes, strict=False)
    ]
    dash = _DASHES[(index + index // 8) % 8]
    stroke = tag("path", d=path, fill="none", stroke=colour, stroke_width=2, stroke_dasharray=dash or None)
    return tag("g", stroke, *dots, data_method=index)


def _x(value: float) -> float:
    return round(_LEFT + _SIDE * value, 1)


def _y(value: float) -> float:
    return round(_TOP + _SIDE * (1 - value), 1)

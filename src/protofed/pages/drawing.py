"""Pictures without other packages: line charts as SVG, and what a notebook shows of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10
from pathlib import Path

from protofed.pages.markup import Html, join, tag

# Okabe and Ito's colours, which the colour-blind can tell apart, then two more.
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#f0e442", "#000000", "#8c564b", "#999999")

_WIDTH, _HEIGHT = 640, 320
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 30, 44
_LEGEND_LINE = 18
_LEGEND_COLUMNS = 3
_TICKS = 5
_DASHES = ("", "6 3", "2 2", "8 3 2 3")

Line = Sequence[tuple[float, float]]
"""Points (x, y), from left to right."""


@dataclass(frozen=True)
class Drawing:
    """An SVG picture: shown by a notebook, saved by `save`."""

    svg: str
    text: str
    """What it shows, in words."""

    def save(self, path: str | Path) -> Path:
        """Write it to a file, which any browser opens."""
        Path(path).write_text(self.svg, encoding="utf-8")
        return Path(path)

    def _repr_svg_(self) -> str:
        return self.svg

    def __repr__(self) -> str:
        return f"<{self.text}; .save('chart.svg') writes it>"


@dataclass(frozen=True)
class ShownPicture:
    """A PNG picture: shown by a notebook, saved by `save`."""

    png: bytes
    text: str
    """What it shows, in words."""

    def save(self, path: str | Path) -> Path:
        """Write it to a file."""
        Path(path).write_bytes(self.png)
        return Path(path)

    def _repr_png_(self) -> bytes:
        return self.png

    def __repr__(self) -> str:
        return f"<{self.text}; .save('picture.png') writes it>"


def line_chart(title: str, x_label: str, lines: Mapping[str, Line], percent: bool = True) -> Drawing:
    """Lines over one pair of axes, with a legend where there are several; `percent`: fractions, shown as percentages.

    Lines differ by colour and by dashes. Accuracies span five points at least, so that noise does not look like news.
    """
    scale = 100.0 if percent else 1.0
    drawn = {name: [(x, scale * y) for x, y in line] for name, line in lines.items() if line}
    legend_lines = ceil(len(drawn) / _LEGEND_COLUMNS) if len(drawn) > 1 else 0
    height = _HEIGHT + _LEGEND_LINE * legend_lines
    points = [point for line in drawn.values() for point in line]
    x_axis = _Axis.of([x for x, _ in points], 0.0, _LEFT, _WIDTH - _RIGHT)
    y_axis = _Axis.of([y for _, y in points], 5.0 if percent else 0.0, _HEIGHT - _BOTTOM, _TOP)
    parts = [
        tag("text", title, x=_LEFT, y=18, font_size=14, font_weight="bold"),
        *_grid(x_axis, y_axis),
        tag("text", x_label, x=(_LEFT + _WIDTH - _RIGHT) / 2, y=_HEIGHT - 8, text_anchor="middle"),
        *(_line(number, name, line, x_axis, y_axis) for number, (name, line) in enumerate(drawn.items())),
        *(_legend(number, name) for number, name in enumerate(drawn) if legend_lines),
    ]
    svg = tag(
        "svg",
        *parts,
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {_WIDTH} {height}",
        width=_WIDTH,
        height=height,
        style="max-width:100%;height:auto",
        role="img",
        aria_label=title,
        font_family="system-ui, sans-serif",
        font_size=12,
        fill="currentColor",
    )
    return Drawing(svg, title)


@dataclass(frozen=True)
class _Axis:
    """From values to pixels."""

    low: float
    high: float
    start: float
    end: float
    ticks: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float], least_span: float, start: float, end: float) -> "_Axis":
        low, high = (min(values), max(values)) if values else (0.0, 1.0)
        missing = max(least_span or 1e-9, 1e-9 * abs(high)) - (high - low)
        if missing > 0:
            low, high = low - missing / 2, high + missing / 2
        rough = (high - low) / _TICKS
        power = 10.0 ** floor(log10(rough))
        step = next(power * nice for nice in (1, 2, 5, 10) if power * nice >= rough)
        ticks = tuple(step * number for number in range(ceil(low / step - 1e-9), floor(high / step + 1e-9) + 1))
        return cls(low, high, start, end, ticks)

    def at(self, value: float) -> float:
        """The pixel of a value."""
        return round(self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start), 2)


def _grid(x_axis: _Axis, y_axis: _Axis) -> list[Html]:
    faint = {"stroke": "currentColor", "stroke_opacity": 0.18}
    parts = []
    for tick in y_axis.ticks:
        y = y_axis.at(tick)
        parts.append(tag("line", x1=_LEFT, x2=_WIDTH - _RIGHT, y1=y, y2=y, **faint))
        parts.append(tag("text", _number(tick), x=_LEFT - 6, y=y + 4, text_anchor="end"))
    for tick in x_axis.ticks:
        parts.append(tag("text", _number(tick), x=x_axis.at(tick), y=_HEIGHT - _BOTTOM + 16, text_anchor="middle"))
    return parts


def _line(number: int, name: str, line: Line, x_axis: _Axis, y_axis: _Axis) -> Html:
    colour, dashes = _look(number)
    places = [(x_axis.at(x), y_axis.at(y)) for x, y in line]
    joined = " ".join(f"{x:g},{y:g}" for x, y in places)
    path = tag("polyline", points=joined, fill="none", stroke=colour, stroke_width=2, stroke_dasharray=dashes)
    dots = [tag("circle", cx=x, cy=y, r=2.5, fill=colour) for x, y in places]
    return tag("g", tag("title", name), path, *dots)


def _legend(number: int, name: str) -> Html:
    colour, dashes = _look(number)
    row, column = divmod(number, _LEGEND_COLUMNS)
    x = _LEFT + column * (_WIDTH - _LEFT) / _LEGEND_COLUMNS
    y = _HEIGHT + _LEGEND_LINE * row + 6
    mark = tag("line", x1=x, x2=x + 22, y1=y, y2=y, stroke=colour, stroke_width=2, stroke_dasharray=dashes)
    return join([mark, tag("text", name, x=x + 28, y=y + 4)])


def _look(number: int) -> tuple[str, str | None]:
    """Colour and dashes of a line; the pair repeats late."""
    colour = COLOURS[number % len(COLOURS)].replace("#000000", "currentColor")
    return colour, _DASHES[number // len(COLOURS) % len(_DASHES)] or None


def _number(value: float) -> str:
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1000.0 if unit == 'k' else limit):g}{unit}"
    return f"{round(value, 10) + 0.0:g}"

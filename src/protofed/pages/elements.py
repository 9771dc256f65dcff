"""The elements that pages are made of: tables, pictures, charts to be drawn, bars, commands."""

import base64
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from protofed.pages.markup import Html, join, tag
from protofed.text import percent

_SMALLEST, _LARGEST = 0.72, 1.3
"""To what part of its width a picture with words inside is drawn at least and at most."""


def key(index: int) -> Html:
    """The line and mark a method is drawn with; the script fills it in."""
    return tag("span", class_="key", data_key=index, aria_hidden="true")


def chart(kind: str, group: int, number: int, caption: str) -> Html:
    """Where the script draws a chart; the table that holds its numbers is next to it."""
    plot = tag("div", class_="plot", data_chart=kind, data_group=group, data_number=number)
    return tag("figure", tag("figcaption", caption), plot, class_="chart script")


def details(title: str, content: Html) -> Html:
    """What is shown on demand."""
    return tag("details", tag("summary", title), content)


def png_source(png: bytes) -> str:
    """A picture as the source of an image element, so that the page needs no other file."""
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def picture(source: str, text: str, caption: bool = True) -> Html:
    """A picture; its text is its caption, or for screen readers only."""
    image = tag("img", src=source, alt=text)
    return tag("figure", image, tag("figcaption", text)) if caption else tag("figure", image)


def sheet(png: bytes, text: str, label: str, caption: bool = False) -> Html:
    """A picture with words inside, as wide as the page; where that is too narrow to read them, it scrolls."""
    width = int.from_bytes(png[16:20], "big")  # where every PNG file has it
    style = f"min-width:{_SMALLEST * width:.0f}px;max-width:{_LARGEST * width:.0f}px"
    image = scroll(tag("img", src=png_source(png), alt=text, style=style), label)
    return tag("figure", image, tag("figcaption", text) if caption else "", class_="sheet")


def gallery(pictures: Iterable[Html], wide: bool = False) -> Html:
    """Pictures side by side, as many as there is room for; `wide`: one below the other, each as wide as the page."""
    return tag("div", *pictures, class_="gallery wide" if wide else "gallery")


def method_table(
    caption: str,
    columns: Sequence[str],
    rows: Mapping[str, Sequence[object]],
    order: Mapping[str, int],
    below: Mapping[str, Sequence[object]] | None = None,
) -> Html:
    """A table with a row for every method, which the switches hide and show; rows `below` are always there."""
    head = tag("tr", tag("th", "method", scope="col"), *(tag("th", column, scope="col") for column in columns))
    body = [
        tag(
            "tr",
            tag("th", key(order[name]), name, scope="row"),
            *(tag("td", cell) for cell in cells),
            data_method=order[name],
        )
        for name, cells in rows.items()
    ]
    body += [
        tag("tr", tag("th", name, scope="row"), *(tag("td", cell) for cell in cells), class_="soft")
        for name, cells in (below or {}).items()
    ]
    return scroll(tag("table", tag("caption", caption), tag("thead", head), tag("tbody", *body)), caption)


def plain_table(caption: str, columns: Sequence[str], rows: Sequence[Sequence[object]], figures: bool = True) -> Html:
    """The first cell of a row is its heading; figures stand to the right."""
    head = tag("tr", *(tag("th", column, scope="col") if column else tag("td") for column in columns))
    body = [tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell) for cell in row[1:])) for row in rows]
    table = tag(
        "table", tag("caption", caption), tag("thead", head), tag("tbody", *body), class_=None if figures else "texts"
    )
    return scroll(table, caption)


def scroll(content: Html, label: str) -> Html:
    """What is too wide scrolls in a box of its own, also by keyboard; a shadow at the edge says that there is more.

    A group, not a region: a page with fifty landmarks has none.
    """
    return tag("div", content, class_="scroll", tabindex="0", role="group", aria_label=label)


def as_text(value: Any) -> str:
    """A value of any kind in a table."""
    if value is None:
        return "–"
    if isinstance(value, float) and not value.is_integer():
        return f"{value:.4g}" if abs(value) < 1 else f"{value:,.2f}"
    return f"{value:,.0f}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)


def command_line(text: str) -> Html:
    """A command, with a button that copies it."""
    copy = tag("button", "Copy", type="button", class_="copy script")
    return tag("div", tag("pre", tag("code", text), tabindex="0"), copy, class_="command")


def stacked_bars(
    title: str,
    figures: Mapping[str, Mapping[str, float]],
    most: float,
    show: Callable[[float], str],
    order: Mapping[str, int],
) -> Html:
    """A stacked bar for every method, all on one scale."""
    kinds = list(next(iter(figures.values())))
    legend = [tag("li", tag("span", class_=f"patch part-{number}"), kind) for number, kind in enumerate(kinds)]
    rows = []
    for name, parts in figures.items():
        pieces = [
            tag(
                "span",
                class_=f"part-{number}",
                style=f"width:{100 * parts[kind] / most:.3f}%",
                title=f"{kind}: {show(parts[kind])}",
            )
            for number, kind in enumerate(kinds)
            if parts[kind]
        ]
        label = ", ".join(f"{kind} {show(value)}" for kind, value in parts.items())
        rows.append(
            tag(
                "li",
                tag("span", name, class_="what"),
                tag("span", *pieces, class_="bar", role="img", aria_label=label),
                tag("span", show(sum(parts.values())), class_="figures"),
                data_method=order[name],
            )
        )
    legend_list = tag("ul", *legend, class_="legend") if len(kinds) > 1 else ""
    return tag("figure", tag("figcaption", title), legend_list, tag("ul", *rows, class_="bars"), class_="stacked")


def mean_and_spread(score: Mapping[str, Any] | None, best: float | None = None, paper: float | None = None) -> Html:
    """An accuracy over seeds, bold where none is better, with the paper's in brackets."""
    if score is None:
        return Html("–")
    figure: object = percent(score["mean"])
    if best is not None and score["mean"] >= best - 1e-12:
        figure = tag("strong", figure)
    deviation = "" if score["std"] is None else tag("span", f" ± {percent(score['std'])}", class_="soft")
    beside = "" if paper is None else tag("span", f" ({percent(paper)})", class_="soft")
    return join([figure, deviation, beside])


def signed(value: float) -> str:
    """A difference in points."""
    return f"{round(100 * value, 2) + 0.0:+.2f}".replace("-", "−")

"""One self-contained page about some data: what to look at, counts, pictures, histograms, every problem."""

import io
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from protofed.data.survey.report import DataReport, SiteFacts
from protofed.pages.elements import plain_table, png_source
from protofed.pages.frame import framed
from protofed.pages.markup import Html, join, tag
from protofed.text import counted

_COLOURS = 8
_MOST_PROBLEMS = 500
_STEPS = 16
_WIDTH, _HEIGHT = 320, 110


def page(report: DataReport) -> str:
    """The page for a report."""
    summary = report.summary
    sections = [_advice(report), _counts(report), _kinds(report), _brightness(report), _pictures(report)]
    channels, height, width = summary.image_shape
    images = sum(domain.train + domain.test + domain.validation for domain in summary.domains)
    facts = [
        f"{images:,} images",
        f"{len(summary.classes)} class{'' if len(summary.classes) == 1 else 'es'}",
        counted(len(summary.domains), "site"),
        f"read as {height}x{width}, {'in colour' if channels == 3 else 'grey'}",
    ]
    warning = "This page shows images of the data. Give it only to people who may see them."
    return framed("data", summary.name, facts, [*sections, _problems(report)], [warning])


def _advice(report: DataReport) -> Html:
    advice = report.advice or ["No problem was found that would spoil a result."]
    return tag(
        "section",
        tag("h2", "Before training"),
        tag("ul", *(tag("li", text) for text in advice), style="overflow-wrap:anywhere"),
    )


def _counts(report: DataReport) -> Html:
    summary = report.summary
    rows: list[list[object]] = []
    for domain in summary.domains:
        parts = {"train": domain.train_per_class, "test": domain.test_per_class, "val": domain.validation_per_class}
        rows += [[f"{domain.name}, {part}", *counts, sum(counts)] for part, counts in parts.items() if counts]
    table = plain_table("Images of each class", ["site and part", *summary.classes, "all"], rows)
    splits = [_split(site) for site in report.sites if site.split]
    return tag("section", tag("h2", "Contents"), table, *(tag("p", text, class_="small") for text in splits))


def _split(site: SiteFacts) -> str:
    by = f"kept together by {site.split['grouped_by']}" if site.split["grouped_by"] else "each image separately"
    return (
        f"{site.name} has no test images of its own: {100 * site.split['test_share']:g} % of its "
        f"{site.split['groups']} groups are held out, stratified by class, with seed {site.split['seed']} ({by})."
    )


def _kinds(report: DataReport) -> Html:
    def said(counts: Mapping[str, int]) -> str:
        first = list(counts.items())[:4]
        more = f", and {len(counts) - 4} others" if len(counts) > 4 else ""
        return ", ".join(f"{name} ({count})" for name, count in first) + more

    rows = [
        [site.name, said(site.sizes), said(site.channels), said(site.bits), said(site.formats)] for site in report.sites
    ]
    columns = ["site", "height x width", "channels", "depth", "format"]
    return tag("section", tag("h2", "File properties"), plain_table("Number of images", columns, rows, False))


def _brightness(report: DataReport) -> Html:
    classes = report.summary.classes
    legend = [tag("li", _line_of(number), name) for number, name in enumerate(classes)]
    charts = [_histogram(site, classes) for site in report.sites]
    text = (
        "Mean brightness of the images of each class, from black to white. If the curves of a site lie apart, "
        "brightness alone separates its classes, and a model may learn no more than that."
    )
    return tag(
        "section",
        tag("h2", "Brightness"),
        tag("p", text),
        tag("ul", *legend, class_="legend"),
        tag("div", *charts, class_="gallery"),
    )


def _dashes(number: int) -> str:
    """Where colours repeat, dashes tell classes apart."""
    return ("none", "7 4", "2 4", "10 4 2 4")[number // _COLOURS % 4]


def _line_of(number: int) -> Html:
    style = f"stroke:var(--m{number % _COLOURS});stroke-width:3;stroke-dasharray:{_dashes(number)}"
    line = tag("line", x1=0, x2=26, y1=6, y2=6, style=style)
    return tag("span", tag("svg", line, viewBox="0 0 26 12", width=26, height=12), class_="key", aria_hidden="true")


def _histogram(site: SiteFacts, classes: Sequence[str]) -> Html:
    """A curve for each class, as shares of its images."""
    lines = []
    shares = {name: [count / max(sum(counts), 1) for count in counts] for name, counts in site.brightness.items()}
    top = max((max(share) for share in shares.values()), default=1.0) or 1.0
    for number, name in enumerate(classes):
        if name not in shares:
            continue
        points = " ".join(
            f"{(step + 0.5) * _WIDTH / _STEPS:.1f},{_HEIGHT - share / top * (_HEIGHT - 8):.1f}"
            for step, share in enumerate(shares[name])
        )
        style = (
            f"fill:none;stroke:var(--m{number % _COLOURS});stroke-width:2.5;stroke-linejoin:round;"
            f"stroke-dasharray:{_dashes(number)}"
        )
        lines.append(tag("polyline", tag("title", name), points=points, style=style))
    axis = tag("line", x1=0, y1=_HEIGHT, x2=_WIDTH, y2=_HEIGHT, style="stroke:var(--line);stroke-width:1.5")
    label = "; ".join(f"{name}: {' '.join(map(str, counts))}" for name, counts in site.brightness.items())
    chart = tag(
        "svg",
        axis,
        *lines,
        viewBox=f"0 0 {_WIDTH} {_HEIGHT + 4}",
        role="img",
        aria_label=f"Brightness at {site.name}. {label}",
        style="width:100%;height:auto;display:block",
    )
    return tag("figure", tag("figcaption", site.name), chart)


def _pictures(report: DataReport) -> Html:
    blocks: list[Html] = []
    for site in report.sites:
        strips: list[Html] = []
        for label in report.summary.classes:
            pictures = report.pictures.get((site.name, label)) or []
            if pictures:
                shown = join(_image(picture, f"{label} at {site.name}") for picture in pictures)
                strip = tag("div", shown, style="display:flex;flex-wrap:wrap;gap:0.4rem")
                strips.append(tag("figure", tag("figcaption", label), strip))
        blocks.append(join([tag("h3", site.name), tag("div", *strips, class_="gallery strips")]))
    return tag("section", tag("h2", "Pictures of each class and site"), *blocks)


def _image(picture: NDArray[np.uint8], text: str) -> Html:
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "PNG")
    style = "width:84px;height:auto;border:1px solid var(--line);image-rendering:auto;border-radius:4px"
    return tag("img", src=png_source(file.getvalue()), alt=text, style=style)


def _problems(report: DataReport) -> Html:
    if not report.problems:
        return tag("section", tag("h2", "Problems"), tag("p", "None."))
    shown = list(_rows(report))
    left = len(report.problems) - len(shown)
    more = tag("p", f"{left} more are listed by protofed data --json.", class_="note") if left else ""
    table = plain_table("All findings", ["kind", "what", "how to fix it"], shown, figures=False)
    return tag("section", tag("h2", "Problems"), table, more)


def _rows(report: DataReport) -> Iterator[list[object]]:
    for problem in report.problems[:_MOST_PROBLEMS]:
        place = f"{problem.file}: " if problem.file and problem.file not in problem.text else ""
        kind = tag("strong", f"{problem.kind} (error)") if problem.severity == "error" else problem.kind
        yield [kind, f"{place}{problem.text}", problem.mend]

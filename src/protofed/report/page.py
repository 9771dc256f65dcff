"""One self-contained HTML page: text and tables as markup, charts as data for the script; it loads nothing."""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from protofed.pages.elements import details, key
from protofed.pages.frame import footer, today
from protofed.pages.markup import Html, document, tag
from protofed.report.charts import chart_data
from protofed.report.commands import resume
from protofed.report.content import ReportContent, ReportedRun
from protofed.report.sections import Section, about, pictures, results
from protofed.report.wording import headline
from protofed.text import counted, duration


class Live(NamedTuple):
    """What makes the page follow a run: where to ask it to stop, and the word that proves it was this page."""

    token: str
    can_stop: bool


def render(content: ReportContent, live: Live | None = None, with_training_images: bool = False) -> str:
    """The whole page; pictures of training images are left out unless requested."""
    data = chart_data(content)
    order = {entry["name"]: index for index, entry in enumerate(data["methods"])}
    sections = [*results(content, order), *pictures(content, with_training_images), *about(content)]
    main = tag(
        "main",
        _headline(content),
        _progress(content, live),
        _switches(data["methods"]),
        *(_section(section) for section in sections),
        id="main",
        tabindex="-1",
    )
    # No name may end the script element that holds the data.
    block = Html(json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"))
    allow = {"script-src": "'unsafe-inline'"}
    if live is not None:
        allow["connect-src"] = "'self'"  # a live page asks its own server
    return document(
        content.title,
        tag("a", "Skip to the result", href="#main", class_="skip"),
        _header(content, sections),
        main,
        footer(" from the run folders alone"),
        tag("script", block, type="application/json", id="data"),
        tag("script", Html(_script())),
        allow=allow,
        data_live=None if live is None else live.token,
    )


@cache
def _script() -> str:
    return files(__package__).joinpath("page.js").read_text()


def _header(content: ReportContent, sections: Sequence[Section]) -> Html:
    links = [tag("li", tag("a", section.title, href=f"#{section.id}")) for section in sections]
    buttons = tag("div", tag("button", "Dark", type="button", id="theme", aria_pressed="false"), class_="tools script")
    return tag(
        "header",
        tag("div", tag("p", content.kind, class_="kind"), buttons, class_="top"),
        tag("h1", content.title),
        tag("p", _subtitle(content), class_="subtitle"),
        tag("nav", tag("ul", *links), aria_label="Sections"),
    )


def _subtitle(content: ReportContent) -> str:
    runs = content.all_runs
    if not runs:
        return ""
    config = runs[0].config
    clients = len(config["partition"]["clients"])
    seeds = sorted({run.seed for run in runs})
    texts = [
        counted(len(runs), "run"),
        counted(clients, "client") + (f" ({config['partition']['protocol']})" if clients > 1 else ""),
        counted(runs[0].planned_rounds, "round"),
        f"{config['model']['name']}",
        f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}",
        today(),
    ]
    return " · ".join(texts)


def _headline(content: ReportContent) -> Html:
    first, *others = headline(content)
    parts: list[Html] = [tag("p", first, class_="lead"), *(tag("p", sentence) for sentence in others)]
    parts += [tag("p", remark, class_="note") for remark in content.remarks]
    missing = [line for group in content.groups for line in group.missing]
    if missing:
        title = f"Not complete: {missing[0]}" if len(missing) == 1 else f"Not complete: {len(missing)} runs are missing"
        parts.append(details(title, tag("ul", *(tag("li", line) for line in missing), class_="note")))
    parts += [tag("p", note, class_="note") for note in (*content.notes, *_warnings(content))]
    return tag("section", *parts, class_="headline", aria_label="Result in words")


def _warnings(content: ReportContent) -> list[str]:
    return list(dict.fromkeys(f"Warning: {text}" for run in content.all_runs for text in run.config["warnings"]))


def _progress(content: ReportContent, live: Live | None) -> Html:
    """How far the runs are, where not all are complete."""
    unfinished = [run for run in content.all_runs if not run.complete]
    if not unfinished:
        return Html("")
    rows = [
        tag(
            "li",
            tag("span", f"{run.config['method']['name']}, seed {run.seed}", class_="what"),
            tag("progress", value=len(run.rounds), max=run.planned_rounds, aria_label="rounds done"),
            tag("span", _rounds_done(run), class_="figures"),
        )
        for run in unfinished
    ]
    parts = [tag("h2", "Progress"), tag("ul", *rows, class_="progress")]
    if live is not None and live.can_stop:
        parts.append(
            tag(
                "p",
                tag("button", "Stop", type="button", id="stop", class_="danger"),
                tag(
                    "span",
                    f" Finished rounds are kept; {resume(content) or 'the same command'} continues from there.",
                    id="stopped",
                    role="status",
                ),
                class_="script",
            )
        )
    return tag("section", *parts, id="progress")


def _rounds_done(run: ReportedRun) -> str:
    done = f"{len(run.rounds)} of {run.planned_rounds} rounds"
    if run.lock_holder is None:
        return f"{done}, not running now"
    if not run.rounds:
        return f"{done}, just started"
    last = run.rounds[-5:]
    left = (run.planned_rounds - len(run.rounds)) * sum(record["seconds"]["total"] for record in last) / len(last)
    return f"{done}, about {duration(left)} left"


def _switches(methods: Sequence[Mapping[str, Any]]) -> Html:
    """A box for every method; the script hides what is switched off."""
    if len(methods) < 2:
        return Html("")
    boxes = [
        tag(
            "label",
            tag("input", type="checkbox", data_switch=index, checked=bool(entry["on"])),
            key(index),
            entry["name"],
        )
        for index, entry in enumerate(methods)
    ]
    buttons = [tag("button", text, type="button", data_all=text.lower()) for text in ("All", "None")]
    return tag(
        "fieldset", tag("legend", "Methods shown"), *boxes, *buttons, class_="switches script", aria_controls="main"
    )


def _section(section: Section) -> Html:
    heading = tag("h2", section.title, id=f"{section.id}-title", tabindex="-1")
    return tag("section", heading, section.body, id=section.id, aria_labelledby=f"{section.id}-title")

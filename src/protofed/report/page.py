"""One self-contained HTML page: text and tables as markup, charts as data for the script; it loads nothing."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from typing import Any, NamedTuple

from protofed.experiments.figures import duration, percent, size
from protofed.report.again import command, resume
from protofed.report.charts import chart_data
from protofed.report.curves import measures, series
from protofed.report.galleries import Gallery, galleries
from protofed.report.markup import Html, join, tag
from protofed.report.reading import Findings, Group, Reading, Row, View
from protofed.report.wording import headline, view_title

_MOST_CLIENTS = 60
"""Rows of the partition that are drawn."""
_MOST_ROUNDS = 10
"""Columns of the table behind the curves."""
_WAYS = {"up": "sent up, by clients", "down": "sent down, by the server"}
_PARTS = ("train", "aggregate", "evaluate")


class Live(NamedTuple):
    """What makes the page follow a run: where to ask it to stop, and the word that proves it was this page."""

    token: str
    can_stop: bool


class Section(NamedTuple):
    """A part of the page with a heading of its own."""

    id: str
    title: str
    body: Html


def render(findings: Findings, live: Live | None = None) -> str:
    """The whole page."""
    data = chart_data(findings)
    order = {entry["name"]: index for index, entry in enumerate(data["methods"])}
    sections = [*_results(findings, order), *_pictures(findings), *_about(findings)]
    main = tag(
        "main",
        _headline(findings),
        _progress(findings, live),
        _switches(data["methods"]),
        *(_section(section) for section in sections),
        id="main",
        tabindex="-1",
    )
    body = join(
        [tag("a", "Skip to the result", href="#main", class_="skip"), _header(findings, sections), main, _footer()]
    )
    # Whatever a name holds, it must not end the script element that holds the data.
    block = Html(json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"))
    scripts = join([tag("script", block, type="application/json", id="data"), tag("script", Html(_asset("page.js")))])
    live_data = {} if live is None else {"data_live": live.token}
    return (
        f"<!doctype html>\n{tag('html', _head(findings, live), tag('body', body, scripts), lang='en', **live_data)}\n"
    )


@cache
def _asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text()


def _head(findings: Findings, live: Live | None) -> Html:
    # Nothing may be loaded from anywhere, whatever the data say; a live page may ask its own server.
    asks = "; connect-src 'self'" if live else ""
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'{asks}"
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", f"{findings.title} · protofed"),
        tag("style", Html(_asset("page.css"))),
    )


def _header(findings: Findings, sections: Sequence[Section]) -> Html:
    links = [tag("li", tag("a", section.title, href=f"#{section.id}")) for section in sections]
    buttons = tag("div", tag("button", "Dark", type="button", id="theme", aria_pressed="false"), class_="tools script")
    return tag(
        "header",
        tag("div", tag("p", findings.kind, class_="kind"), buttons, class_="top"),
        tag("h1", findings.title),
        tag("p", _subtitle(findings), class_="subtitle"),
        tag("nav", tag("ul", *links), aria_label="Sections"),
    )


def _subtitle(findings: Findings) -> str:
    runs = findings.readings
    if not runs:
        return ""
    config = runs[0].config
    clients = len(config["partition"]["clients"])
    seeds = sorted({run.seed for run in runs})
    texts = [
        f"{len(runs)} runs" if len(runs) > 1 else "1 run",
        f"{clients} clients ({config['partition']['protocol']})" if clients > 1 else "1 client",
        f"{runs[0].planned} rounds",
        f"{config['model']['name']}",
        f"seed{'s' if len(seeds) > 1 else ''} {', '.join(map(str, seeds))}",
    ]
    return " · ".join(texts)


def _headline(findings: Findings) -> Html:
    first, *others = headline(findings)
    parts = [tag("p", first, class_="lead"), *(tag("p", sentence) for sentence in others)]
    missing = [line for group in findings.groups for line in group.missing]
    if missing:
        title = f"Not complete: {missing[0]}" if len(missing) == 1 else f"Not complete: {len(missing)} runs are missing"
        parts.append(_behind(title, tag("ul", *(tag("li", line) for line in missing), class_="note")))
    parts += [tag("p", note, class_="note") for note in (*findings.notes, *_warnings(findings))]
    return tag("section", *parts, class_="headline", aria_label="Result in words")


def _warnings(findings: Findings) -> list[str]:
    return list(dict.fromkeys(f"Warning: {text}" for run in findings.readings for text in run.config["warnings"]))


def _progress(findings: Findings, live: Live | None) -> Html:
    """How far the runs are, where not all are complete."""
    unfinished = [run for run in findings.readings if not run.complete]
    if not unfinished:
        return Html("")
    rows = [
        tag(
            "li",
            tag("span", f"{run.config['method']['name']}, seed {run.seed}", class_="what"),
            tag("progress", value=len(run.rounds), max=run.planned, aria_label="rounds done"),
            tag("span", _standing(run), class_="figures"),
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
                    " Finished rounds are kept; the same command goes on from there.",
                    id="stopped",
                    role="status",
                ),
                class_="script",
            )
        )
    return tag("section", *parts, id="progress")


def _standing(run: Reading) -> str:
    done = f"{len(run.rounds)} of {run.planned} rounds"
    if run.worker is None:
        return f"{done}, nobody is at it now"
    if not run.rounds:
        return f"{done}, begun"
    last = run.rounds[-5:]
    left = (run.planned - len(run.rounds)) * sum(record["seconds"]["total"] for record in last) / len(last)
    return f"{done}, about {duration(left)} left"


def _switches(methods: Sequence[Mapping[str, Any]]) -> Html:
    """A box for every method; the script hides what is switched off."""
    if len(methods) < 2:
        return Html("")
    boxes = [
        tag(
            "label",
            tag("input", type="checkbox", data_switch=index, checked=bool(entry["on"])),
            _key(index),
            entry["name"],
        )
        for index, entry in enumerate(methods)
    ]
    buttons = [tag("button", text, type="button", data_all=text.lower()) for text in ("All", "None")]
    return tag(
        "fieldset", tag("legend", "Methods shown"), *boxes, *buttons, class_="switches script", aria_controls="main"
    )


def _key(index: int) -> Html:
    """The line and mark a method is drawn with; the script fills it in."""
    return tag("span", class_="key", data_key=index, aria_hidden="true")


def _section(section: Section) -> Html:
    heading = tag("h2", section.title, id=f"{section.id}-title", tabindex="-1")
    return tag("section", heading, section.body, id=section.id, aria_labelledby=f"{section.id}-title")


def _results(findings: Findings, order: Mapping[str, int]) -> Iterator[Section]:
    parts: list[tuple[str, str, Callable[[Group, int, Mapping[str, int]], Html]]] = [
        ("accuracy", "Accuracy", _accuracy),
        ("course", "Round by round", _course),
        ("chance", "Could it be chance?", _significance),
        ("communication", "Communication", _communication),
        ("time", "Time", _time),
        ("partition", "Who holds what", _partition),
    ]
    for id, title, make in parts:
        bodies = [(group, make(group, index, order)) for index, group in enumerate(findings.groups)]
        several = len(findings.groups) > 1
        shown = [join([tag("h3", group.title) if several else "", body]) for group, body in bodies if body]
        if shown:
            yield Section(id, title, join(shown))
    if findings.tables:
        tables = [
            _table(table.title, table.columns, [[_cell(cell) for cell in row] for row in table.rows])
            for table in findings.tables
        ]
        yield Section("computed", "Computed", join(tables))


def _accuracy(group: Group, index: int, order: Mapping[str, int]) -> Html:
    parts = []
    for number, view in enumerate(group.views):
        heading = f"Accuracy of {view_title(view)}"
        chart = _figure("dots", index, number, f"{heading}: one mark per method and test set, lines span the seeds")
        parts.append(join([chart, _accuracy_table(view, heading, order)]))
    return join(parts)


def _accuracy_table(view: View, heading: str, order: Mapping[str, int]) -> Html:
    labels = [*view.columns, *view.held_out]
    has_worst = len(labels) > 1 and any(row.worst is not None for row in view.rows.values())
    papers = any(row.paper for row in view.rows.values())
    best = {
        label: max((row.columns[label]["mean"] for row in view.rows.values() if label in row.columns), default=None)
        for label in labels
    }
    best["average"] = max(row.average["mean"] for row in view.rows.values())
    rows = {}
    for name, row in view.rows.items():
        cells = [_spread(row.columns.get(label), best[label], row.paper.get(label)) for label in labels]
        cells.append(_spread(row.average, best["average"], row.paper.get("average")))
        rows[name] = [*cells, *([_worst(row)] if has_worst else [])]
    columns = [*view.columns, *(f"{name} (held out)" for name in view.held_out), view.average]
    columns += ["worst"] if has_worst else []
    note = "In %: mean over seeds ± standard deviation; the best of each column is bold."
    note += " In brackets the paper's figure." if papers else ""
    return join([_method_table(heading, columns, rows, order), tag("p", note, class_="small")])


def _spread(found: Mapping[str, Any] | None, best: float | None = None, paper: float | None = None) -> Html:
    if found is None:
        return Html("–")
    figure: object = percent(found["mean"])
    if best is not None and found["mean"] >= best - 1e-12:
        figure = tag("strong", figure)
    deviation = "" if found["std"] is None else tag("span", f" ± {percent(found['std'])}", class_="soft")
    beside = "" if paper is None else tag("span", f" ({percent(paper)})", class_="soft")
    return join([figure, deviation, beside])


def _worst(row: Row) -> Html:
    if row.worst is None:
        return Html("–")
    names = row.worst.get("names", ())
    most_often = max(names, key=names.count) if names else ""
    return join([_spread(row.worst), tag("span", f" {most_often}", class_="soft")])


def _course(group: Group, index: int, order: Mapping[str, int]) -> Html:
    followed = measures(group)
    table = _curve_table(group, order)
    if not table:
        return Html("")
    options = [tag("option", measure.label, value=measure.key) for measure in followed]
    choice = tag("label", "Show ", tag("select", *options, data_measure=index), class_="choice script")
    title = "Mean over seeds after each round; the band spans the lowest and the highest seed"
    parts = [choice, _figure("curves", index, 0, title), _behind("Figures behind the curves", table)]
    for view in group.views:
        rows = {name: _milestones(row.course) for name, row in view.rows.items() if row.course}
        if len(group.methods) > 1 and rows:
            target = group.target.get(view.name)
            title = f"On the way, {view_title(view)}: up to {percent(target)} %, the target"
            columns = ["rounds to target", "bytes to target", "settled in round", "fluctuation"]
            parts.append(_behind(title, _method_table(title, columns, rows, order)))
    return join(parts)


def _milestones(course: Mapping[str, Any]) -> list[str]:
    def reached(found: Mapping[str, Any], show: Callable[[float], str]) -> str:
        if found["mean"] is not None:
            return show(found["mean"])
        return f"{found['reached']} of {len(found['seeds'])} seeds" if found["reached"] else "–"

    return [
        reached(course["rounds_to_target"], "{:.1f}".format),
        reached(course["bytes_to_target"], size),
        reached(course["convergence_round"], "{:.1f}".format),
        percent(course["fluctuation"]["mean"]),
    ]


def _curve_table(group: Group, order: Mapping[str, int]) -> Html:
    main = measures(group)[0]
    lines = {name: line for name in group.methods if (line := series(group.runs[name], main))}
    if not lines:
        return Html("")
    rounds = sorted({number for line in lines.values() for number in line.rounds})
    step = max(1, -(-len(rounds) // _MOST_ROUNDS))
    picked = rounds[::-1][::step][::-1]
    show = percent if main.percent else "{:.3f}".format
    rows = {}
    for name, line in lines.items():
        at = dict(zip(line.rounds, line.mean, strict=True))
        rows[name] = [show(at[number]) if number in at else "–" for number in picked]
    return _method_table(f"{main.label} after round", list(map(str, picked)), rows, order)


def _significance(group: Group, index: int, order: Mapping[str, int]) -> Html:
    if len(group.methods) < 2:
        return Html("")
    parts = []
    tested = 0
    for view in group.views:
        tests = {name: row.test for name, row in view.rows.items() if row.test is not None}
        if not tests:
            continue
        has_interval = any(test["interval"] is not None for test in tests.values())
        title = f"Difference to {group.baseline}, {view_title(view)}"
        if has_interval:
            parts.append(_figure("tests", index, tested, f"{title}, in points, with its 95 % interval"))
            tested += 1
        rows = {name: _test(test) for name, test in tests.items()}
        columns = ["difference", "95 % interval", "p", "p (Holm)", "seeds"]
        parts.append(_method_table(title, columns, rows, order))
    if not parts:
        return tag("p", "A test needs two seeds or more: add some with --seeds 0,1,2.")
    note = (
        "Paired t-tests over the same seeds, corrected after Holm for the number of methods. An interval that crosses "
        "zero means that these seeds cannot tell the two apart."
    )
    return join([*parts, tag("p", note, class_="small")])


def _test(test: Mapping[str, Any]) -> list[str]:
    interval = test["interval"]
    return [
        _signed(test["difference"]),
        "–" if interval is None else f"{_signed(interval[0])} to {_signed(interval[1])}",
        "–" if test["p"] is None else f"{test['p']:.3f}",
        "–" if test["p_holm"] is None else f"{test['p_holm']:.3f}",
        str(test["seeds"]),
    ]


def _signed(value: float) -> str:
    return f"{round(100 * value, 2) + 0.0:+.2f}".replace("-", "−")


def _communication(group: Group, index: int, order: Mapping[str, int]) -> Html:
    costs = group.costs
    if not costs:
        return Html("")
    kinds = [kind for kind in next(iter(costs.values())).bytes["up"] if kind != "total"]
    used = [kind for kind in kinds if any(cost.bytes[way][kind] for cost in costs.values() for way in _WAYS)]
    most = max(cost.bytes[way]["total"] for cost in costs.values() for way in _WAYS) or 1
    bars = [
        _bars(
            f"Bytes of one run, {words}",
            {name: {kind: cost.bytes[way][kind] for kind in used} for name, cost in costs.items()},
            most,
            size,
            order,
        )
        for way, words in _WAYS.items()
    ]
    rows = {
        name: [size(cost.bytes[way][kind]) for way in _WAYS for kind in (*used, "total")]
        for name, cost in costs.items()
    }
    columns = [f"{kind} {way}" for way in _WAYS for kind in (*used, "total")]
    chart = Html("")
    if group.views:
        chart = _figure("spent", index, 0, "Average accuracy against everything sent until then, up and down")
    table = _method_table("Bytes of one run", columns, rows, order)
    return join([tag("div", *bars, class_="pair"), chart, _behind("Exact figures", table)])


def _time(group: Group, _index: int, order: Mapping[str, int]) -> Html:
    costs = group.costs
    if not costs:
        return Html("")
    most = max(sum(cost.seconds[part] for part in _PARTS) for cost in costs.values()) or 1
    bars = _bars(
        "Time of one run",
        {name: {part: cost.seconds[part] for part in _PARTS} for name, cost in costs.items()},
        most,
        duration,
        order,
    )
    rows = {
        name: [*(duration(cost.seconds[part]) for part in (*_PARTS, "total")), size(cost.memory)]
        for name, cost in costs.items()
    }
    table = _method_table("Time and memory of one run", [*_PARTS, "total", "peak memory"], rows, order)
    return join([bars, _behind("Exact figures", table)])


def _bars(
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
        said = ", ".join(f"{kind} {show(value)}" for kind, value in parts.items())
        rows.append(
            tag(
                "li",
                tag("span", name, class_="what"),
                tag("span", *pieces, class_="bar", role="img", aria_label=said),
                tag("span", show(sum(parts.values())), class_="figures"),
                data_method=order[name],
            )
        )
    legend_list = tag("ul", *legend, class_="legend") if len(kinds) > 1 else ""
    return tag("figure", tag("figcaption", title), legend_list, tag("ul", *rows, class_="bars"), class_="stacked")


def _partition(group: Group, _index: int, _order: Mapping[str, int]) -> Html:
    """Classes x clients, as a table whose cells are as dark as they are full."""
    # Pooled data has a single holder, which says nothing about the others.
    dealt = [run for run in group.readings if len(run.config["partition"]["clients"]) > 1] or group.readings
    if not dealt:
        return Html("")
    config = dealt[0].config
    clients, classes = config["partition"]["clients"], config["data"]["classes"]
    most = max(max(entry["per_class"]) for entry in clients.values()) or 1
    rows = [
        tag(
            "tr",
            tag("th", client, scope="row"),
            *(tag("td", count or "", style=f"--fill:{count / most:.3f}") for count in entry["per_class"]),
            tag("td", entry["train"], class_="total"),
        )
        for client, entry in list(clients.items())[:_MOST_CLIENTS]
    ]
    head = tag("tr", tag("td"), *(tag("th", name, scope="col") for name in classes), tag("th", "all", scope="col"))
    title = f"Training images of each client by class, {config['partition']['protocol']}, seed {config['seed']}"
    table = tag("table", tag("caption", title), tag("thead", head), tag("tbody", *rows), class_="heat")
    notes = [f"The first {_MOST_CLIENTS} of {len(clients)} clients."] if len(clients) > _MOST_CLIENTS else []
    if config["partition"]["held_out"]:
        notes.append(f"Held out, for testing only: {', '.join(config['partition']['held_out'])}.")
    return join([_scroll(table, title), *(tag("p", note, class_="small") for note in notes)])


def _pictures(findings: Findings) -> Iterator[Section]:
    found: dict[str, list[Gallery]] = {}
    for gallery in galleries(findings.readings):
        found.setdefault(gallery.name, []).append(gallery)
    for name, listed in found.items():
        yield Section(name, listed[0].title, join(_gallery(each) for each in listed))


def _gallery(gallery: Gallery) -> Html:
    pictures = [
        tag(
            "figure",
            tag("img", src=picture.source, alt=picture.caption, loading="lazy"),
            tag("figcaption", picture.caption),
        )
        for picture in gallery.pictures
    ]
    parts: list[object] = [tag("h3", gallery.run)]
    if gallery.text:
        parts.append(tag("p", gallery.text))
    parts += [
        _table(title, columns, [[_cell(cell) for cell in row] for row in rows])
        for title, columns, rows in gallery.tables
    ]
    if pictures:
        parts.append(tag("div", *pictures, class_="gallery"))
    if gallery.left_out:
        parts.append(tag("p", f"{gallery.left_out} more pictures are in the run folder.", class_="small"))
    return join(parts)


def _about(findings: Findings) -> Iterator[Section]:
    yield Section("again", "Run it again", _again(findings))
    configurations = _configurations(findings)
    if configurations:
        yield Section("configuration", "Configuration", configurations)


def _again(findings: Findings) -> Html:
    parts: list[object] = []
    words = command(findings)
    if words is None:
        parts.append(
            tag(
                "p",
                "It was made from Python, with variants of its own; `protofed run --from` takes its run.json files.",
            )
        )
    else:
        parts += [tag("p", "With the versions below this gives the same figures:"), _code(words)]
    going_on = resume(findings)
    if going_on:
        parts += [tag("p", "To finish what is here:"), _code(going_on)]
    if findings.readings:
        versions = findings.readings[0].config["versions"]
        parts.append(
            tag("p", "Versions: " + ", ".join(f"{name} {number}" for name, number in versions.items()), class_="small")
        )
    return join(parts)


def _code(text: str) -> Html:
    copy = tag("button", "Copy", type="button", class_="copy script")
    return tag("div", tag("pre", tag("code", text), tabindex="0"), copy, class_="command")


def _configurations(findings: Findings) -> Html:
    """One list for each method: everything that was settled before its first round."""
    parts = []
    for group in findings.groups:
        for name, runs in group.runs.items():
            if not runs:
                continue
            config = {
                key: value for key, value in runs[0].config.items() if key not in ("options", "versions", "warnings")
            }
            config["partition"] = {key: value for key, value in config["partition"].items() if key != "clients"}
            title = f"{name}, {group.title}" if len(findings.groups) > 1 else name
            rows = [[key, value] for key, value in _flat(config)]
            parts.append(_behind(title, _table(f"Configuration of {title}", ["setting", "value"], rows, figures=False)))
    return join(parts)


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, item in value.items():
        if isinstance(item, Mapping):
            yield from _flat(item, f"{prefix}{key}.")
        elif isinstance(item, list) and len(item) > 1 and len(set(map(str, item))) == 1:
            yield f"{prefix}{key}", f"{len(item)} times {item[0]}"
        else:
            yield f"{prefix}{key}", ", ".join(map(str, item)) if isinstance(item, list) else str(item)


def _footer() -> Html:
    return tag(
        "footer",
        tag("p", f"Written by protofed {version('protofed')} from the run folders alone. This page loads nothing."),
    )


def _figure(kind: str, group: int, number: int, caption: str) -> Html:
    """Where the script draws a chart; the table that holds its numbers is next to it."""
    plot = tag("div", class_="plot", data_chart=kind, data_group=group, data_number=number)
    return tag("figure", tag("figcaption", caption), plot, class_="chart script")


def _behind(title: str, content: Html) -> Html:
    return tag("details", tag("summary", title), content)


def _method_table(
    caption: str, columns: Sequence[str], rows: Mapping[str, Sequence[object]], order: Mapping[str, int]
) -> Html:
    """A table with a row for every method, which the switches hide and show."""
    head = tag("tr", tag("th", "method", scope="col"), *(tag("th", column, scope="col") for column in columns))
    body = [
        tag(
            "tr",
            tag("th", _key(order[name]), name, scope="row"),
            *(tag("td", cell) for cell in cells),
            data_method=order[name],
        )
        for name, cells in rows.items()
    ]
    return _scroll(tag("table", tag("caption", caption), tag("thead", head), tag("tbody", *body)), caption)


def _table(caption: str, columns: Sequence[str], rows: Sequence[Sequence[object]], figures: bool = True) -> Html:
    head = tag("tr", *(tag("th", column, scope="col") for column in columns))
    body = [tag("tr", tag("th", row[0], scope="row"), *(tag("td", cell) for cell in row[1:])) for row in rows]
    table = tag(
        "table", tag("caption", caption), tag("thead", head), tag("tbody", *body), class_=None if figures else "texts"
    )
    return _scroll(table, caption)


def _scroll(table: Html, label: str) -> Html:
    """Wide tables scroll in a box of their own, also by keyboard."""
    return tag("div", table, class_="scroll", tabindex="0", role="region", aria_label=label)


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, float) and not value.is_integer():
        return f"{value:.4g}" if abs(value) < 1 else f"{value:,.2f}"
    return f"{value:,.0f}" if isinstance(value, int | float) and not isinstance(value, bool) else str(value)

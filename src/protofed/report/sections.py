"""The sections of the page, in the order they are read: results, pictures of other commands, how to do it again."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from protofed.pages.elements import (
    as_text,
    chart,
    command_line,
    details,
    gallery,
    mean_and_spread,
    method_table,
    picture,
    plain_table,
    png_source,
    scroll,
    sheet,
    signed,
    stacked_bars,
)
from protofed.pages.markup import Html, join, tag
from protofed.report.commands import command, resume
from protofed.report.content import Cost, MethodGroup, MethodScores, ReportContent, ScoreView
from protofed.report.curves import measures, series
from protofed.report.galleries import EmbeddedPicture, Gallery, galleries
from protofed.report.methods_section import methods_section
from protofed.report.metrics_section import metrics_section
from protofed.report.wording import view_title
from protofed.runs.summary import LAST_ROUNDS
from protofed.text import counted, duration, p_value, percent, size

_MOST_CLIENTS = 60
"""Rows of the partition that are drawn."""
_MOST_ROUNDS = 10
"""Columns of the table behind the curves."""
_WAYS = {"up": "sent up, by clients", "down": "sent down, by the server"}
_PARTS = ("train", "aggregate", "evaluate")
_EQUAL_BYTES = 1.02


class Section(NamedTuple):
    """A part of the page under its own heading."""

    id: str
    title: str
    body: Html


def results(content: ReportContent, order: Mapping[str, int]) -> Iterator[Section]:
    """What came out; `order` numbers the methods as the script does."""
    parts: list[tuple[str, str, Callable[[MethodGroup, int, Mapping[str, int]], Html]]] = [
        ("accuracy", "Accuracy", _accuracy),
        ("metrics", "Metrics", metrics_section),
        ("course", "Round by round", _curves),
        ("chance", "Could this be chance?", _significance),
        ("communication", "Communication", _communication),
        ("privacy", "Privacy", _privacy),
        ("time", "Time", _time),
        ("partition", "Data of each client", _partition),
    ]
    for id, title, make in parts:
        bodies = [(group, make(group, index, order)) for index, group in enumerate(content.groups)]
        several = len(content.groups) > 1
        shown = [join([tag("h3", group.title) if several else "", body]) for group, body in bodies if body]
        if shown:
            yield Section(id, title, join(shown))
    if content.tables:
        tables = [
            plain_table(table.title, table.columns, [[as_text(cell) for cell in row] for row in table.rows])
            for table in content.tables
        ]
        yield Section("computed", "Computed", join(tables))


def _accuracy(group: MethodGroup, index: int, order: Mapping[str, int]) -> Html:
    parts = []
    for number, view in enumerate(group.views):
        heading = f"Accuracy of {view_title(view)}"
        marks = "one mark per method and test set" if len(group.methods) > 1 else "one mark per test set"
        spans = ", lines span the seeds" if group.over_seeds else ""
        dots = chart("dots", index, number, f"{heading}: {marks}{spans}")
        parts.append(join([dots, _accuracy_table(group, view, heading, order)]))
    return join(parts)


def _accuracy_table(group: MethodGroup, view: ScoreView, heading: str, order: Mapping[str, int]) -> Html:
    labels = [*view.columns, *view.held_out]
    has_worst = len(labels) > 1 and any(row.worst is not None for row in view.rows.values())
    several = len(view.rows) > 1
    best = _best_of_columns(view, labels) if several else dict.fromkeys([*labels, "average"])
    rows = {}
    for name, row in view.rows.items():
        cells = [mean_and_spread(row.columns.get(label), best[label], row.paper.get(label)) for label in labels]
        cells.append(mean_and_spread(row.average, best["average"], row.paper.get("average")))
        rows[name] = [*cells, *([_worst(row)] if has_worst else [])]
    columns = [*view.columns, *(f"{name} (held out)" for name in view.held_out), view.average]
    columns += ["worst"] if has_worst else []
    note = "In %: mean over seeds ± standard deviation" if group.over_seeds else "In %"
    note += "; the best of each column is bold." if several else "."
    if group.over_rounds:
        note += f" Of a run the mean of its last {LAST_ROUNDS} scored rounds; the final models are under Metrics."
    if any(row.paper for row in view.rows.values()):
        note += " The paper's figure is in brackets."
    below = {}
    if view.chance:
        note += " Chance: always predicting a test set's most frequent class."
        below["chance"] = [*(percent(view.chance.get(label)) for label in (*labels, "average")), *([""] * has_worst)]
    return join([method_table(heading, columns, rows, order, below), tag("p", note, class_="small")])


def _best_of_columns(view: ScoreView, labels: Sequence[str]) -> dict[str, float | None]:
    best: dict[str, float | None] = {"average": max(row.average["mean"] for row in view.rows.values())}
    for label in labels:
        means = [row.columns[label]["mean"] for row in view.rows.values() if label in row.columns]
        best[label] = max(means, default=None)
    return best


def _worst(row: MethodScores) -> Html:
    if row.worst is None:
        return Html("–")
    names = row.worst.get("names", ())
    most_often = max(names, key=names.count) if names else ""
    return join([mean_and_spread(row.worst), tag("span", f" {most_often}", class_="soft")])


def _curves(group: MethodGroup, index: int, order: Mapping[str, int]) -> Html:
    followed = measures(group)
    table = _curve_table(group, order)
    if not table:
        return Html("")
    options = [tag("option", measure.label, value=measure.key) for measure in followed]
    choice = tag("label", "Show ", tag("select", *options, data_measure=index), class_="choice script")
    over_seeds = "Mean over seeds after each round; the band spans the lowest to the highest seed"
    title = over_seeds if group.over_seeds else "After each round"
    parts = [choice, chart("curves", index, 0, title), details("Data behind the curves", table)]
    for view in group.views:
        rows = {name: _milestones(row.convergence) for name, row in view.rows.items() if row.convergence}
        if len(group.methods) > 1 and rows:
            target = group.target.get(view.name)
            title = f"Cost of reaching the target, {view_title(view)}: {percent(target)} %"
            columns = ["rounds to target", "bytes to target", "settled in round", "fluctuation"]
            parts.append(details(title, method_table(title, columns, rows, order)))
    return join(parts)


def _milestones(convergence: Mapping[str, Any]) -> list[str]:
    def reached(figure: Mapping[str, Any], show: Callable[[float], str]) -> str:
        if figure["mean"] is not None:
            return show(figure["mean"])
        return f"{figure['reached']} of {len(figure['seeds'])} seeds" if figure["reached"] else "–"

    return [
        reached(convergence["rounds_to_target"], "{:.1f}".format),
        reached(convergence["bytes_to_target"], size),
        reached(convergence["convergence_round"], "{:.1f}".format),
        percent(convergence["fluctuation"]["mean"]),
    ]


def _curve_table(group: MethodGroup, order: Mapping[str, int]) -> Html:
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
    return method_table(f"{main.label} after round", list(map(str, picked)), rows, order)


def _significance(group: MethodGroup, index: int, order: Mapping[str, int]) -> Html:
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
            parts.append(chart("tests", index, tested, f"{title}, in points, with its 95 % interval"))
            tested += 1
        rows = {name: _test(test) for name, test in tests.items()}
        columns = ["difference", "95 % interval", "p", "p (Holm)", "seeds"]
        parts.append(method_table(title, columns, rows, order))
    if not parts:
        return tag("p", "A test needs two seeds or more: add some with --seeds 0,1,2.")
    note = (
        "Paired t-tests over the same seeds, with Holm's correction for the number of methods. If an interval "
        "crosses zero, these seeds cannot tell the two methods apart."
    )
    return join([*parts, tag("p", note, class_="small")])


def _test(test: Mapping[str, Any]) -> list[str]:
    interval = test["interval"]
    return [
        signed(test["difference"]),
        "–" if interval is None else f"{signed(interval[0])} to {signed(interval[1])}",
        *("–" if p is None else p_value(p) for p in (test["p"], test["p_holm"])),
        str(test["seeds"]),
    ]


def _communication(group: MethodGroup, index: int, order: Mapping[str, int]) -> Html:
    costs = group.costs
    if not costs:
        return Html("")
    kinds = _kinds_sent(costs)
    most = max(cost.bytes[way]["total"] for cost in costs.values() for way in _WAYS) or 1
    bars = [
        stacked_bars(
            f"Bytes of one run, {words}",
            {name: {kind: cost.bytes[way][kind] for kind in kinds} for name, cost in costs.items()},
            most,
            size,
            order,
        )
        for way, words in _WAYS.items()
    ]
    spent = Html("")
    if group.views and _differ_in_bytes(costs):
        spent = chart("spent", index, 0, "Average accuracy against total bytes sent so far, up and down")
    table = details("Exact figures", _bytes_table(costs, kinds, order))
    return join([tag("div", *bars, class_="pair"), spent, table])


def _differ_in_bytes(costs: Mapping[str, Cost]) -> bool:
    """Where all send as much, accuracy against bytes is the chart against rounds once more."""
    totals = [sum(cost.bytes[way]["total"] for way in _WAYS) for cost in costs.values()]
    return max(totals) > _EQUAL_BYTES * min(totals)


def _kinds_sent(costs: Mapping[str, Cost]) -> list[str]:
    """The kinds of fields of which some method sends any."""
    sent = [cost.bytes[way] for cost in costs.values() for way in _WAYS]
    return [kind for kind in sent[0] if kind != "total" and any(counts[kind] for counts in sent)]


def _bytes_table(costs: Mapping[str, Cost], kinds: Sequence[str], order: Mapping[str, int]) -> Html:
    cells = [(way, kind) for way in _WAYS for kind in (*kinds, "total")]
    rows = {name: [size(cost.bytes[way][kind]) for way, kind in cells] for name, cost in costs.items()}
    return method_table("Bytes of one run", [f"{kind} {way}" for way, kind in cells], rows, order)


def _time(group: MethodGroup, _index: int, order: Mapping[str, int]) -> Html:
    costs = group.costs
    if not costs:
        return Html("")
    most = max(sum(cost.seconds[part] for part in _PARTS) for cost in costs.values()) or 1
    bars = stacked_bars(
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
    table = method_table("Time and memory of one run", [*_PARTS, "total", "peak memory"], rows, order)
    return join([bars, details("Exact figures", table)])


def _privacy(group: MethodGroup, _index: int, order: Mapping[str, int]) -> Html:
    """What the runs of each method promise; its first run, since noise does not depend on the seed."""
    complete = {name: [run for run in runs if run.complete] for name, runs in group.runs.items()}
    spent = {name: runs[0].summary.get("privacy") for name, runs in complete.items() if runs}
    promised = {name: entry for name, entry in spent.items() if entry and entry["epsilon"] is not None}
    if not promised:
        return Html("")
    rows = {
        name: [f"{entry['epsilon']:.4g}", f"{entry['delta']:g}", entry["unit"], str(entry.get("among", 1))]
        for name, entry in promised.items()
    }
    return method_table(
        "Privacy spent by uploads", ["epsilon", "delta", "of one", "clients that share noise"], rows, order
    )


def _partition(group: MethodGroup, _index: int, _order: Mapping[str, int]) -> Html:
    """Classes x clients, as a table whose cells are as dark as they are full."""
    # Pooled data has a single holder, which says nothing about the others.
    dealt = [run for run in group.all_runs if len(run.config["partition"]["clients"]) > 1] or group.all_runs
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
    return join([scroll(table, title), *(tag("p", note, class_="small") for note in notes)])


def pictures(content: ReportContent, with_training_images: bool) -> Iterator[Section]:
    """What other commands left in the run folders."""
    by_name: dict[str, list[Gallery]] = {}
    for each in galleries(content.all_runs, with_training_images):
        by_name.setdefault(each.name, []).append(each)
    for name, listed in by_name.items():
        yield Section(name, listed[0].title, join(_gallery(each) for each in listed))


def _gallery(shown: Gallery) -> Html:
    parts: list[object] = [tag("h3", shown.run)]
    if shown.text:
        parts.append(tag("p", shown.text))
    if shown.verdicts:
        parts.append(tag("ul", *(tag("li", verdict) for verdict in shown.verdicts)))
    parts += [
        plain_table(table.title, table.columns, [[as_text(cell) for cell in row] for row in table.rows])
        for table in shown.tables
    ]
    if shown.pictures:
        parts.append(gallery((_shown(each, shown.wide) for each in shown.pictures), wide=shown.wide))
    if shown.of_training_images:
        left_out = counted(shown.of_training_images, "picture")
        text = f"{left_out} of training images left out, so that this page can be sent."
        parts.append(tag("p", text, class_="small"))
    if shown.left_out:
        more = "1 more picture is" if shown.left_out == 1 else f"{shown.left_out} more pictures are"
        parts.append(tag("p", f"{more} in the run folder.", class_="small"))
    return join(parts)


def _shown(each: EmbeddedPicture, wide: bool) -> Html:
    if wide:
        return sheet(each.png, each.caption, each.caption, caption=True)
    return picture(png_source(each.png), each.caption)


def about(content: ReportContent) -> Iterator[Section]:
    """How it was made."""
    methods = methods_section(content)
    if methods:
        yield Section("methods", "Methods", methods)
    yield Section("again", "Run it again", _again(content))
    configurations = _configurations(content)
    if configurations:
        yield Section("configuration", "Configuration", configurations)


def _again(content: ReportContent) -> Html:
    parts: list[object] = []
    words = command(content)
    if words is None:
        parts.append(
            tag(
                "p",
                "The comparison was made from Python, with custom variants; `protofed run --from` accepts its "
                "run.json files.",
            )
        )
    else:
        parts += [tag("p", "With the versions below, this gives the same figures:"), command_line(words)]
    going_on = resume(content)
    if going_on:
        parts += [tag("p", "To finish the remaining runs:"), command_line(going_on)]
    if content.all_runs:
        versions = content.all_runs[0].config["versions"]
        parts.append(
            tag("p", "Versions: " + ", ".join(f"{name} {number}" for name, number in versions.items()), class_="small")
        )
    return join(parts)


def _configurations(content: ReportContent) -> Html:
    """One list for each method: everything that was settled before its first round."""
    parts = []
    for group in content.groups:
        for name, runs in group.runs.items():
            if not runs:
                continue
            config = {
                key: value for key, value in runs[0].config.items() if key not in ("options", "versions", "warnings")
            }
            config["partition"] = {key: value for key, value in config["partition"].items() if key != "clients"}
            title = f"{name}, {group.title}" if len(content.groups) > 1 else name
            rows = [[key, value] for key, value in _flat(config)]
            parts.append(
                details(title, plain_table(f"Configuration of {title}", ["setting", "value"], rows, figures=False))
            )
    return join(parts)


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, item in value.items():
        if isinstance(item, Mapping):
            yield from _flat(item, f"{prefix}{key}.")
        elif isinstance(item, list) and len(item) > 1 and len(set(map(str, item))) == 1:
            yield f"{prefix}{key}", f"{len(item)} times {item[0]}"
        else:
            yield f"{prefix}{key}", ", ".join(map(str, item)) if isinstance(item, list) else str(item)

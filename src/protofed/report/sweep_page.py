"""A sweep as a page of its own: the winner, every trial on validation data, and the one look at test data."""

from collections.abc import Iterator

from protofed.pages.drawing import line_chart
from protofed.pages.elements import plain_table
from protofed.pages.frame import framed
from protofed.pages.markup import Html, tag
from protofed.report.content import ReportedRun
from protofed.studies.chance import chance_of
from protofed.studies.schema import ChanceView, View
from protofed.studies.sweep_result import Sweep
from protofed.text import counted, percent


def sweep_page(sweep: Sweep, remarks: list[str]) -> str:
    """The whole page; `remarks` are for the reader."""
    content = sweep.content
    title = f"Sweep of {content['method']} on {content['options']['data']}"
    done = sum(trial["validation"] is not None for trial in content["trials"])
    facts = [
        f"{done} of {counted(len(content['trials']), 'trial')}",
        f"seed{'s' if len(content['seeds']) > 1 else ''} {', '.join(map(str, content['seeds']))}",
    ]
    winner = sweep.winner()
    lead = tag("p", f"{winner[0].upper()}{winner[1:]}.", class_="lead")
    notes = [tag("p", remark, class_="note") for remark in remarks]
    missing = [tag("p", f"Missing: {line}.", class_="note") for line in sweep.missing()]
    share = f"{100 * float(content['validation']):.0f} %"
    how = tag(
        "p",
        f"Trials are ranked on {share} of each client's training images, held out from training. Test images are "
        "used once, for the winner.",
        class_="small",
    )
    table = sweep.table()
    trials = tag("section", tag("h2", "Trials"), plain_table(table.title, table.columns, table.rows), how)
    result = tag("section", lead, *notes, *missing, class_="headline", aria_label="Result in words")
    return framed("sweep", title, facts, [result, trials, *_effects(sweep), *_on_test_data(sweep)])


def _effects(sweep: Sweep) -> Iterator[Html]:
    """How the score goes with each numeric hyper-parameter: the mean over all trials that share a value."""
    content = sweep.content
    charts = []
    for key in content["over"]:
        by_value: dict[float, list[float]] = {}
        for trial in content["trials"]:
            value = _number(trial["settings"][key])
            if value is not None and trial["validation"] is not None:
                by_value.setdefault(value, []).append(trial["validation"]["mean"])
        if len(by_value) > 1:
            line = [(value, sum(scores) / len(scores)) for value, scores in sorted(by_value.items())]
            charts.append(Html(line_chart(f"Validation score (%) by {key}", key, {key: line}).svg))
    if charts:
        note = (
            "Mean over the trials that share a value; interpret it with care if the other values were drawn at random."
        )
        yield tag("section", tag("h2", "Effect of each setting"), *charts, tag("p", note, class_="small"))


def _on_test_data(sweep: Sweep) -> Iterator[Html]:
    """The winner beside what a model reaches that has learned nothing."""
    best, shown = sweep.content["best"], []
    for view, scores in best["test"].items() if best else ():
        # With global models and a client per domain both views are the same.
        if scores is not None and scores["per_domain"] not in shown:
            shown.append(scores["per_domain"])
            parts = scores["per_domain"] or scores["per_client"]
            rows = [
                ["accuracy", *(percent(each["mean"]) for each in parts.values()), percent(scores["average"]["mean"])]
            ]
            chance = _chance(sweep, view)
            if chance is not None:
                levels = {**chance["per_client"], **chance["per_domain"]}
                rows.append(["chance", *(percent(levels.get(name)) for name in parts), percent(chance["average"])])
            table = plain_table(f"The winner on test data (%), {view} view", ["", *parts, "average"], rows)
            yield tag("section", tag("h2", f"On test data, {view} view"), table)


def _chance(sweep: Sweep, view: View) -> ChanceView | None:
    """Of the winner's runs, as far as they are there."""
    settings = sweep.content["best"]["settings"]
    names = [name for trial in sweep.content["trials"] if trial["settings"] == settings for name in trial["runs"]]
    runs = [run for name in names if (run := ReportedRun(sweep.path / name)).begun]
    return chance_of(runs, view) if runs else None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None

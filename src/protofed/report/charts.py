"""The numbers that the page's script draws, as plain data."""

from collections.abc import Mapping, Sequence
from typing import Any

from protofed.report.content import MethodGroup, MethodScores, ReportContent, ScoreView
from protofed.report.curves import Measure, measures, series

_SHOWN_AT_FIRST = 9
"""More lines cannot be told apart; the others can be switched on."""


def chart_data(content: ReportContent) -> dict[str, Any]:
    """Everything that is drawn: methods with what they are drawn in, and per group its charts."""
    names = list(dict.fromkeys(name for group in content.groups for name in group.methods))
    shown = _shown_at_first(content.groups, names)
    return {
        "methods": [{"name": name, "on": name in shown} for name in names],
        "groups": [_group(group, names) for group in content.groups],
    }


def _shown_at_first(groups: Sequence[MethodGroup], names: Sequence[str]) -> set[str]:
    """All, or the baseline and the best."""
    if len(names) <= _SHOWN_AT_FIRST:
        return set(names)
    best: dict[str, float] = {}
    for group in groups:
        for view in group.views:
            for name, row in view.rows.items():
                best[name] = max(best.get(name, 0.0), row.average["mean"])
    baselines = {group.baseline for group in groups if group.baseline}
    ranked = sorted(best, key=lambda name: (name not in baselines, -best[name]))
    return set(ranked[:_SHOWN_AT_FIRST])


def _group(group: MethodGroup, names: Sequence[str]) -> dict[str, Any]:
    position = {name: index for index, name in enumerate(names)}
    followed = []
    for measure in measures(group):
        lines = {position[name]: series(group.runs[name], measure) for name in group.methods}
        drawn = {
            index: {
                "x": line.rounds,
                "bytes": [round(value) for value in line.bytes],
                **{key: _rounded(getattr(line, key)) for key in ("mean", "low", "high")},
            }
            for index, line in lines.items()
            if line is not None
        }
        if drawn:
            shown = {"key": measure.key, "label": measure.label, "percent": measure.percent, "series": drawn}
            followed.append({**shown, "chance": _chance(group, measure)})
    return {
        "measures": followed,
        "dots": [_dots(view, position) for view in group.views],
        "tests": [test for view in group.views if (test := _tests(view, position))],
    }


def _dots(view: ScoreView, position: Mapping[str, int]) -> dict[str, Any]:
    """Per part of the test data every method with the range over its seeds, and the paper's figure."""
    labels = [*view.columns, *view.held_out, view.average]
    titles = [*view.columns, *(f"{name} (held out)" for name in view.held_out), view.average]
    points = {position[name]: [_point(row, label, view.average) for label in labels] for name, row in view.rows.items()}
    chance = [view.chance.get("average" if label == view.average else label) for label in labels]
    return {"view": view.name, "rows": titles, "points": points, "chance": chance}


def _chance(group: MethodGroup, measure: Measure) -> float | None:
    """Where a curve of models that have learned nothing would run, as far as that is known."""
    view, _, part = measure.key.partition(".")
    return next((shown.chance.get(part) for shown in group.views if shown.name == view), None)


def _point(row: MethodScores, label: str, average: str) -> list[float | None] | None:
    score = row.average if label == average else row.columns.get(label)
    if score is None:
        return None
    return [*_rounded([score["mean"], min(score["seeds"]), max(score["seeds"])]), row.paper.get(label)]


def _tests(view: ScoreView, position: Mapping[str, int]) -> dict[str, Any] | None:
    """Differences to the baseline with their intervals, where there are intervals."""
    points = {
        position[name]: _rounded([row.test["difference"], *row.test["interval"]])
        for name, row in view.rows.items()
        if row.test is not None and row.test["interval"] is not None
    }
    return {"view": view.name, "points": points} if points else None


def _rounded(values: Sequence[float]) -> list[float]:
    return [round(value, 5) for value in values]

"""Tables of metrics for a terminal: the main one with its interval, the others beside it."""

from collections.abc import Mapping, Sequence
from typing import Any

from protofed.metrics import ACCURACY, METRICS, are_grades, main_metric
from protofed.runs import Run
from protofed.text import Table, interval, percent

_BESIDE = (
    "auc",
    "quadratic_kappa",
    "sensitivity",
    "specificity",
    "sensitivity_at_90_specificity",
    "balanced_accuracy",
    "ece",
)
"""Few enough for a line; summary.json and the report have all."""


def run_tables(run: Run) -> list[Table]:
    """The metrics of a run where accuracy says too little: two classes, grades, or a metric that was asked for."""
    metrics, classes = run.summary.get("metrics"), run.config["data"]["classes"]
    if metrics is None or not (len(classes) == 2 or are_grades(classes) or metrics["metric"] != ACCURACY):
        return []
    tables = []
    for view, words in (("global", "the global model"), ("personal", "each client's model")):
        # The personal view of a global model would say the same again.
        repeats = view == "personal" and metrics["global"] is not None and run.config["method"]["kind"] == "global"
        if metrics[view] is not None and not repeats:
            title = f"{run.summary['method']}: final metrics of {words} (%){_positive(metrics)}"
            tables.append(metric_table(title, metrics[view], classes, metrics["metric"]))
    return tables


def metric_table(title: str, parts: Mapping[str, Any], classes: Sequence[str], chosen: str) -> Table:
    """One row for each part; `parts` have figures as in summary.json."""
    main = main_metric(classes, chosen)
    figures = next(iter(parts.values()))
    beside = [METRICS[name] for name in _BESIDE if name in figures and name != main.name]
    rows = [
        [
            part,
            percent(scores[main.name]["value"]),
            interval(scores[main.name]["interval"]),
            *(percent(scores[metric.name]["value"]) for metric in beside),
        ]
        for part, scores in parts.items()
    ]
    return Table(title, ["test images", main.title, "95 % interval", *(metric.title for metric in beside)], rows)


def fairness_lines(run: Run) -> list[str]:
    """Where the main metric is lowest, and how far that is from the best."""
    metrics = run.summary.get("metrics")
    if metrics is None or not run_tables(run):
        return []
    main = main_metric(run.config["data"]["classes"], metrics["metric"])
    view = "global" if metrics["global"] is not None else "personal"
    entry = metrics["fairness"].get(view, {}).get(main.name)
    if entry is None or not entry["gap"]:
        return []
    worst, gap = percent(entry["worst"]), f"{100 * entry['gap']:.2f}"
    return [f"{main.title} is lowest on {entry['worst_part']}, with {worst} %, {gap} points below the best"]


def confusion_table(title: str, confusion: Sequence[Sequence[int]], classes: Sequence[str]) -> Table:
    """Rows: truth, columns: prediction."""
    rows = [[name, *map(str, row)] for name, row in zip(classes, confusion, strict=True)]
    return Table(title, ["truth", *(f"said {name}" for name in classes)], rows)


def _positive(metrics: Mapping[str, Any]) -> str:
    return f", {metrics['positive']!r} is positive" if metrics["positive"] is not None else ""

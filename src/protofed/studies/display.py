"""A comparison as Python shows it: a row per method, and curves."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from protofed.errors import UserError, unknown_name
from protofed.pages.drawing import Drawing, line_chart
from protofed.pages.notebook import notebook_html
from protofed.runs.opened import CachedRun
from protofed.studies.schema import VIEWS, View

if TYPE_CHECKING:
    from protofed.studies.comparison import Comparison

By = Literal["round", "bytes"]
"""What accuracy is drawn against."""

_AXES = {"round": "round", "bytes": "bytes sent up and down"}


def shown_view(comparison: "Comparison", view: View | None) -> View:
    """The view that was asked for, or the first that has figures."""
    if view is not None and view not in VIEWS:
        raise unknown_name("view", view, VIEWS)
    scored = [name for name in VIEWS if any(entry[name] for entry in comparison.content["methods"].values())]
    if not scored:
        raise UserError(f"the comparison in {comparison.path} has no figures yet")
    return view or scored[0]


def comparison_rows(comparison: "Comparison", view: View | None) -> list[dict[str, Any]]:
    """A row per method: accuracies as fractions, the test against the baseline, bytes and seconds of a run."""
    chosen = shown_view(comparison, view)
    rows = []
    for name, entry in comparison.content["methods"].items():
        scores = entry[chosen]
        if scores is None:
            continue
        row: dict[str, Any] = {"method": name}
        row |= {domain: each["mean"] for domain, each in (*scores["per_domain"].items(), *scores["held_out"].items())}
        row |= {"average": scores["average"]["mean"], "std": scores["average"]["std"]}
        test = scores["test"]
        row |= {"difference": test and test["difference"], "p_holm": test and test["p_holm"]}
        sent = entry["bytes"]
        row |= {f"bytes_{way}": sent[way]["total"] if sent else None for way in ("up", "down")}
        rows.append({**row, "seconds": entry["seconds"]})
    return rows


def draw_comparison(comparison: "Comparison", view: View | None, by: By) -> Drawing:
    """Average accuracy of every method, the mean over its seeds, against rounds or bytes."""
    if by not in _AXES:
        raise unknown_name("axis", by, _AXES)
    chosen = shown_view(comparison, view)
    lines = {
        name: _line([comparison.path / run for run in entry["runs"]], chosen, by)
        for name, entry in comparison.content["methods"].items()
    }
    return line_chart(f"Average accuracy, {chosen} view (%)", _AXES[by], lines)


def comparison_html(comparison: "Comparison") -> str:
    """Tables of the views that differ, the costs, and the curves."""
    tables = [comparison.accuracy_table(view) for view in comparison.views()]
    scored = any(table.rows for table in tables)
    drawing = draw_comparison(comparison, None, "round") if scored else None
    return notebook_html(comparison_line(comparison), [*tables, comparison.costs()], drawing)


def comparison_line(comparison: "Comparison") -> str:
    """What was compared."""
    content = comparison.content
    seeds = len(content["seeds"])
    missing = f", {len(content['missing'])} runs missing" if content["missing"] else ""
    return f"{', '.join(content['methods'])}; {seeds} seed{'s' if seeds > 1 else ''}{missing}"


def _line(folders: list[Path], view: View, by: By) -> list[tuple[float, float]]:
    """Mean accuracy after each round over the runs that were scored then."""
    points: dict[int, list[tuple[float, float]]] = {}
    for folder in folders:
        sent = 0
        for record in CachedRun(folder).rounds:
            sent += sum(record["bytes"][way]["total"] for way in ("up", "down"))
            scores = (record["accuracy"] or {}).get(view)
            if scores and scores["average"] is not None:
                points.setdefault(record["round"], []).append((float(sent), scores["average"]))
    return [
        (_mean([sent for sent, _ in each]) if by == "bytes" else float(number), _mean([value for _, value in each]))
        for number, each in sorted(points.items())
    ]


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)

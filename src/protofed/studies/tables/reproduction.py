"""A reproduced table: our results beside the paper's, for people and as comparison.json."""

from collections.abc import Mapping, Sequence
from typing import Any

from protofed.studies.schedule import Failure
from protofed.studies.schema import (
    ComputedBlock,
    ReproducedMethod,
    ReproducedView,
    ReproductionContent,
    TrainedBlock,
    View,
    is_trained,
)
from protofed.studies.tables.preset import Preset
from protofed.text import Table, p_value, percent


class Reproduction:
    """What came out: the content of comparison.json, and tables of it."""

    def __init__(self, preset: Preset, content: ReproductionContent, failures: Sequence[Failure] = ()) -> None:
        self.preset = preset
        self.content = content
        self.failures = tuple(failures)

    def tables(self) -> list[Table]:
        """One for each data set and view."""
        return [
            table
            for dataset, block in self.content["datasets"].items()
            for table in self._tables_of(self.preset.suite.data[dataset].title, block)
        ]

    def _tables_of(self, title: str, block: TrainedBlock | ComputedBlock) -> list[Table]:
        if not is_trained(block):
            return [Table(title, block["columns"], [[_plain(cell) for cell in row] for row in block["rows"]])]
        tables = [self._view_table(title, view, block["methods"]) for view in self.preset.views]
        if self.preset.kind == "curves":
            tables.append(_curve_table(title, block["methods"]))
        if self.preset.kind == "leakage":
            tables.insert(0, _leakage_table(title, block["methods"]))
        return [table for table in tables if table.rows]

    def _view_table(self, title: str, view: View, methods: Mapping[str, ReproducedMethod]) -> Table:
        shown = {name: ours for name, entry in methods.items() if (ours := entry[view]) is not None}
        columns = list(next(iter(shown.values()))["columns"]) if shown else []
        rows = [
            [name, *_accuracy_cells(ours, columns, (methods[name]["paper"] or {}).get(view, {}))]
            for name, ours in shown.items()
        ]
        measure = "average" if self.preset.has_conditions else self.preset.value.replace("_", " ")
        heading = f"{title}, {view} view: accuracy in %, the paper's in brackets"
        return Table(heading, ["method", *columns, measure, "std", f"p vs {self.content['baseline']} (Holm)"], rows)

    def markdown(self) -> str:
        """comparison.md."""
        about = f"Scale: {self.content['scale']}."
        if self.content["seeds"]:
            about += f" Seeds: {', '.join(map(str, self.content['seeds']))}."
        blocks = [f"# {self.preset.name}: {self.preset.title}", about]
        for table in self.tables():
            blocks += [f"## {table.title}", table.markdown()]
        if self.preset.notes:
            blocks.append("\n".join(f"- {note}" for note in self.preset.notes))
        return "\n\n".join(blocks) + "\n"


def _accuracy_cells(ours: ReproducedView, columns: Sequence[str], paper: Mapping[str, float]) -> list[str]:
    """One row: every column, the average, its spread and the p-value."""
    test = ours["test"]
    return [
        *(_beside(ours["columns"][column]["mean"], paper.get(column)) for column in columns),
        _beside(ours["average"]["mean"], paper.get("average")),
        percent(ours["average"]["std"]),
        p_value(None if test is None else test["p_holm"]),
    ]


def curve_table(heading: str, curves: Mapping[str, Mapping[int, float]], points: int = 10) -> Table:
    """A few rounds of every curve, spread evenly, with the last of them."""
    rounds = sorted({number for curve in curves.values() for number in curve})
    step = max(1, -(-len(rounds) // points))
    picked = rounds[::-1][::step][::-1]
    rows = [[name, *(percent(curve.get(n)) for n in picked)] for name, curve in curves.items()]
    return Table(heading, ["method", *map(str, picked)], rows)


def _curve_table(title: str, methods: Mapping[str, ReproducedMethod]) -> Table:
    """Some rounds of the curves; all of them are in comparison.json."""
    curves = {name: dict(entry["curve"]) for name, entry in methods.items() if entry["curve"]}
    return curve_table(f"{title}: average accuracy in % after round", curves)


def _leakage_table(title: str, methods: Mapping[str, ReproducedMethod]) -> Table:
    """What an attacker rebuilds, beside the paper's figures."""
    shown = {name: leaked for name, entry in methods.items() if (leaked := entry["leakage"]) is not None}
    columns = list(next(iter(shown.values()))["figures"]) if shown else []
    papers = {name: (methods[name]["paper"] or {}).get("leakage", {}) for name in shown}
    rows = [
        [name, *(_leaked(leaked["figures"][column], papers[name].get(column)) for column in columns)]
        for name, leaked in shown.items()
    ]
    label = next(iter(shown.values()))["label"] if shown else "FID"
    heading = f"{title}: images reconstructed from what was sent, the paper's figures in brackets"
    return Table(heading, ["features", *(column.replace("FID", label) for column in columns)], rows)


def _leaked(ours: float | None, paper: float | None) -> str:
    text = "-" if ours is None else f"{ours:.4g}"
    return text if paper is None else f"{text} ({paper:g})"


def _beside(ours: float, paper: float | None) -> str:
    return percent(ours) if paper is None else f"{percent(ours)} ({percent(paper)})"


def _plain(cell: Any) -> str:
    if cell is None:
        return "-"
    if isinstance(cell, float) and not cell.is_integer():
        return f"{cell:.2f}"
    return f"{int(cell):,}" if isinstance(cell, int | float) else str(cell)

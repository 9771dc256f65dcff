"""The papers' tables that are trained: the runs of every row, and their figures beside the paper's."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from protofed.registry import find_method, knobs
from protofed.runs.opened import Run
from protofed.studies.compare import compare
from protofed.studies.comparison import mean_bytes
from protofed.studies.schedule import Failure
from protofed.studies.schema import VIEWS, ReproducedMethod, ReproducedView, Scale, TrainedBlock, View
from protofed.studies.statistics import PairedTest, paired_tests, spread
from protofed.studies.tables.leakage import leakage
from protofed.studies.tables.preset import Preset, PublishedRow

RunsByCondition = dict[str, dict[int, Run]]
"""The complete runs of a row, by condition and seed."""

Cells = dict[str, float]
"""One row for one seed: its columns, and `average`."""


class TrainedTable:
    """The runs of a table, and what they amount to."""

    def __init__(
        self,
        preset: Preset,
        scale: Scale,
        rows: list[PublishedRow],
        columns: list[str] | None,
        seeds: list[int],
        overrides: dict[str, Any],
        shard: str | None,
        callbacks: list[Any],
    ) -> None:
        self.failures: list[Failure] = []
        self._preset = preset
        self._scale = scale
        self._rows = rows
        self._selected = columns
        self._seeds = seeds
        self._overrides = overrides
        self._shard = shard
        self._callbacks = callbacks

    def block(self, dataset: str, folder: Path, out: Path) -> TrainedBlock:
        """One data set of the table, trained in a folder; where its runs are is told from `out`."""
        runs: dict[str, RunsByCondition] = {row.title: {} for row in self._rows}
        conditions = self._preset.selected_conditions(dataset, self._scale, self._selected)
        for condition, settings in conditions.items():
            for title, by_seed in self._compare(dataset, settings, folder / _slug(condition)).items():
                runs[title][condition] = by_seed
        views = {view: self._view(runs, view, dataset) for view in VIEWS}
        methods = {row.title: self._method(row, dataset, runs[row.title], views, out) for row in self._rows}
        return {"methods": methods}

    def _method(
        self,
        row: PublishedRow,
        dataset: str,
        runs: RunsByCondition,
        views: Mapping[View, Mapping[str, ReproducedView]],
        out: Path,
    ) -> ReproducedMethod:
        """One row; where its runs are is told from `out`."""
        view = self._view_of(row, views)
        summaries = [run.summary for run in _all_runs(runs)]
        return {
            "method": row.method,
            "settings": row.set,
            "global": views["global"].get(row.title),
            "personal": views["personal"].get(row.title),
            "bytes": mean_bytes(summaries) if summaries else None,
            "seconds": mean(each["seconds"]["total"] for each in summaries) if summaries else None,
            "leakage": leakage(_all_runs(runs)) if self._preset.kind == "leakage" else None,
            "curve": _curve(_all_runs(runs), view, self._preset.value),
            "paper": self._paper(row, dataset, view),
            "runs": {
                condition: [os.path.relpath(run.path, out) for run in by_seed.values()]
                for condition, by_seed in runs.items()
            },
        }

    def _view_of(self, row: PublishedRow, views: Mapping[View, Mapping[str, Any]]) -> View:
        """Where the row's figures belong: in its own view, unless it has only the table's first one here."""
        first = self._preset.views[0]
        own = row.view or first
        return first if row.title in views[first] and row.title not in views[own] else own

    def _compare(self, dataset: str, condition: Mapping[str, Any], folder: Path) -> dict[str, dict[int, Run]]:
        """All rows under one condition, for every seed."""
        preset = self._preset
        options = preset.run_options(dataset, self._scale, condition, self._overrides)
        named = preset.suite.data[dataset].preset
        if named is not None and any(named in find_method(row.method).presets for row in self._rows):
            options.setdefault("preset", named)
        # A suite speaks to all methods of its tables; what the chosen rows do not know is not for them.
        known = {knob.name for row in self._rows for knob in knobs(find_method(row.method))}
        users = self._overrides.get("set", {})
        options["set"] = {
            key: value
            for key, value in options["set"].items()
            if key in users or key in known or key.startswith(("model.", "data."))
        }
        titles = [row.title for row in self._rows]
        result = compare(
            {row.title: {"method": row.method, **row.options_at(self._scale)} for row in self._rows},
            out=folder,
            seeds=self._seeds,
            baseline=preset.baseline if preset.baseline in titles else None,
            shard=self._shard,
            paper=self._paper_of_domains(dataset),
            paper_view=preset.views[0],
            callbacks=self._callbacks,
            **options,
        )
        self.failures += result.failures
        entries = result.content["methods"]
        return {
            title: {
                seed: Run(folder / path)
                for seed, path in zip(entries[title]["seeds"], entries[title]["runs"], strict=True)
            }
            for title in titles
        }

    def _view(self, runs: Mapping[str, RunsByCondition], view: View, dataset: str) -> dict[str, ReproducedView]:
        """Mean, spread and paired test of every row that has this view."""
        rows = {title: self._cells_by_seed(by_condition, view, dataset) for title, by_condition in runs.items()}
        rows = {title: by_seed for title, by_seed in rows.items() if by_seed}
        averages = {title: {seed: cells["average"] for seed, cells in row.items()} for title, row in rows.items()}
        tests = paired_tests(averages, self._preset.baseline)
        return {title: _reproduced_view(list(row.values()), tests.get(title)) for title, row in rows.items()}

    def _cells_by_seed(self, runs: RunsByCondition, view: View, dataset: str) -> dict[int, Cells]:
        """One row, for the seeds that are complete under every condition."""
        complete = set.intersection(*(set(by_seed) for by_seed in runs.values()))
        cells = {
            seed: self._cells({condition: by_seed[seed] for condition, by_seed in runs.items()}, view, dataset)
            for seed in self._seeds
            if seed in complete
        }
        return {seed: row for seed, row in cells.items() if row is not None}

    def _cells(self, by_condition: Mapping[str, Run], view: View, dataset: str) -> Cells | None:
        """The columns of one row for one seed, and their average; None where the method has no such view."""
        accuracies = {condition: run.summary["accuracy"][view] for condition, run in by_condition.items()}
        if any(accuracy is None for accuracy in accuracies.values()):
            return None
        values = {
            condition: figure_of_run(by_condition[condition], accuracy, self._preset.value)
            for condition, accuracy in accuracies.items()
        }
        if self._preset.has_conditions:
            return {**values, "average": mean(values.values())}
        parts = self._preset.accuracy_columns(dataset, self._scale) if view == "global" else []
        return {**{part: accuracies[""][part] for part in parts}, "average": values[""]}

    def _paper(self, row: PublishedRow, dataset: str, view: View) -> dict[str, Any] | None:
        return self._preset.published(row, dataset, self._scale, view, self._selected)

    def _paper_of_domains(self, dataset: str) -> dict[str, dict[str, float]]:
        """The same for a comparison, which has a run's own columns: those of its domains."""
        if self._preset.has_conditions or self._preset.value != "average":
            return {}
        view = self._preset.views[0]
        papers = {row.title: self._paper(row, dataset, row.view or view) for row in self._rows}
        return {title: paper[view] for title, paper in papers.items() if paper is not None and view in paper}


def _slug(condition: str) -> str:
    return re.sub(r"[^\w.=-]+", "-", condition)


def _all_runs(runs: RunsByCondition) -> list[Run]:
    return [run for by_seed in runs.values() for run in by_seed.values()]


def figure_of_run(run: Run, accuracy: Mapping[str, Any], value: str) -> float:
    """The one figure that stands for a run; clients have no domain left out, and are averaged."""
    if value == "pooled" and value not in accuracy:
        return _pooled(run, accuracy)
    figure = accuracy.get(value, accuracy["average"])
    return mean(figure.values()) if isinstance(figure, Mapping) else float(figure)


def curve_of_run(run: Run, view: View, value: str) -> list[tuple[int, float]]:
    """The table's measure of accuracy after each evaluated round; nothing where the method has no such view."""
    return [
        (record["round"], figure_of_run(run, accuracy, value))
        for record in run.rounds
        if (accuracy := record["accuracy"] and record["accuracy"][view])
    ]


def _pooled(run: Run, accuracy: Mapping[str, Any]) -> float:
    """Over all images, each judged by the client it belongs to; the plain mean where clients are not listed."""
    clients, domains = run.config["partition"]["clients"], run.config["data"]["domains"]
    own = any(entry["holdout"] for entry in clients.values())
    tested = {
        client: entry["holdout"] if own else domains[entry["domain"]]["test"]
        for client, entry in clients.items()
        if accuracy.get(client) is not None
    }
    if not tested:
        return float(accuracy["average"])
    correct = sum(accuracy[client] * size for client, size in tested.items())
    return float(correct / sum(tested.values()))


def _reproduced_view(seeds: Sequence[Cells], test: PairedTest | None) -> ReproducedView:
    columns = [column for column in seeds[0] if column != "average"]
    return {
        "average": spread([cells["average"] for cells in seeds]),
        "worst": spread([min(cells[column] for column in columns or ["average"]) for cells in seeds]),
        "columns": {column: spread([cells[column] for cells in seeds]) for column in columns},
        "test": test,
    }


def _curve(runs: Iterable[Run], view: View, value: str) -> list[tuple[int, float]]:
    """The table's measure of accuracy after each evaluated round, over seeds and conditions."""
    by_round: dict[int, list[float]] = {}
    for run in runs:
        for number, figure in curve_of_run(run, view, value):
            by_round.setdefault(number, []).append(figure)
    return [(number, mean(values)) for number, values in sorted(by_round.items())]

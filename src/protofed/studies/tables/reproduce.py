"""The papers' tables, run again or computed, with the paper's figures beside ours."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from protofed.data import load, make_partition
from protofed.errors import UserError
from protofed.registry import find_method, knobs
from protofed.runs.options import make_options
from protofed.runs.results import Run
from protofed.studies.compare import compare
from protofed.studies.comparison import Failure
from protofed.studies.statistics import paired_tests, spread
from protofed.studies.tables.estimate import Estimate, estimate_row
from protofed.studies.tables.fixtures import fixture
from protofed.studies.tables.leakage import leakage
from protofed.studies.tables.preset import SCALES, Preset, Row, Scale, View, find_preset, listed
from protofed.studies.tables.reproduction import Reproduction
from protofed.studies.tables.traffic import traffic
from protofed.system import one_thread, write_atomically

_VIEWS: tuple[View, ...] = ("global", "personal")

Runs = dict[str, dict[str, dict[int, Run]]]
"""The complete runs of a data set, by row, condition and seed."""

Cells = dict[str, float]
"""One row for one seed: its columns, and `average`."""


def reproduce(
    name: str,
    *,
    out: str | Path | None = None,
    scale: str = "lite",
    datasets: str | Sequence[str] | None = None,
    methods: str | Sequence[str] | None = None,
    columns: str | Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    shard: str | None = None,
    callbacks: Iterable[Any] = (),
    **options: Any,
) -> Reproduction:
    """Run or compute a table or figure, such as `i2pfl.table2`, and write comparison.json and comparison.md to `out`.

    `methods` are rows of the table, by title or by method; `columns` some of those that take runs of their own, such as
    `alpha=0.1`. The options are those of `run` and go before what the preset
    says. Runs that are found in `out` are not repeated.
    """
    preset, given = find_preset(name), _given(options)
    at = preset.scale_of(_scale(scale))
    rows = preset.selected_rows(listed(methods))
    chosen = preset.selected_datasets(listed(datasets))
    taken: list[int] = []
    failures: list[Failure] = []
    if preset.trains:
        if out is None:
            raise UserError(f"{name} trains, so it needs --out, the folder of its runs; --dry-run says what it takes")
        taken = list(dict.fromkeys(seeds if seeds is not None else preset.seeds[at]))
        training = _Training(preset, at, rows, listed(columns), taken, given, shard, list(callbacks))
        blocks = {dataset: training.block(dataset, Path(out) / dataset) for dataset in chosen}
        failures = training.failures
    else:
        compute = {"parameters": _parameters, "traffic": _traffic, "partition": _partition}[preset.kind]
        with one_thread():
            blocks = {dataset: compute(preset, at, dataset, rows, given) for dataset in chosen}
    content = {
        "preset": preset.name,
        "title": preset.title,
        "scale": at,
        "seeds": taken,
        "methods": listed(methods),
        "columns": listed(columns),
        "options": given,
        "baseline": preset.baseline,
        "notes": preset.notes,
        "datasets": blocks,
    }
    result = Reproduction(preset, content, failures)
    if out is not None:
        Path(out).mkdir(parents=True, exist_ok=True)
        write_atomically(Path(out) / "comparison.json", json.dumps(content, indent=2).encode() + b"\n")
        write_atomically(Path(out) / "comparison.md", result.markdown().encode())
    return result


def dry_run(
    name: str,
    *,
    scale: str = "lite",
    datasets: str | Sequence[str] | None = None,
    methods: str | Sequence[str] | None = None,
    columns: str | Sequence[str] | None = None,
    **options: Any,
) -> list[Estimate]:
    """Build every row of a table on generated images, let a client train on one batch, and estimate what a run takes.

    A table that is only about data is tried with fedavg.
    """
    preset, at, given = find_preset(name), _scale(scale), _given(options)
    with one_thread():
        return [
            estimate_row(
                preset,
                row,
                dataset,
                at,
                _options_of(preset, row, dataset, at, given),
                runs=len(preset.selected_conditions(dataset, at, listed(columns))),
            )
            for dataset in preset.selected_datasets(listed(datasets))
            for row in preset.selected_rows(listed(methods)) or [Row(method="fedavg")]
        ]


class _Training:
    """The runs of a table, and what they amount to."""

    def __init__(
        self,
        preset: Preset,
        scale: Scale,
        rows: list[Row],
        columns: list[str] | None,
        seeds: list[int],
        given: dict[str, Any],
        shard: str | None,
        callbacks: list[Any],
    ) -> None:
        self.failures: list[Failure] = []
        self._preset = preset
        self._scale = scale
        self._rows = rows
        self._chosen = columns
        self._seeds = seeds
        self._given = given
        self._shard = shard
        self._callbacks = callbacks

    def block(self, dataset: str, folder: Path) -> dict[str, Any]:
        """One data set of the table, trained."""
        runs: Runs = {row.title: {} for row in self._rows}
        conditions = self._preset.selected_conditions(dataset, self._scale, self._chosen)
        for condition, settings in conditions.items():
            for title, done in self._compare(dataset, settings, folder / _slug(condition)).items():
                runs[title][condition] = done
        views = {view: self._view(runs, view, dataset) for view in _VIEWS}
        return {
            "methods": {
                row.title: {
                    "method": row.method,
                    "settings": row.set,
                    **{view: views[view].get(row.title) for view in _VIEWS},
                    **_costs([run for done in runs[row.title].values() for run in done.values()]),
                    "leakage": self._leakage(runs[row.title]),
                    "curve": _curve(runs[row.title], self._view_of(row, views), self._preset.value),
                    "paper": self._paper(row, dataset, self._view_of(row, views)),
                    "runs": {
                        condition: [str(run.path.relative_to(folder.parent)) for run in done.values()]
                        for condition, done in runs[row.title].items()
                    },
                }
                for row in self._rows
            }
        }

    def _view_of(self, row: Row, views: Mapping[View, Mapping[str, Any]]) -> View:
        """Where the row's figures belong: in its own view, unless it has only the table's first one here."""
        first = self._preset.views[0]
        own = row.view or first
        return first if row.title in views[first] and row.title not in views[own] else own

    def _leakage(self, by_condition: Mapping[str, Mapping[int, Run]]) -> dict[str, Any] | None:
        """What an attacker rebuilds, where that is the table's question."""
        if self._preset.kind != "leakage":
            return None
        return leakage([run for done in by_condition.values() for run in done.values()])

    def _compare(self, dataset: str, condition: Mapping[str, str], folder: Path) -> dict[str, dict[int, Run]]:
        """All rows under one condition, for every seed."""
        preset = self._preset
        options = preset.run_options(dataset, self._scale, condition, self._given)
        named = preset.suite.data[dataset].preset
        if named is not None and any(named in find_method(row.method).presets for row in self._rows):
            options.setdefault("preset", named)
        titles = [row.title for row in self._rows]
        result = compare(
            {row.title: {"method": row.method, "set": row.set, **row.options} for row in self._rows},
            out=folder,
            seeds=self._seeds,
            baseline=preset.baseline if preset.baseline in titles else None,
            shard=self._shard,
            paper=self._papers(dataset),
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

    def _view(self, runs: Runs, view: View, dataset: str) -> dict[str, Any]:
        """Mean, spread and paired test of every row that has this view."""
        found: dict[str, dict[int, Cells]] = {}
        for title, by_condition in runs.items():
            complete = set.intersection(*(set(done) for done in by_condition.values()))
            cells = {
                seed: self._cells({condition: done[seed] for condition, done in by_condition.items()}, view, dataset)
                for seed in self._seeds
                if seed in complete
            }
            there = {seed: row for seed, row in cells.items() if row is not None}
            if there:
                found[title] = there
        averages = {title: {seed: row["average"] for seed, row in cells.items()} for title, cells in found.items()}
        tests = paired_tests(averages, self._preset.baseline)
        return {title: {**_spreads(list(cells.values())), "test": tests.get(title)} for title, cells in found.items()}

    def _cells(self, by_condition: Mapping[str, Run], view: View, dataset: str) -> Cells | None:
        """The columns of one row for one seed, and their average; None where the method has no such view."""
        seen = {condition: run.summary["accuracy"][view] for condition, run in by_condition.items()}
        if any(accuracy is None for accuracy in seen.values()):
            return None
        value = self._preset.value
        values = {condition: _value(by_condition[condition], accuracy, value) for condition, accuracy in seen.items()}
        if self._preset.over is not None:
            return {**values, "average": mean(values.values())}
        parts = self._columns(dataset) if view == "global" else []
        return {**{part: seen[""][part] for part in parts}, "average": values[""]}

    def _columns(self, dataset: str) -> list[str]:
        """Of the table, besides the average."""
        if self._preset.over is not None:
            return list(self._preset.conditions(dataset, self._scale))
        return self._preset.domains(dataset, self._scale) if self._preset.per_domain else []

    def _paper(self, row: Row, dataset: str, view: View) -> dict[str, Any] | None:
        """The paper's figures as fractions, by the view they belong to and column."""
        if self._preset.kind == "leakage":
            return {"leakage": dict(zip(self._preset.columns, row.figures.get(dataset, ()), strict=False))}
        figures = [round(figure / 100, 6) for figure in row.figures.get(dataset, ())]
        if not figures:
            return None
        names = ["average"] if len(figures) == 1 else [*self._columns(dataset), "average"][: len(figures)]
        named = dict(zip(names, figures, strict=True))
        if self._chosen:  # the paper's average is over all columns
            named = {name: named[name] for name in self._chosen if name in named}
        paper: dict[str, Any] = {view: named}
        if dataset in row.spread:
            paper["std"] = round(row.spread[dataset] / 100, 6)
        return paper

    def _papers(self, dataset: str) -> dict[str, dict[str, float]]:
        """The same for a comparison, which has a run's own columns: those of its domains."""
        if self._preset.over is not None or self._preset.value != "average":
            return {}
        view = self._preset.views[0]
        papers = {row.title: self._paper(row, dataset, row.view or view) for row in self._rows}
        return {title: paper[view] for title, paper in papers.items() if paper is not None and view in paper}


def _scale(name: str) -> Scale:
    if name not in SCALES:
        raise UserError(f"scale={name} is not valid; it is {' or '.join(SCALES)}")
    return "paper" if name == "paper" else "lite"


def _given(options: Mapping[str, Any]) -> dict[str, Any]:
    """The user's options, checked, in the form in which they are merged."""
    given = {key: value for key, value in options.items() if value is not None}
    return {**given, "set": make_options(given).set}


def _options_of(preset: Preset, row: Row, dataset: str, scale: Scale, given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of one row under its first condition, as `run` takes them."""
    condition = next(iter(preset.conditions(dataset, scale).values()))
    options = preset.run_options(dataset, scale, condition, given, row.options, {"set": row.set})
    cls = find_method(row.method)
    known = {knob.name for knob in knobs(cls)}
    settings = {key.removeprefix(f"{row.method}."): value for key, value in options["set"].items()}
    options["set"] = {
        key: value for key, value in settings.items() if key in known or key.startswith(("model.", "data."))
    }
    named = preset.suite.data[dataset].preset
    return {"preset": named, **options} if named in cls.presets else options


def _slug(condition: str) -> str:
    return re.sub(r"[^\w.=-]+", "-", condition)


def _value(run: Run, accuracy: Mapping[str, Any], value: str) -> float:
    """What stands for a run; clients have no domain left out, and are averaged."""
    if value == "pooled" and value not in accuracy:
        return _pooled(run, accuracy)
    found = accuracy.get(value, accuracy["average"])
    return mean(found.values()) if isinstance(found, Mapping) else float(found)


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


def _spreads(seeds: Sequence[Cells]) -> dict[str, Any]:
    columns = [column for column in seeds[0] if column != "average"]
    return {
        "average": spread([cells["average"] for cells in seeds]),
        "worst": spread([min(cells[column] for column in columns or ["average"]) for cells in seeds]),
        "columns": {column: spread([cells[column] for cells in seeds]) for column in columns},
    }


def _costs(runs: Sequence[Run]) -> dict[str, Any]:
    """Bytes and seconds of a run, on average; None before there is one."""
    summaries = [run.summary for run in runs]
    if not summaries:
        return {"bytes": None, "seconds": None}
    kinds = summaries[0]["bytes"]["up"]
    return {
        "bytes": {
            way: {kind: mean(each["bytes"][way][kind] for each in summaries) for kind in kinds}
            for way in ("up", "down")
        },
        "seconds": mean(each["seconds"]["total"] for each in summaries),
    }


def _curve(by_condition: Mapping[str, Mapping[int, Run]], view: View, value: str) -> list[tuple[int, float]]:
    """The table's measure of accuracy after each evaluated round, over seeds and conditions."""
    seen: dict[int, list[float]] = {}
    for run in (run for done in by_condition.values() for run in done.values()):
        for record in run.rounds:
            accuracy = record["accuracy"] and record["accuracy"][view]
            if accuracy:
                seen.setdefault(record["round"], []).append(_value(run, accuracy, value))
    return [(number, mean(values)) for number, values in sorted(seen.items())]


def _parameters(
    preset: Preset, scale: Scale, dataset: str, rows: list[Row], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Numbers that a client which holds every class sends in a round, without sample counts and headers."""

    def of(row: Row) -> int:
        options = _options_of(preset, row, dataset, scale, {**given, "rounds": 1})
        with fixture(preset, dataset, scale, row.method, options) as ready:
            sent = traffic(ready.assembly, {next(iter(ready.sizes)): 1}).up
        return (sent.weights + sent.prototypes + sent.features) // 4

    columns = ["method", "parameters", "paper"]
    return {"columns": columns, "rows": [[row.title, of(row), _figure(row, dataset, 0)] for row in rows]}


def _traffic(preset: Preset, scale: Scale, dataset: str, rows: list[Row], given: Mapping[str, Any]) -> dict[str, Any]:
    """Gigabytes of all messages of a run: as the paper counts, and every byte."""

    def of(row: Row) -> list[Any]:
        options = _options_of(preset, row, dataset, scale, given)
        with fixture(preset, dataset, scale, row.method, options) as ready:
            sent = traffic(ready.assembly, ready.sizes)
            rounds = ready.assembly.context.plan.rounds
        counted = sum(way.weights + way.features for way in (sent.up, sent.down)) / 1e9
        exact = (sent.up.total + sent.down.total) / 1e9
        printed = [_figure(row, dataset, preset.columns.index(column)) for column in ("GB", "accuracy")]
        return [row.title, rounds, round(counted, 3), round(exact, 3), *printed]

    columns = ["method", "rounds", "GB as counted there", "GB exactly", "paper", "paper's accuracy in %"]
    return {"columns": columns, "rows": [of(row) for row in rows]}


def _partition(
    preset: Preset, scale: Scale, dataset: str, _rows: list[Row], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Who holds how many images of each class."""
    options = make_options(preset.run_options(dataset, scale, given))
    data = load(options.data, data_root=options.data_root, domains=options.domains, labels=options.labels)
    partition = make_partition(
        data,
        options.protocol,
        clients=options.clients,
        fraction=options.fraction,
        samples_per_client=options.samples_per_client,
        seed=options.seed,
        holdout=0,
    )
    found = partition.rows(data.pooled_labels(), data.classes)
    columns = ["client", "train", *data.classes]
    return {"columns": columns, "rows": [[row[column] for column in columns] for row in found]}


def _figure(row: Row, dataset: str, column: int) -> float | None:
    figures = row.figures.get(dataset, [])
    return figures[column] if column < len(figures) else None

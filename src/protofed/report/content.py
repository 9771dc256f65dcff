"""What a folder holds, in one form: a run is a comparison of one method, a reproduction several comparisons."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from protofed.errors import UserError
from protofed.metrics import ACCURACY
from protofed.runs.health import RunWarning, diagnose
from protofed.runs.opened import CachedRun, Run
from protofed.runs.summary import mean_of_last
from protofed.studies.chance import chance_of
from protofed.studies.comparison import Comparison, differing_views, summarise
from protofed.studies.schema import (
    VIEWS,
    ChanceView,
    ReproducedMethod,
    ReproductionContent,
    View,
    is_reproduction,
    is_trained,
    read_comparison,
)
from protofed.text import Table

Kind = Literal["run", "comparison", "reproduction"]

_MOST_CLIENT_COLUMNS = 12
_PARTS_OF_A_ROUND = ("train", "aggregate", "evaluate")


class ReportedRun(CachedRun):
    """A run of the page; one that is not complete is summed up as far as it has come."""

    @cached_property
    def summary(self) -> dict[str, Any]:
        """summary.json, or the same figures of the rounds so far."""
        if self.complete:
            return super().summary
        rounds = self.rounds
        return {
            "accuracy": mean_of_last(rounds),
            "bytes": {
                way: {kind: sum(record["bytes"][way][kind] for record in rounds) for kind in rounds[0]["bytes"][way]}
                for way in ("up", "down")
            },
            "seconds": {
                part: sum(record["seconds"][part] for record in rounds) for part in (*_PARTS_OF_A_ROUND, "total")
            },
            "warnings": self.outcome_warnings,
        }

    @cached_property
    def outcome_warnings(self) -> list[RunWarning]:
        """What a reader must know before the figures, also while the run goes on."""
        if self.complete and "warnings" in super().summary:
            return list(super().summary["warnings"])
        return diagnose(self.config, self.rounds)


@dataclass(frozen=True)
class MethodScores:
    """A method in one view; every figure has mean, std and seeds."""

    columns: Mapping[str, Any]
    average: Mapping[str, Any]
    worst: Mapping[str, Any] | None
    test: Mapping[str, Any] | None
    paper: Mapping[str, float]
    convergence: Mapping[str, Any] | None
    """Rounds and bytes to the target, the round it settled in, its fluctuation; None where they are not known."""


@dataclass(frozen=True)
class ScoreView:
    """Accuracies of one kind: of the server's model, or of what each client would use."""

    name: str
    columns: list[str]
    held_out: list[str]
    rows: dict[str, MethodScores]
    average: str = "average"
    """What the last column is called."""
    chance: Mapping[str, float] = field(default_factory=dict)
    """What a model that has learned nothing would reach in each column, where that is known."""

    @property
    def title(self) -> str:
        """What was scored."""
        return "the server's model" if self.name == "global" else "the model each client would use"


@dataclass(frozen=True)
class Cost:
    """Of one run of a method, on average."""

    bytes: Mapping[str, Mapping[str, float]]
    seconds: Mapping[str, float]
    memory: float | None


@dataclass(frozen=True)
class MethodGroup:
    """Methods that were compared under the same conditions."""

    title: str
    baseline: str | None
    seeds: list[int]
    methods: list[str]
    views: list[ScoreView]
    runs: dict[str, list[ReportedRun]]
    missing: list[str] = field(default_factory=list)
    target: Mapping[str, float | None] = field(default_factory=dict)
    metric: str = ACCURACY
    """What `by_metric` is about."""
    by_metric: Mapping[str, Any] = field(default_factory=dict)
    """Per method and view its figures by the chosen metric, from the predictions that runs kept."""

    @property
    def all_runs(self) -> list[ReportedRun]:
        """All runs."""
        return [run for runs in self.runs.values() for run in runs]

    @property
    def over_seeds(self) -> bool:
        """Whether figures are means over several seeds."""
        return len(self.seeds) > 1

    @property
    def over_rounds(self) -> bool:
        """Whether accuracies are means over the last rounds, and so others than those of the final model."""
        summaries = [run.summary for run in self.all_runs if run.rounds]
        return any(each["accuracy"] != each.get("accuracy_final", each["accuracy"]) for each in summaries)

    @property
    def costs(self) -> dict[str, Cost]:
        """Of every method that has a round."""
        return {
            name: _cost(begun) for name, runs in self.runs.items() if (begun := [run for run in runs if run.rounds])
        }


@dataclass(frozen=True)
class ReportContent:
    """Everything a page is made of."""

    folder: Path
    kind: Kind
    title: str
    comparison: Mapping[str, Any]
    """comparison.json; empty for a run."""
    groups: list[MethodGroup]
    tables: list[Table] = field(default_factory=list)
    """Figures that were computed rather than trained."""
    notes: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    """What whoever writes the page wants its readers to know."""

    @property
    def all_runs(self) -> list[ReportedRun]:
        """All runs."""
        return [run for group in self.groups for run in group.all_runs]

    @property
    def complete(self) -> bool:
        """Whether nothing is left to be done."""
        return not any(group.missing for group in self.groups) and all(run.complete for run in self.all_runs)


def read(folder: str | Path) -> ReportContent:
    """A run, a comparison or a reproduction, complete or not."""
    path = Path(folder)
    if not path.is_dir():
        raise UserError(f"there is no folder {path}; give the folder of a run, a comparison or a reproduction")
    if Run(path).begun:
        return _read_run(path)
    if (path / "comparison.json").exists():
        content = read_comparison(path)
        return _read_reproduction(path, content) if is_reproduction(content) else _read_comparison(path)
    parts = sorted([*path.glob("*/comparison.json"), *path.glob("*/*/comparison.json")])
    if parts:
        groups = [_comparison(Comparison.read(each.parent), str(each.parent.relative_to(path))) for each in parts]
        return ReportContent(path, "reproduction", f"{path.name}, not complete", {}, groups)
    raise UserError(
        f"{path} holds neither run.json nor comparison.json nor sweep.json; give the --out of a run, a comparison or a "
        "sweep"
    )


def _read_run(path: Path) -> ReportContent:
    run = ReportedRun(path)
    run.refuse_damaged()
    name = run.config["method"]["name"]
    entry: dict[str, Any] = {}
    metric = run.options.get("metric", ACCURACY)
    if run.evaluated:
        entry = summarise({name: {run.seed: run}}, name, None, {}, path, metric)["methods"]
    chance = {view: chance_of([run], view) for view in VIEWS}
    views = [view for view in _views(entry, [name], chance) if view.name in differing_views(entry)]
    notes = [] if run.complete else [f"{len(run.rounds)} of {run.planned_rounds} rounds are done"]
    data = run.config["data"]["name"]
    group = MethodGroup(
        data, None, [run.seed], [name], views, {name: [run]}, notes, metric=metric, by_metric=_by_metric(entry)
    )
    return ReportContent(path, "run", f"{name} on {data}", {}, [group])


def _read_comparison(path: Path) -> ReportContent:
    comparison = Comparison.read(path)
    data = Path(comparison.content["options"]["data"]).stem
    group = _comparison(comparison, data)
    return ReportContent(path, "comparison", f"{_listed(group.methods)} on {data}", comparison.content, [group])


def _comparison(comparison: Comparison, title: str) -> MethodGroup:
    path, content = comparison.path, comparison.content
    methods = list(content["methods"])
    runs: dict[str, list[ReportedRun]] = {
        name: [ReportedRun(path / each) for each in entry["runs"]] for name, entry in content["methods"].items()
    }
    for entry in content["missing"]:
        run = ReportedRun(path / entry["run"])
        if run.begun:
            runs[entry["method"]].append(run)
    scored = comparison.views()
    views = [view for view in _views(content["methods"], methods, content.get("chance", {})) if view.name in scored]
    return MethodGroup(
        title,
        content["baseline"],
        content["seeds"],
        methods,
        views,
        runs,
        comparison.missing(),
        content["target"],
        content.get("metric", ACCURACY),
        _by_metric(content["methods"]),
    )


def _by_metric(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Of every method; None for those of a comparison from before there were metrics."""
    return {name: entry.get("by_metric") for name, entry in entries.items()}


def _views(
    entries: Mapping[str, Any], methods: Sequence[str], chance: Mapping[View, ChanceView | None]
) -> list[ScoreView]:
    """The views that some method has, from entries as in comparison.json."""
    views = []
    for name in VIEWS:
        scores = {method: entries[method][name] for method in methods if entries.get(method, {}).get(name) is not None}
        if scores:
            papers = {method: entries[method]["paper"] for method in scores}
            views.append(_view(name, scores, papers, chance.get(name)))
    return views


def _view(name: str, scores: Mapping[str, Any], papers: Mapping[str, Any], chance: ChanceView | None) -> ScoreView:
    first = next(iter(scores.values()))
    by_domain = bool(first["per_domain"])
    clients = first["per_client"] if len(first["per_client"]) <= _MOST_CLIENT_COLUMNS else {}
    columns, held_out = list(first["per_domain"] if by_domain else clients), list(first["held_out"])
    rows = {
        method: MethodScores(
            {**entry["per_domain" if by_domain else "per_client"], **entry["held_out"]},
            entry["average"],
            entry["worst_domain" if by_domain else "worst_client"],
            entry["test"],
            _figures(papers[method]) if papers[method] and papers[method]["view"] == name else {},
            entry,
        )
        for method, entry in scores.items()
    }
    return ScoreView(name, columns, held_out, rows, chance=_chance_of_columns(chance, by_domain))


def _chance_of_columns(chance: ChanceView | None, by_domain: bool) -> dict[str, float]:
    """Chance by the name of a column."""
    if chance is None:
        return {}
    return {
        **chance["per_domain" if by_domain else "per_client"],
        **chance["held_out"],
        "average": chance["average"],
    }


def _figures(paper: Mapping[str, Any]) -> dict[str, float]:
    """The numbers among what is said about a paper."""
    return {key: value for key, value in paper.items() if isinstance(value, float | int)}


def _read_reproduction(path: Path, content: ReproductionContent) -> ReportContent:
    groups, tables = [], []
    for dataset, block in content["datasets"].items():
        if is_trained(block):
            groups.append(_reproduced(path, content, dataset, block["methods"]))
        else:
            tables.append(Table(dataset, block["columns"], block["rows"]))
    title = f"{content['preset']}: {content['title']}"
    return ReportContent(path, "reproduction", title, content, groups, tables, list(content["notes"]))


def _reproduced(
    path: Path, content: ReproductionContent, dataset: str, entries: Mapping[str, ReproducedMethod]
) -> MethodGroup:
    views = [view for name in VIEWS if (view := _reproduced_view(name, entries)) is not None]
    runs = {
        method: [ReportedRun(path / each) for paths in entry["runs"].values() for each in paths]
        for method, entry in entries.items()
    }
    missing = [f"{method} has no complete run" for method, listed in runs.items() if not listed]
    baseline = content["baseline"] if content["baseline"] in entries else None
    return MethodGroup(dataset, baseline, content["seeds"], list(entries), views, runs, missing)


def _reproduced_view(name: str, entries: Mapping[str, Any]) -> ScoreView | None:
    """One view of a reproduction; None where no method has it."""
    rows = {
        method: MethodScores(
            scores["columns"],
            scores["average"],
            scores["worst"] if scores["columns"] else None,
            scores["test"],
            (entry["paper"] or {}).get(name, {}),
            None,
        )
        for method, entry in entries.items()
        if (scores := entry[name]) is not None
    }
    return ScoreView(name, list(next(iter(rows.values())).columns), [], rows) if rows else None


def _cost(runs: Sequence[ReportedRun]) -> Cost:
    """Of complete runs where there are any."""
    summaries = [run.summary for run in ([run for run in runs if run.complete] or runs)]
    memory = [each["peak_memory_bytes"] for each in summaries if "peak_memory_bytes" in each]
    return Cost(
        {
            way: {kind: _mean([each["bytes"][way][kind] for each in summaries]) for kind in kinds}
            for way, kinds in summaries[0]["bytes"].items()
        },
        {part: _mean([each["seconds"][part] for each in summaries]) for part in (*_PARTS_OF_A_ROUND, "total")},
        _mean(memory) if memory else None,
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _listed(names: Sequence[str], most: int = 4) -> str:
    if len(names) > most:
        return f"{len(names)} methods"
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"

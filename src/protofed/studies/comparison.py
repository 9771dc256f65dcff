"""Results of a comparison: comparison.json from the runs that are complete, and tables of it."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from protofed.errors import UserError
from protofed.metrics import ACCURACY, find_metric
from protofed.pages.drawing import Drawing
from protofed.pages.notebook import frame
from protofed.runs.health import line_of
from protofed.runs.opened import Run
from protofed.studies.chance import chance_of, warnings_of
from protofed.studies.convergence import Convergence
from protofed.studies.display import By, comparison_html, comparison_line, comparison_rows, draw_comparison
from protofed.studies.metrics import compare_metric, metric_table
from protofed.studies.schedule import Failure
from protofed.studies.schema import (
    VIEWS,
    AccuracyOverSeeds,
    BytesByKind,
    ComparedMethod,
    ComparedView,
    ComparisonContent,
    ComparisonSummary,
    View,
    WorstSpread,
    is_reproduction,
    read_comparison,
)
from protofed.studies.statistics import PairedTest, PartialSpread, Spread, paired_tests, partial_spread, spread
from protofed.text import Table, p_value, percent, size

_NOT_PARTS = ("average", "pooled", "held_out", "quantiles")

Parts = Mapping[str, float]
"""Accuracy of each part of one view: domains or clients."""


class Comparison:
    """The content of comparison.json, and tables of it."""

    def __init__(self, path: Path, content: ComparisonContent, failures: Sequence[Failure] = ()) -> None:
        self.path = path
        self.content = content
        self.failures = tuple(failures)
        """What went wrong this time; the other runs are there all the same."""

    @classmethod
    def read(cls, path: str | Path) -> "Comparison":
        """The comparison in a folder."""
        content = read_comparison(Path(path))
        if is_reproduction(content):
            raise UserError(f"{path} holds a table of a paper, not a comparison")
        return cls(Path(path), content)

    def accuracy_table(self, view: View) -> Table:
        """Accuracy in one view; methods for which it makes no sense are left out."""
        title = f"Accuracy (%), {view} view"
        methods = self._views_of_methods(view)
        if not methods:
            return Table(title, [], [])
        first = next(iter(methods.values()))
        domains, held_out = list(first["per_domain"]), list(first["held_out"])
        papers = {name: _papers_average(self.content["methods"][name], view) for name in methods}
        shows_paper = any(value is not None for value in papers.values())
        rows = [
            [
                name,
                *(percent(scores["per_domain"][domain]["mean"]) for domain in domains),
                *(percent(scores["held_out"][domain]["mean"]) for domain in held_out),
                percent(scores["average"]["mean"]),
                percent(scores["average"]["std"]),
                *([percent(papers[name])] if shows_paper else []),
                _worst_mean(scores["worst_domain" if domains else "worst_client"]),
                *_test_cells(scores["test"]),
            ]
            for name, scores in methods.items()
        ]
        columns = ["method", *domains, *(f"{domain} (held out)" for domain in held_out), "average", "std"]
        columns += [*(["paper"] if shows_paper else []), "worst domain" if domains else "worst client"]
        columns += [f"vs {self.content['baseline']}", "p (Holm)"]
        chance = self.content.get("chance", {}).get(view)
        if chance is not None:
            parts = [*(chance["per_domain"].get(name) for name in domains), *map(chance["held_out"].get, held_out)]
            cells = ["chance", *map(percent, parts), percent(chance["average"])]
            rows.append([*cells, *["-"] * (len(columns) - len(cells))])
        return Table(title, columns, rows)

    def table(self, view: View | None = None) -> Any:
        """A row per method, accuracies as fractions; a DataFrame if pandas is installed, else a list of dicts."""
        return frame(comparison_rows(self, view))

    def plot(self, view: View | None = None, by: By = "round") -> Drawing:
        """Average accuracy of every method against rounds, or against bytes (`by="bytes"`)."""
        return draw_comparison(self, view, by)

    def __repr__(self) -> str:
        return f"<Comparison of {comparison_line(self)} in {str(self.path)!r}>"

    def _repr_html_(self) -> str:
        return comparison_html(self)

    def warnings(self) -> list[str]:
        """A line for every problem in a run that has a result."""
        return [
            f"{name}, seed {warning['seed']}: {line_of(warning)}"
            for name, entry in self.content["methods"].items()
            for warning in entry.get("warnings", [])
        ]

    def by_metric(self, view: View) -> Table:
        """The chosen metric in one view, over images and seeds; empty if no run has kept its predictions."""
        metric = find_metric(self.content.get("metric", ACCURACY))
        entries = {name: (entry.get("by_metric") or {}).get(view) for name, entry in self.content["methods"].items()}
        scored = {name: entry for name, entry in entries.items() if entry is not None}
        return metric_table(scored, metric, view, self.content["baseline"])

    def convergence(self, view: View) -> Table:
        """How the runs converged, in one view."""
        rows = [
            [
                name,
                _mean_or_reached(scores["rounds_to_target"], "{:.1f}".format),
                _mean_or_reached(scores["bytes_to_target"], size),
                _mean_or_reached(scores["convergence_round"], "{:.1f}".format),
                percent(scores["fluctuation"]["mean"]),
            ]
            for name, scores in self._views_of_methods(view).items()
        ]
        columns = ["method", "rounds to target", "bytes to target", "convergence round", "fluctuation"]
        return Table(f"Cost of reaching the target, {view} view, {self.target(view)}", columns, rows)

    def target(self, view: View) -> str:
        """The accuracy up to which rounds and bytes are counted."""
        return f"target {percent(self.content['target'][view])} %"

    def costs(self) -> Table:
        """Bytes and seconds of a run of each method."""
        rows = [
            [name, *(size(entry["bytes"][way]["total"]) for way in ("up", "down")), f"{entry['seconds']:.1f} s"]
            for name, entry in self.content["methods"].items()
            if entry["bytes"] is not None
        ]
        return Table("Costs per run", ["method", "sent up", "sent down", "time"], rows)

    def missing(self) -> list[str]:
        """A line for every run without a result."""
        return [f"{entry['method']}, seed {entry['seed']}: {entry['reason']}" for entry in self.content["missing"]]

    def views(self) -> tuple[View, ...]:
        """The views that differ."""
        return differing_views(self.content["methods"])

    def markdown(self) -> str:
        """comparison.md."""
        content = self.content
        seeds = ", ".join(map(str, content["seeds"]))
        blocks = [
            "# Comparison",
            f"Seeds {seeds}; accuracy in %: mean of the last 5 evaluated rounds, averaged over seeds. `vs "
            f"{content['baseline']}` is the mean difference over the same seeds, and p the p-value of a paired "
            "t-test, with Holm's correction for the number of methods in the table. `chance` is the accuracy of "
            "always predicting a test set's most frequent class.",
        ]
        if content["missing"]:
            blocks += ["**Not complete.** Missing:", "\n".join(f"- {line}" for line in self.missing())]
        if warned := self.warnings():
            blocks += ["**Runs with problems.**", "\n".join(f"- {line}" for line in warned)]
        for view in self.views():
            table = self.accuracy_table(view)
            if table.rows:
                blocks += [f"## {view.capitalize()} view", table.markdown()]
                blocks += [f"Cost of reaching the target, {self.target(view)}:", self.convergence(view).markdown()]
            by_metric = self.by_metric(view)
            if by_metric.rows:
                blocks += [f"{by_metric.title}:", by_metric.markdown()]
        blocks += ["## Costs per run", self.costs().markdown()]
        return "\n\n".join(blocks) + "\n"

    def _views_of_methods(self, view: View) -> dict[str, ComparedView]:
        entries = {name: entry[view] for name, entry in self.content["methods"].items()}
        return {name: entry for name, entry in entries.items() if entry is not None}


def differing_views(methods: Mapping[str, ComparedMethod]) -> tuple[View, ...]:
    """The views that differ: with global models and a client per domain both are the same."""
    same = all(
        entry["kind"] == "global"
        and entry["global"]
        and entry["personal"]
        and entry["global"]["per_domain"] == entry["personal"]["per_domain"]
        for entry in methods.values()
    )
    return VIEWS[:1] if methods and same else VIEWS


def summarise(
    runs: Mapping[str, Mapping[int, Run]],
    baseline: str,
    target: float | None,
    paper: Mapping[str, Mapping[str, Any]],
    folder: Path,
    metric: str = ACCURACY,
) -> ComparisonSummary:
    """`target` and `methods` of comparison.json, from the complete runs {method: {seed: run}}."""
    summaries = {name: {seed: run.summary for seed, run in by_seed.items()} for name, by_seed in runs.items()}
    averages = {view: _averages(summaries, view) for view in VIEWS}
    targets: dict[str, float | None] = {
        view: target if target is not None else _mean(averages[view].get(baseline)) for view in VIEWS
    }
    tests = {view: paired_tests(averages[view], baseline) for view in VIEWS}
    by_metric = compare_metric(runs, baseline, find_metric(metric))
    methods: dict[str, ComparedMethod] = {}
    for name, by_seed in runs.items():
        views = _compared_views(by_seed, summaries[name], {view: tests[view].get(name) for view in VIEWS}, targets)
        method = next(iter(by_seed.values())).config["method"] if by_seed else {"kind": None, "knobs": None}
        own = list(summaries[name].values())
        methods[name] = {
            "kind": method["kind"],
            "knobs": method["knobs"],
            "global": views["global"],
            "personal": views["personal"],
            "bytes": mean_bytes(own) if own else None,
            "seconds": mean(each["seconds"]["total"] for each in own) if own else None,
            "paper": dict(paper[name]) if name in paper else None,
            "seeds": list(by_seed),
            "runs": [str(run.path.relative_to(folder)) for run in by_seed.values()],
            "warnings": warnings_of(by_seed),
            "by_metric": by_metric[name],
        }
    every = [run for by_seed in runs.values() for run in by_seed.values()]
    return {"target": targets, "chance": {view: chance_of(every, view) for view in VIEWS}, "methods": methods}


def accuracy_over_seeds(accuracies: Sequence[Mapping[str, Any]], domain_of: Mapping[str, str]) -> AccuracyOverSeeds:
    """One view of several runs that differ in their seed: mean and spread of the average, the parts and the worst part.

    A part that was not scored (a client without test images, a site that was away) is left out.
    `domain_of` tells the domain of a client, in the personal view; the global view is by domain already.
    """
    held_out = list(accuracies[0].get("held_out", {}))
    parts: list[Parts] = [scored_parts(each) for each in accuracies]
    clients = parts if domain_of else [{} for _ in parts]
    domains = [by_domain(each, domain_of) for each in parts] if domain_of else parts
    trained = [{part: value for part, value in each.items() if part not in held_out} for each in domains]
    return {
        "average": spread([each["average"] for each in accuracies]),
        "pooled": spread([each["pooled"] for each in accuracies]) if "pooled" in accuracies[0] else None,
        "per_domain": _spreads(trained),
        "worst_domain": _worst(trained),
        "held_out": _spreads([{part: each[part] for part in held_out} for each in accuracies]),
        "per_client": _spreads(clients),
        "worst_client": _worst(clients),
    }


def mean_bytes(summaries: Sequence[Mapping[str, Any]]) -> BytesByKind:
    """Bytes of a run, on average."""
    return {
        way: {kind: mean(each["bytes"][way][kind] for each in summaries) for kind in kinds}
        for way, kinds in summaries[0]["bytes"].items()
    }


def domains_of_clients(run: Run) -> dict[str, str]:
    """The domain of each client of a run; clients of pooled data have none."""
    return {client: entry["domain"] for client, entry in run.config["partition"]["clients"].items()}


def _averages(summaries: Mapping[str, Mapping[int, Mapping[str, Any]]], view: View) -> dict[str, dict[int, float]]:
    """The average of every method that has the view, by seed."""
    averages = {
        name: {
            seed: float(summary["accuracy"][view]["average"])
            for seed, summary in by_seed.items()
            if (summary["accuracy"] or {}).get(view) is not None
        }
        for name, by_seed in summaries.items()
    }
    return {name: by_seed for name, by_seed in averages.items() if by_seed}


def _mean(averages: Mapping[int, float] | None) -> float | None:
    return mean(averages.values()) if averages else None


def _compared_views(
    runs: Mapping[int, Run],
    summaries: Mapping[int, Mapping[str, Any]],
    tests: Mapping[View, PairedTest | None],
    targets: Mapping[str, float | None],
) -> dict[View, ComparedView | None]:
    """One method in every view; None in a view that it does not have."""
    records = {seed: run.rounds for seed, run in runs.items()}

    def compared(view: View) -> ComparedView | None:
        seeds = [seed for seed, summary in summaries.items() if (summary["accuracy"] or {}).get(view) is not None]
        if not seeds:
            return None
        histories = [Convergence.of(records[seed], view) for seed in seeds]
        domain_of = domains_of_clients(runs[seeds[0]]) if view == "personal" else {}
        return {
            **accuracy_over_seeds([summaries[seed]["accuracy"][view] for seed in seeds], domain_of),
            "test": tests[view],
            "rounds_to_target": partial_spread([each.rounds_to(targets[view]) for each in histories]),
            "bytes_to_target": partial_spread([each.bytes_to(targets[view]) for each in histories]),
            "convergence_round": partial_spread([each.convergence_round() for each in histories]),
            "fluctuation": partial_spread([each.fluctuation() for each in histories]),
        }

    return {view: compared(view) for view in VIEWS}


def scored_parts(accuracy: Mapping[str, Any]) -> dict[str, float]:
    """Domains or clients that were scored."""
    return {part: value for part, value in accuracy.items() if part not in _NOT_PARTS and value is not None}


def by_domain(clients: Mapping[str, float], domain_of: Mapping[str, str]) -> dict[str, float]:
    """The mean over the clients of each domain; empty where clients have no domain or are too many to be listed."""
    grouped: dict[str, list[float]] = {}
    for client, value in clients.items():
        if domain := domain_of.get(client, client):  # one that came late to a run of an earlier version is not listed
            grouped.setdefault(domain, []).append(value)
    return {domain: mean(values) for domain, values in grouped.items()}


def _spreads(parts: Sequence[Parts]) -> dict[str, Spread]:
    """Per part; one that not all seeds have is left out."""
    common = [part for part in parts[0] if all(part in each for each in parts)]
    return {part: spread([each[part] for each in parts]) for part in common}


def _worst(parts: Sequence[Parts]) -> WorstSpread | None:
    """The lowest part of each seed, and which it was."""
    if not all(parts):
        return None
    names = [min(each, key=lambda part: each[part]) for each in parts]
    return {**spread([each[name] for each, name in zip(parts, names, strict=True)]), "names": names}


def _papers_average(entry: ComparedMethod, view: View) -> float | None:
    paper = entry["paper"]
    return paper["average"] if paper is not None and paper["view"] == view else None


def _worst_mean(worst: WorstSpread | None) -> str:
    return percent(None if worst is None else worst["mean"])


def _test_cells(test: PairedTest | None) -> tuple[str, str]:
    """Difference to the baseline in points, and its p-value."""
    if test is None:
        return "-", "-"
    # Adding zero turns a negative zero into a positive one.
    difference = f"{round(100 * test['difference'], 2) + 0.0:+.2f}"
    return difference, p_value(test["p_holm"])


def _mean_or_reached(spread: PartialSpread, form: Callable[[float], str]) -> str:
    """The mean where every seed has a value, else how many have."""
    if spread["mean"] is not None:
        return form(spread["mean"])
    return f"{spread['reached']} of {len(spread['seeds'])} seeds" if spread["reached"] else "-"

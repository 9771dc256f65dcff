"""What a comparison found: comparison.json from the runs that are complete, and tables of it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from protofed.runs.results import Run
from protofed.studies.convergence import Convergence
from protofed.studies.statistics import paired_tests, partial_spread, spread
from protofed.text import markdown_table, percent, size

VIEWS = ("global", "personal")
_NOT_PARTS = ("average", "pooled", "held_out", "quantiles")

Table = tuple[list[str], list[list[str]]]


class Failure(NamedTuple):
    """A run that was tried and ended with an error."""

    title: str
    reason: str
    trace: str


class Comparison:
    """The content of comparison.json, and tables of it."""

    def __init__(self, path: Path, content: dict[str, Any], failures: Sequence[Failure] = ()) -> None:
        self.path = path
        self.content = content
        self.failures = tuple(failures)
        """What went wrong this time; the other runs are there all the same."""

    def table(self, view: str) -> Table:
        """Accuracy in one view; methods for which it makes no sense are left out."""
        methods = self._with(view)
        if not methods:
            return [], []
        first = next(iter(methods.values()))[view]
        domains, held_out = list(first["per_domain"]), list(first["held_out"])
        papers = {name: _papers_average(entry, view) for name, entry in methods.items()}
        shows_paper = any(value is not None for value in papers.values())
        rows = []
        for name, entry in methods.items():
            found, test = entry[view], entry[view]["test"]
            rows.append(
                [
                    name,
                    *(percent(found["per_domain"][domain]["mean"]) for domain in domains),
                    *(percent(found["held_out"][domain]["mean"]) for domain in held_out),
                    percent(found["average"]["mean"]),
                    percent(found["average"]["std"]),
                    *([percent(papers[name])] if shows_paper else []),
                    percent((found["worst_domain" if domains else "worst_client"] or {"mean": None})["mean"]),
                    "-" if test is None else f"{round(100 * test['difference'], 2) + 0.0:+.2f}",
                    "-" if test is None or test["p_holm"] is None else f"{test['p_holm']:.3f}",
                ]
            )
        columns = ["method", *domains, *(f"{domain} (held out)" for domain in held_out), "average", "std"]
        columns += [*(["paper"] if shows_paper else []), "worst domain" if domains else "worst client"]
        return [*columns, f"vs {self.content['baseline']}", "p (Holm)"], rows

    def course(self, view: str) -> Table:
        """How the runs went, in one view."""
        rows = [
            [
                name,
                _reached(entry[view]["rounds_to_target"], lambda value: f"{value:.1f}"),
                _reached(entry[view]["bytes_to_target"], size),
                _reached(entry[view]["convergence_round"], lambda value: f"{value:.1f}"),
                percent(entry[view]["fluctuation"]["mean"]),
            ]
            for name, entry in self._with(view).items()
        ]
        return ["method", "rounds to target", "bytes to target", "convergence round", "fluctuation"], rows

    def target(self, view: str) -> str:
        """Up to where rounds and bytes are counted."""
        return f"target {percent(self.content['target'][view])} %"

    def costs(self) -> Table:
        """Bytes and seconds of a run of each method."""
        rows = [
            [name, *(size(entry["bytes"][way]["total"]) for way in ("up", "down")), f"{entry['seconds']:.1f} s"]
            for name, entry in self.content["methods"].items()
            if entry["bytes"] is not None
        ]
        return ["method", "sent up", "sent down", "time"], rows

    def missing(self) -> list[str]:
        """A line for every run without a result."""
        return [f"{entry['method']}, seed {entry['seed']}: {entry['reason']}" for entry in self.content["missing"]]

    def views(self) -> tuple[str, ...]:
        """Those that say something of their own: with global models and a client per domain both are the same."""
        methods = self.content["methods"].values()
        same = all(
            entry["kind"] == "global"
            and entry["global"]
            and entry["personal"]
            and entry["global"]["per_domain"] == entry["personal"]["per_domain"]
            for entry in methods
        )
        return VIEWS[:1] if methods and same else VIEWS

    def markdown(self) -> str:
        """comparison.md."""
        content = self.content
        seeds = ", ".join(map(str, content["seeds"]))
        blocks = [
            "# Comparison",
            f"Seeds {seeds}; accuracy in %: mean of the last 5 evaluated rounds, averaged over seeds. `vs "
            f"{content['baseline']}` is the mean difference over the same seeds, p that of a paired t-test, corrected "
            "after Holm for the number of methods in the table.",
        ]
        if content["missing"]:
            blocks += ["**Not complete.** Missing:", "\n".join(f"- {line}" for line in self.missing())]
        for view in self.views():
            columns, rows = self.table(view)
            if rows:
                blocks += [f"## {view.capitalize()} view", markdown_table(columns, rows)]
                blocks += [f"On the way, {self.target(view)}:", markdown_table(*self.course(view))]
        blocks += ["## Costs per run", markdown_table(*self.costs())]
        return "\n\n".join(blocks) + "\n"

    def _with(self, view: str) -> dict[str, Any]:
        return {name: entry for name, entry in self.content["methods"].items() if entry[view] is not None}


def summarise(
    runs: Mapping[str, Mapping[int, Run]],
    baseline: str,
    target: float | None,
    paper: Mapping[str, Mapping[str, Any]],
    folder: Path,
) -> dict[str, Any]:
    """`target` and `methods` of comparison.json, from the complete runs {method: {seed: run}}."""
    read = {name: {seed: _Read(run) for seed, run in by_seed.items()} for name, by_seed in runs.items()}
    views = {}
    targets = {}
    for view in VIEWS:
        found = {name: _with_view(by_seed, view) for name, by_seed in read.items()}
        found = {name: by_seed for name, by_seed in found.items() if by_seed}
        targets[view] = target if target is not None else _average(found.get(baseline), view)
        views[view] = _view(found, view, baseline, targets[view])
    methods = {}
    for name, by_seed in read.items():
        listed = list(by_seed.values())
        methods[name] = {
            "kind": listed[0].config["method"]["kind"] if listed else None,
            "knobs": listed[0].config["method"]["knobs"] if listed else None,
            **{view: views[view].get(name) for view in VIEWS},
            "bytes": _mean_bytes(listed) if listed else None,
            "seconds": mean(each.summary["seconds"]["total"] for each in listed) if listed else None,
            "paper": paper.get(name),
            "seeds": list(by_seed),
            "runs": [str(each.path.relative_to(folder)) for each in listed],
        }
    return {"target": targets, "methods": methods}


def accuracy_over_seeds(accuracies: Sequence[dict[str, Any]], domain_of: Mapping[str, str]) -> dict[str, Any]:
    """One view of several runs that differ in their seed: mean and spread of the average, the parts and the worst part.

    A part that was not scored (a client without test images, a site that was away) is left out.
    `domain_of` tells the domain of a client, in the personal view; the global view is by domain already.
    """
    held_out = list(accuracies[0].get("held_out", {}))
    parts = [
        {part: value for part, value in each.items() if part not in _NOT_PARTS and value is not None}
        for each in accuracies
    ]
    clients = [{} if not domain_of else each for each in parts]
    domains = [_by_domain(each, domain_of) if domain_of else each for each in parts]
    seen = [{part: value for part, value in each.items() if part not in held_out} for each in domains]
    return {
        "average": spread([each["average"] for each in accuracies]),
        "pooled": spread([each["pooled"] for each in accuracies]) if "pooled" in accuracies[0] else None,
        "per_domain": _spreads(seen),
        "worst_domain": _worst(seen),
        "held_out": _spreads([{part: each[part] for part in held_out} for each in accuracies]),
        "per_client": _spreads(clients),
        "worst_client": _worst(clients),
    }


class _Read:
    """A complete run, each file read once."""

    def __init__(self, run: Run) -> None:
        self.path = run.path
        self.config, self.summary, self.rounds = run.config, run.summary, run.rounds

    def domain_of(self, view: str) -> dict[str, str]:
        """The domain of each client, where the view is by client; clients of pooled data have none."""
        if view == "global":
            return {}
        return {client: entry["domain"] for client, entry in self.config["partition"]["clients"].items()}


def _with_view(by_seed: Mapping[int, _Read], view: str) -> dict[int, _Read]:
    return {seed: each for seed, each in by_seed.items() if each.summary["accuracy"][view] is not None}


def _average(by_seed: Mapping[int, _Read] | None, view: str) -> float | None:
    if not by_seed:
        return None
    return mean(float(each.summary["accuracy"][view]["average"]) for each in by_seed.values())


def _view(
    found: Mapping[str, Mapping[int, _Read]], view: str, baseline: str, target: float | None
) -> dict[str, dict[str, Any]]:
    """Every method that has this view."""
    averages = {
        name: {seed: float(each.summary["accuracy"][view]["average"]) for seed, each in by_seed.items()}
        for name, by_seed in found.items()
    }
    tests = paired_tests(averages, baseline)
    entries = {}
    for name, by_seed in found.items():
        listed = list(by_seed.values())
        courses = [Convergence.of(each.rounds, view) for each in listed]
        reached = [course.rounds_to(target) if target is not None else None for course in courses]
        spent = [course.bytes_to(target) if target is not None else None for course in courses]
        entries[name] = {
            **accuracy_over_seeds([each.summary["accuracy"][view] for each in listed], listed[0].domain_of(view)),
            "test": tests.get(name),
            "rounds_to_target": partial_spread(reached),
            "bytes_to_target": partial_spread(spent),
            "convergence_round": partial_spread([course.convergence_round() for course in courses]),
            "fluctuation": partial_spread([course.fluctuation() for course in courses]),
        }
    return entries


def _by_domain(clients: Mapping[str, float], domain_of: Mapping[str, str]) -> dict[str, float]:
    """The mean over the clients of each domain; empty where clients have no domain or are too many to be listed."""
    grouped: dict[str, list[float]] = {}
    for client, value in clients.items():
        if domain_of[client]:
            grouped.setdefault(domain_of[client], []).append(value)
    return {domain: mean(values) for domain, values in grouped.items()}


def _spreads(parts: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Per part; one that not all seeds have is left out."""
    common = [part for part in parts[0] if all(part in each for each in parts)]
    return {part: spread([each[part] for each in parts]) for part in common}


def _worst(parts: Sequence[Mapping[str, float]]) -> dict[str, Any] | None:
    """The lowest part of each seed, and which it was."""
    if not all(parts):
        return None
    names = [min(each, key=lambda part: each[part]) for each in parts]
    return {**spread([each[name] for each, name in zip(parts, names, strict=True)]), "names": names}


def _mean_bytes(listed: Sequence[_Read]) -> dict[str, dict[str, float]]:
    first = listed[0].summary["bytes"]
    return {
        way: {kind: mean(each.summary["bytes"][way][kind] for each in listed) for kind in first[way]} for way in first
    }


def _papers_average(entry: Mapping[str, Any], view: str) -> float | None:
    paper = entry["paper"]
    return paper["average"] if paper is not None and paper["view"] == view else None


def _reached(found: Mapping[str, Any], show: Any) -> str:
    """The mean where every seed has a value, else how many have."""
    if found["mean"] is not None:
        return str(show(found["mean"]))
    return f"{found['reached']} of {len(found['seeds'])} seeds" if found["reached"] else "-"

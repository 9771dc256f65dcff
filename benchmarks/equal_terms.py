"""Every method on the same frozen backbone: accuracy, worst domain, bytes, processor time, and epsilon at 90 %.

    python -m benchmarks.equal_terms --data IMAGES/office_caltech10 --out runs/equal-terms [--seeds 0,1,2] [--write]

Closed-form methods send statistics once; the others train the head of EfficientNet-Lite0 for ten rounds of one epoch,
those with adapters or part prototypes train these. Runs that are found in the folder are not repeated. The features of
the backbone, the same for all, are computed before and not counted.
"""

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import log10
from pathlib import Path
from typing import Any

import protofed
from benchmarks import RESULTS, report, table
from protofed.errors import UserError
from protofed.registry import find_method, method_names
from protofed.text import percent, size

OFFICE: dict[str, Any] = {"clients": "caltech=3,amazon=2,webcam=1,dslr=4", "fraction": 0.2}
HEAD: dict[str, Any] = {"train": "head", "views": 1, "rounds": 10, "epochs": 1, "evaluate_every": 1000}
ADAPTERS: dict[str, Any] = {"views": 1, "rounds": 3, "epochs": 2, "evaluate_every": 1000}
WITH_ADAPTERS = ("fedadapter", "fedadapter_noprox", "fedprototypical", "fedadapterproto")
OURS: dict[str, dict[str, Any]] = {
    "protoridge": {},
    "protoridge, sites equal": {"balance": "site"},
    "protoridge, sketch": {"gram": "sketch"},
    "protoridge, sketch of rank 8, sites equal": {"gram": "sketch", "rank": 8, "balance": "site"},
}
NO_ROWS = ("prototune", "protoridge", "centralized")
"""Trains more than the others do; has rows of its own; pools the data."""
LADDER = ("30", "8", "3", "1")
"""Epsilons, tried from above until 90 % are missed."""
GOAL = 0.9
PICTURE = RESULTS.parents[1] / "docs" / "pictures" / "accuracy-by-bytes.svg"
_KINDS: dict[str, tuple[str, ...]] = {
    "protoridge": ("protoridge",),
    "other closed forms": ("fedncm", "fed3r", "fedcgs", "fedcof"),
    "trained": ("",),
}
_COLOURS = {"protoridge": "#c2410c", "other closed forms": "#0f766e", "trained": "#64748b"}
_LOWEST = 80.0
"""Per cent; what lies lower is in the table only."""


@dataclass(frozen=True)
class Outcome:
    """One run."""

    average: float
    worst: float
    up: int
    seconds: float
    """Of the processor."""


def options_of(method: str) -> dict[str, Any]:
    """What a method trains, and for how long; the rate is its own, or one that suits heads."""
    if method in WITH_ADAPTERS:
        return {**OFFICE, **ADAPTERS}
    own_rate = "lr" in find_method(method).run_defaults
    return {**OFFICE, **HEAD, **({} if own_rate else {"lr": 0.03})}


def rows_of(names: Sequence[str]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Name of the row, method, knobs."""
    for row, knobs in OURS.items():
        yield row, "protoridge", knobs
    for name in names:
        yield name, name, {}


def outcome(folder: Path, method: str, data: str, **options: Any) -> Outcome:
    """A run, or what is remembered of it."""
    remembered = folder / "outcome.json"
    if not remembered.exists():
        begun = time.process_time()
        run = protofed.run(method, data, out=folder, engine="loop", **options)
        seconds = time.process_time() - begun
        final = run.summary["accuracy_final"]
        view = final["global"] or final["personal"]
        domains = [value for name, value in view.items() if name not in ("average", "pooled")]
        made = Outcome(view["average"], min(domains), run.summary["bytes"]["up"]["total"], seconds)
        remembered.write_text(json.dumps(asdict(made)))
        print(folder.name, f"{100 * made.average:.2f}", flush=True)
    return Outcome(**json.loads(remembered.read_text()))


def epsilon_at_goal(row: str, method: str, knobs: dict[str, Any], data: str, out: Path) -> str:
    """The smallest epsilon for one image, or else for a whole site, at which a run still has 90 %."""
    if method in WITH_ADAPTERS:
        return "not run"
    options = {**options_of(method), "set": {**knobs, "gram": "none"} if method == "protoridge" else knobs}
    smallest = ""
    for epsilon in LADDER:
        for unit in ("image", "client"):
            guard = f"epsilon={epsilon},delta=1e-5,unit={unit}"
            try:
                found = outcome(out / f"{row}-{epsilon}-{unit}", method, data, **options, guard=guard)
            except UserError:
                continue
            break
        else:
            return "no guard"
        if found.average < GOAL:
            break
        smallest = f"{epsilon}" + (" (site)" if unit == "client" else "")
    return smallest or f"over {LADDER[0]}"


def main(arguments: Sequence[str] | None = None) -> list[list[str]]:
    """Run what is missing, print the table, and on demand write it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.equal_terms", description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="class folders of Office-Caltech-10 at 224 pixels")
    parser.add_argument("--out", required=True, help="the folder of the runs")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--methods", default=",".join(name for name in method_names() if name not in NO_ROWS))
    parser.add_argument("--write", action="store_true", help="write the table to benchmarks/results/equal_terms.md")
    chosen = parser.parse_args(arguments)
    begun, load = time.perf_counter(), os.getloadavg()[0]
    seeds, out = [int(seed) for seed in chosen.seeds.split(",")], Path(chosen.out)
    found, private = {}, {}
    for row, method, knobs in rows_of(chosen.methods.split(",")):
        options = options_of(method)
        found[row] = [
            outcome(out / f"{row}-seed{seed}", method, chosen.data, **options, set=knobs, seed=seed) for seed in seeds
        ]
        private[row] = epsilon_at_goal(row, method, knobs, chosen.data, out)
    best = max(statistics.mean(one.average for one in runs) for runs in found.values())
    rows = [_row(row, runs, best, private[row]) for row, runs in found.items()]
    rows.sort(key=lambda row: -float(row[1]))
    columns = ["method", "average", "std", "worst domain", "behind the best", "up", "CPU s", "epsilon at 90 %"]
    command = f"python -m benchmarks.equal_terms --data OFFICE --out RUNS --seeds {chosen.seeds}"
    body = f"{_settings()}\n\n{table(columns, rows)}"
    page = report("Equal terms: every method on one frozen backbone", command, body, time.perf_counter() - begun, load)
    print(page)
    if chosen.write:
        (RESULTS / "equal_terms.md").write_text(page)
        draw(found, PICTURE)
    return rows


def draw(found: Mapping[str, Sequence[Outcome]], path: Path) -> None:
    """Accuracy over the bytes that a client sends, a dot for each method; names where they can be read."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "protofed"  # the same picture from the same numbers
    from matplotlib import pyplot

    clients = sum(int(part.partition("=")[2]) for part in OFFICE["clients"].split(","))
    figure, panel = pyplot.subplots(figsize=(8, 4.4))
    taken: list[tuple[float, float]] = []
    points = {
        row: (
            statistics.mean(one.up for one in runs) / clients / 1000,
            100 * statistics.mean(one.average for one in runs),
        )
        for row, runs in found.items()
    }
    for row, (kilobytes, accuracy) in sorted(points.items(), key=lambda point: -point[1][1]):
        if not kilobytes:
            continue
        kind = next(kind for kind in _COLOURS if row.startswith(_KINDS[kind]))
        panel.scatter(kilobytes, accuracy, color=_COLOURS[kind], label=kind, zorder=3)
        free = all(abs(log10(kilobytes / x)) > 0.6 or abs(accuracy - y) > 0.9 for x, y in taken)
        if free and accuracy > _LOWEST:
            panel.annotate(row, (kilobytes, accuracy), xytext=(5, 4), textcoords="offset points", fontsize=8)
            taken.append((kilobytes, accuracy))
    panel.set_xscale("log")
    panel.set_ylim(_LOWEST, 98)
    panel.set_xlabel("sent up by a client in all rounds (kB)")
    panel.set_ylabel("accuracy (%), mean of four domains")
    panel.grid(alpha=0.3)
    handles, labels = panel.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    panel.legend(once.values(), once, loc="lower right", fontsize="small")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _row(name: str, runs: Sequence[Outcome], best: float, epsilon: str) -> list[str]:
    averages = [one.average for one in runs]
    middle = statistics.mean(averages)
    return [
        name,
        percent(middle),
        percent(statistics.stdev(averages)) if len(runs) > 1 else "-",
        percent(statistics.mean(one.worst for one in runs)),
        f"{100 * (best - middle):.2f}",
        size(round(statistics.mean(one.up for one in runs))),
        f"{statistics.mean(one.seconds for one in runs):.1f}",
        epsilon,
    ]


def _settings() -> str:
    return (
        "Office-Caltech-10, ten clients with a fifth of their domain each, EfficientNet-Lite0 with ImageNet weights at "
        "224 pixels, frozen. Methods that train: the head, 10 rounds of one epoch, their own rate or 0.03; adapters "
        "and part prototypes: 3 rounds of two epochs. Accuracy in % of the final model (personal ones where a method "
        "has no other), worst domain, bytes that all clients send in all rounds, seconds of the processor without the "
        "features of the backbone. Epsilon: the smallest of 1, 3, 8 and 30 (delta 1e-5, one image, noise at each site, "
        "seed 0) at which 90 % are reached; protoridge with `gram=none`; (site): where only whole sites can be covered."
    )


if __name__ == "__main__":
    main()

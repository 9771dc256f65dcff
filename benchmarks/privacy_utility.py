"""What privacy costs: accuracy against epsilon, of i2pfl for whole clients and of conffedproto for single samples.

    python -m benchmarks.privacy_utility [--seeds 0,1] [--methods i2pfl,conffedproto] [--quick] [--write]

Embedded digits at 16x16 in grey and a small network: noise is added to every number that travels, so small models keep
more of what they learnt. The last line of each method is the same run without a guard.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import protofed
from benchmarks import RESULTS, report, table

COMMON: dict[str, Any] = {
    "data": "digits",
    "domains": "mnist,optdigits",
    "image_size": 16,
    "model": "mlp",
    "engine": "loop",
    "evaluate_every": 1000,
}
SETTINGS = {"data.channels": 1, "model.hidden": 32}


@dataclass(frozen=True)
class Curve:
    """A method, how it is run, and the guards along the curve, the strongest first."""

    method: str
    options: dict[str, Any]
    guards: tuple[str, ...]
    settings: dict[str, Any] = field(default_factory=dict)


CURVES = (
    Curve(
        "i2pfl",
        {"protocol": "iid=20", "rounds": 10, "epochs": 2, "batch": 32, "lr": 0.1},
        tuple(f"unit=client,clip=0.3,row_clip=5,noise={noise}" for noise in (3, 1, 0.3, 0.1, 0.03)),
        # With a network of one hidden layer the paper's weights of the two prototype terms drown the cross-entropy.
        {"lambda_intra": 0.1, "tau": 0.5},
    ),
    Curve(
        "conffedproto",
        {"protocol": "iid=4", "rounds": 5, "epochs": 4, "batch": 256, "lr": 0.5, "momentum": 0.5},
        tuple(f"clip=1,noise={noise},row_noise={4 * noise}" for noise in (8, 4, 2, 1, 0.6)),
    ),
)
QUICK = {"rounds": 1, "epochs": 1, "samples_per_client": 30}


@dataclass(frozen=True)
class Point:
    """One guard: what it promises and what it leaves of the accuracy, for each seed."""

    method: str
    guard: str | None
    unit: str | None
    epsilon: float | None
    accuracy: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.mean(self.accuracy)

    @property
    def told_epsilon(self) -> str:
        """To as many digits as mean something."""
        return "none" if self.epsilon is None else f"{self.epsilon:.{0 if self.epsilon >= 100 else 1}f}"

    def row(self) -> list[str]:
        """As the table has it."""
        each = ", ".join(f"{100 * value:.1f}" for value in self.accuracy)
        return [self.method, self.unit or "-", self.guard or "-", self.told_epsilon, f"{100 * self.mean:.1f}", each]


def measure(curve: Curve, seeds: Sequence[int], **options: Any) -> list[Point]:
    """The points of a curve and, last, the run without a guard."""
    points = []
    for guard in (*curve.guards, None):
        summaries = [_summary(curve, guard, seed=seed, **options) for seed in seeds]
        # Without a guard there is no entry; the promise does not depend on the seed.
        privacy = summaries[0].get("privacy", {})
        views = [summary["accuracy_final"]["global"] or summary["accuracy_final"]["personal"] for summary in summaries]
        accuracy = tuple(view["average"] for view in views)
        points.append(Point(curve.method, guard, privacy.get("unit"), privacy.get("epsilon"), accuracy))
        print(*points[-1].row(), flush=True)
    return points


def _summary(curve: Curve, guard: str | None, **options: Any) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="protofed-benchmark-") as temporary:
        chosen = {**COMMON, **curve.options, **options, "set": {**SETTINGS, **curve.settings}}
        return protofed.run(curve.method, out=Path(temporary) / "run", guard=guard, **chosen).summary


def draw(points: Sequence[Point], path: Path) -> None:
    """Accuracy over epsilon, one panel per method."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "protofed"  # the same picture from the same numbers
    from matplotlib import pyplot

    methods = list(dict.fromkeys(point.method for point in points))
    figure, panels = pyplot.subplots(1, len(methods), figsize=(4.2 * len(methods), 3.2), sharey=True, squeeze=False)
    for panel, method in zip(panels[0], methods, strict=True):
        mine = [point for point in points if point.method == method]
        guarded = [point for point in mine if point.epsilon is not None]
        middle = [100 * point.mean for point in guarded]
        spread = [
            [100 * (point.mean - min(point.accuracy)) for point in guarded],
            [100 * (max(point.accuracy) - point.mean) for point in guarded],
        ]
        panel.errorbar([point.epsilon for point in guarded], middle, yerr=spread, marker="o", capsize=3)
        for point in mine:
            if point.epsilon is None:
                panel.axhline(100 * point.mean, linestyle="--", color="grey", label="without a guard")
        panel.set_xscale("log")
        panel.set_xticks([point.epsilon for point in guarded], [point.told_epsilon for point in guarded])
        panel.minorticks_off()
        panel.set_title(f"{method}, unit: {guarded[0].unit}")
        panel.set_xlabel("epsilon (delta 1e-5)")
        panel.legend(loc="lower right")
    panels[0][0].set_ylabel("accuracy (%)")
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> list[Point]:
    """Measure, print, and on demand write table and picture."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.privacy_utility", description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", default="0,1", help="seeds to average over (default 0,1)")
    parser.add_argument("--methods", default=",".join(curve.method for curve in CURVES), help="default: both")
    parser.add_argument("--quick", action="store_true", help="a round on a few images, to see that it works")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/privacy_utility.md and .svg")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    start, load = time.perf_counter(), os.getloadavg()[0]
    seeds = [int(seed) for seed in given.seeds.split(",")]
    chosen = [curve for curve in CURVES if curve.method in given.methods.split(",")]
    points = [point for curve in chosen for point in measure(curve, seeds, **(QUICK if given.quick else {}))]
    text = table(["method", "unit", "guard", "epsilon", "accuracy", "each seed"], [point.row() for point in points])
    print(f"\n{text}")
    if given.write:
        command = f"python -m benchmarks.privacy_utility --seeds {given.seeds} --methods {given.methods} --write"
        runs = "\n".join(f"- {curve.method}: {_told({**curve.options, **curve.settings})}" for curve in chosen)
        body = f"{_told({**COMMON, **SETTINGS})}\n\n{runs}\n\n{text}\n\n![accuracy over epsilon](privacy_utility.svg)"
        text = report("Accuracy against epsilon", command, body, time.perf_counter() - start, load)
        (RESULTS / "privacy_utility.md").write_text(text)
        draw(points, RESULTS / "privacy_utility.svg")
    return points


def _told(options: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in options.items())


if __name__ == "__main__":
    main()

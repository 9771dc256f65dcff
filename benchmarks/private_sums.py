"""What privacy costs on a pretrained backbone: sums under noise against methods that train, at equal epsilon.

    python -m benchmarks.private_sums --data IMAGES/office_caltech10 --out runs/private [--seeds 5,6,7,8,9] [--write]

Runs that are found in the folder are not repeated. The features of the backbone are computed once and kept in the
user's cache. The settings of protoridge's private form were chosen on seeds 0 to 4, so a fair table takes others.
"""

import argparse
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import protofed
from benchmarks import RESULTS, report, table

FIFTH: dict[str, Any] = {"clients": "caltech=3,amazon=2,webcam=1,dslr=4", "fraction": 0.2}
ALL: dict[str, Any] = {"clients": "caltech=1,amazon=1,webcam=1,dslr=1", "fraction": 1.0}
EPSILONS = ("1", "3", "8")


@dataclass(frozen=True, eq=False)
class Line:
    """A row of the table: a method, who holds what, and the guard beside epsilon and delta."""

    name: str
    method: str
    options: dict[str, Any]
    guard: str = ""
    settings: dict[str, Any] = field(default_factory=dict)

    def guarded(self, epsilon: str | None) -> str | None:
        """The text of the guard; None: none."""
        return None if epsilon is None else f"epsilon={epsilon},delta=1e-5{self.guard}"


_NO_GRAM = {"gram": "none"}
_HEAD = {"train": "head", "rounds": 3, "views": 1}
_STEPS = {**FIFTH, **_HEAD, "lr": 0.5, "batch": 64}
LINES = (
    Line("a fifth, ten sites: noise at each site", "protoridge", FIFTH, settings=_NO_GRAM),
    Line("a fifth, ten sites: noise on the secure sum", "protoridge", FIFTH, ",secure=on", _NO_GRAM),
    Line("all images, four sites: noise at each site", "protoridge", ALL, settings=_NO_GRAM),
    Line("all images, four sites: noise on the secure sum", "protoridge", ALL, ",secure=on", _NO_GRAM),
    Line("a fifth, ten sites: DP-SGD", "fedavg", _STEPS),
    Line("a fifth, ten sites: DP-SGD", "conffedproto", _STEPS),
    Line("a fifth, ten sites: a whole site", "i2pfl", {**FIFTH, **_HEAD, "lr": 0.1}, ",unit=client"),
)


def accuracies(
    line: Line, epsilon: str | None, seeds: Sequence[int], data: str, out: Path, found_only: bool = False
) -> list[float]:
    """Mean over domains, for each seed; a run that is complete is read."""
    found = []
    for seed in seeds:
        guard = "" if epsilon is None else line.guard.replace(",", "-")
        folder = out / f"{line.method}-{line.options['fraction']}{guard}-{epsilon}-{seed}"
        options = {**line.options, "set": line.settings, "seed": seed, "guard": line.guarded(epsilon)}
        done = (folder / "summary.json").exists()
        if found_only and not done:
            continue
        run = protofed.Run(folder) if done else protofed.run(line.method, data, out=folder, **options)
        final = run.summary["accuracy_final"]
        found.append((final["global"] or final["personal"])["average"])
        print(line.method, line.name, line.guarded(epsilon), seed, f"{100 * found[-1]:.1f}", flush=True)
    return found


def main(arguments: Sequence[str] | None = None) -> list[list[str]]:
    """Run what is missing, print the table, and on demand write it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.private_sums", description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="class folders of Office-Caltech-10 at 224 pixels")
    parser.add_argument("--out", required=True, help="the folder of the runs")
    parser.add_argument("--seeds", default="5,6,7,8,9")
    parser.add_argument("--epsilons", default=",".join(EPSILONS))
    parser.add_argument("--methods", default="protoridge,fedavg,conffedproto,i2pfl")
    parser.add_argument("--found", action="store_true", help="make the table of the runs there are, and run nothing")
    parser.add_argument("--write", action="store_true", help="write the table to benchmarks/results/private_sums.md")
    chosen = parser.parse_args(arguments)
    begun, load = time.perf_counter(), os.getloadavg()[0]
    seeds = [int(seed) for seed in chosen.seeds.split(",")]
    epsilons = chosen.epsilons.split(",")
    found = {
        line: [
            accuracies(line, epsilon, seeds, chosen.data, Path(chosen.out), chosen.found)
            for epsilon in (*epsilons, None)
        ]
        for line in LINES
        if line.method in chosen.methods.split(",")
    }
    rows = [[line.method, line.name, *map(_cell, cells)] for line, cells in found.items()]
    columns = ["method", "who, and what is noised", *(f"epsilon {epsilon}" for epsilon in epsilons), "no guard"]
    command = f"python -m benchmarks.private_sums --data OFFICE --out RUNS --seeds {chosen.seeds} --write"
    body = f"{_told()}\n\n{table(columns, rows)}\n\n![accuracy over epsilon](private_sums.svg)"
    page = report("Privacy on a pretrained backbone", command, body, time.perf_counter() - begun, load)
    print(page)
    if chosen.write:
        (RESULTS / "private_sums.md").write_text(page)
        draw(found, epsilons, RESULTS / "private_sums.svg")
    return rows


def draw(found: Mapping[Line, Sequence[Sequence[float]]], epsilons: Sequence[str], path: Path) -> None:
    """Accuracy over epsilon, a line for every row that is complete; bars from the lowest to the highest seed."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "protofed"  # the same picture from the same numbers
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(8, 5))
    places = range(len(epsilons) + 1)
    for line, cells in found.items():
        if not all(cells):
            continue
        middle = [100 * statistics.mean(cell) for cell in cells]
        below = [mean - 100 * min(cell) for mean, cell in zip(middle, cells, strict=True)]
        above = [100 * max(cell) - mean for mean, cell in zip(middle, cells, strict=True)]
        panel.errorbar(places, middle, yerr=[below, above], marker="o", capsize=3, label=f"{line.method}, {line.name}")
    panel.set_xticks(places, [*epsilons, "no guard"])
    panel.set_xlabel("epsilon (delta 1e-5)")
    panel.set_ylabel("accuracy (%)")
    panel.set_ylim(0, 100)
    figure.legend(loc="outside lower center", fontsize="small", ncols=2)
    figure.subplots_adjust(top=0.97, bottom=0.33)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def _cell(accuracy: Sequence[float]) -> str:
    """Mean and, of several, the standard deviation; how many seeds."""
    if not accuracy:
        return "not run"
    mean = f"{100 * statistics.mean(accuracy):.1f}"
    spread = "" if len(accuracy) < 2 else f" ± {100 * statistics.stdev(accuracy):.1f}"
    return f"{mean}{spread} ({len(accuracy)})"


def _told() -> str:
    return (
        "Office-Caltech-10 at 224 pixels, EfficientNet-Lite0 with ImageNet weights, frozen; accuracy in %, mean of "
        "four domains, mean and standard deviation over seeds (their number); delta 1e-5. protoridge: `--set "
        "gram=none`, one exchange. The others: `--train head`, 3 rounds of one epoch. The unit is one "
        "image, but for i2pfl, whose loss couples images: there it is a whole site, which promises more and costs more."
    )


if __name__ == "__main__":
    main()

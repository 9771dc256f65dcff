"""What each method costs: the CPU time of its rounds over that of FedAvg's, both measured in turn in one run.

    python -m benchmarks.method_cost [NAME ...] [--alternations 5] [--prototypes] [--quick] [--write]

A round is broadcast, training, upload, aggregation and checkpoint, without evaluation. Times are taken per sample
trained on, each epoch counted, so methods with a plan of their own and methods that keep a part of the data to
validate on can be compared with the others. `--prototypes` measures what being a prototype method costs where it is
promised: resnet10, ten local epochs, the pass over the images that makes the prototypes included.
"""

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from benchmarks import RESULTS, Ratios, Workload, cpu_seconds, federation, in_turn, report, run_rounds, table
from protofed.federation import Federation
from protofed.registry import method_names

WORK = Workload("resnet10 of width 8", "resnet10", (3, 16, 16), clients=4, samples=64, settings={"model.width": 8})
PROTOTYPES = Workload(
    "resnet10 of width 16", "resnet10", (3, 32, 32), clients=2, samples=256, epochs=10, settings={"model.width": 16}
)
GOALS = {"i2pfl": 1.10, "fedmp": 1.25}
_SETTINGS = {"fedmp_fewshot": {"plan": "1,2,2"}}
"""Where a method's defaults would take minutes."""
_WARM_UP = 1


def measure(name: str, alternations: int, work: Workload = WORK) -> Ratios:
    """CPU time per sample of a method over FedAvg's, round by round after a first one in which nothing is timed.

    The first round also provides what methods use from the second on, such as prototypes.
    """
    rounds = _WARM_UP + alternations
    with (
        federation("fedavg", work, rounds) as fedavg,
        federation(name, work, rounds, set=_SETTINGS.get(name, {})) as method,
    ):
        sides = {"fedavg": fedavg, "method": method}
        for running in sides.values():
            run_rounds(running, _WARM_UP)
        ratios = []
        for alternation in range(alternations):
            cost = {side: _cost(sides[side]) for side in in_turn(list(sides), alternation)}
            ratios.append(cost["method"] / cost["fedavg"])
    return Ratios(tuple(ratios))


def _cost(running: Federation) -> float:
    """CPU seconds per sample of the next round."""
    seconds, samples = cpu_seconds(lambda: run_rounds(running))
    return seconds / float(samples)


def main(arguments: Sequence[str] | None = None) -> dict[str, Ratios]:
    """Measure, print, and on demand write the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.method_cost", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="methods to measure (default: all)")
    parser.add_argument("--alternations", type=int, default=5, help="rounds measured of each (default 5)")
    parser.add_argument(
        "--prototypes", action="store_true", help=f"{' and '.join(GOALS)}, where a goal is set for them"
    )
    parser.add_argument("--quick", action="store_true", help="tiny work, two rounds: does it work at all?")
    parser.add_argument("--write", action="store_true", help="write the table to benchmarks/results/")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    start, load = time.perf_counter(), os.getloadavg()[0]
    work = PROTOTYPES if given.prototypes else WORK
    if given.quick:
        work = replace(work, clients=2, samples=20, epochs=1, settings={"model.width": 2})
    alternations = 2 if given.quick else given.alternations
    measured = {}
    for name in given.names or (GOALS if given.prototypes else method_names()):
        measured[name] = measure(name, alternations, work)
        print(f"{name}: {measured[name]}", flush=True)
    text = _as_table(measured, given.prototypes)
    print(f"\n{text}")
    if given.write and not given.quick:
        flags = [*given.names, *(["--prototypes"] if given.prototypes else []), f"--alternations {alternations}"]
        command = " ".join(["python -m benchmarks.method_cost", *flags, "--write"])
        body = f"{work}. Median (lowest to highest) of {alternations} rounds, per sample trained on.\n\n{text}"
        title = "Cost of being a prototype method" if given.prototypes else "Cost of the methods"
        text = report(title, command, body, time.perf_counter() - start, load)
        (RESULTS / ("prototype_cost.md" if given.prototypes else "method_cost.md")).write_text(text)
    return measured


def _as_table(measured: dict[str, Ratios], with_goals: bool) -> str:
    """The cheapest first."""
    cheapest_first = sorted(measured.items(), key=lambda item: item[1].median)
    if not with_goals:
        return table(["method", "CPU time of a round / fedavg"], cheapest_first)
    rows = [
        [name, ratios, GOALS[name], "yes" if ratios.median <= GOALS[name] else "no"]
        for name, ratios in cheapest_first
        if name in GOALS
    ]
    return table(["method", "CPU time of a round / fedavg", "goal", "met"], rows)


if __name__ == "__main__":
    main()

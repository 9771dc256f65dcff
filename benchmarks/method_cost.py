"""What each method costs: the CPU time of its rounds over that of FedAvg's, both measured in turn in one run.

    python -m benchmarks.method_cost [NAME ...] [--alternations 5] [--write]

A round is broadcast, training, upload, aggregation and checkpoint, without evaluation. Times are taken per sample
trained on, each epoch counted, so methods with a plan of their own and methods that keep a part of the data to
validate on can be compared with the others.
"""

import argparse
import os
import time
from collections.abc import Sequence

import torch

from benchmarks import RESULTS, Ratios, Workload, cpu_seconds, federation, in_turn, report, run_rounds, table
from protofed.federation import Federation
from protofed.registry import method_names

WORK = Workload("resnet10 of width 8", "resnet10", (3, 16, 16), clients=4, samples=64, settings={"model.width": 8})
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
    parser.add_argument("--write", action="store_true", help="write the table to benchmarks/results/method_cost.md")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    start, load = time.perf_counter(), os.getloadavg()[0]
    measured = {}
    for name in given.names or method_names():
        measured[name] = measure(name, given.alternations)
        print(f"{name}: {measured[name]}", flush=True)
    cheapest_first = sorted(measured.items(), key=lambda item: item[1].median)
    text = table(["method", "CPU time of a round / fedavg"], cheapest_first)
    print(f"\n{text}")
    if given.write:
        command = " ".join(["python -m benchmarks.method_cost", *given.names, f"--alternations {given.alternations}"])
        body = f"{WORK}. Median (lowest to highest) of {given.alternations} rounds, per sample trained on.\n\n{text}"
        text = report("Cost of the methods", f"{command} --write", body, time.perf_counter() - start, load)
        (RESULTS / "method_cost.md").write_text(text)
    return measured


if __name__ == "__main__":
    main()

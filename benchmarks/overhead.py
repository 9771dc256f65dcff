"""What the framework costs: a round of ours beside the same work in a bare PyTorch loop, as a ratio of CPU times.

    python -m benchmarks.overhead [--alternations 9] [--rounds 1] [--quick] [--write]

Ours is everything `protofed run --engine loop` does in a round that is not evaluated; see benchmarks/README.md for what
that includes. The bare loop keeps normalised images in memory and does nothing but train and average. Both see the same
samples in the same order and must arrive at the same model, which is checked before anything is timed.
"""

import argparse
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from benchmarks import RESULTS, Ratios, Workload, cpu_seconds, federation, in_turn, report, run_rounds, table
from benchmarks.bare import BareLoop, refuse_other_work

GOAL = 1.05
METHODS = ("fedavg", "i2pfl")

_LENET = Workload("lenet5", "lenet5", (1, 28, 28), clients=20, samples=600)
_RESNET = Workload(
    "resnet10 of width 16", "resnet10", (3, 32, 32), clients=10, samples=200, settings={"model.width": 16}
)
WORKLOADS = (_LENET, replace(_LENET, epochs=5), _RESNET)
QUICK = (replace(_LENET, clients=3, samples=64),)


def measure(work: Workload, alternations: int, rounds: int) -> dict[str, Ratios]:
    """CPU time of each method's rounds over that of the bare loop, alternation by alternation."""
    planned = 1 + alternations * rounds
    with ExitStack() as stack:
        ours = {name: stack.enter_context(federation(name, work, planned)) for name in METHODS}
        bare = BareLoop(ours["fedavg"].context)
        # One round warms everything up, and shows whether the two really do the same.
        for running in ours.values():
            run_rounds(running)
        start = bare.weights
        bare.run(1)
        refuse_other_work(start, ours["fedavg"].server.weights.tensors(), bare.weights, "the bare loop")
        sides: dict[str, Callable[[], Any]] = {"bare": partial(bare.run, rounds)}
        sides.update({name: partial(run_rounds, running, rounds) for name, running in ours.items()})
        ratios: dict[str, list[float]] = {name: [] for name in METHODS}
        for alternation in range(alternations):
            seconds = {name: cpu_seconds(sides[name])[0] for name in in_turn(list(sides), alternation)}
            for name in METHODS:
                ratios[name].append(seconds[name] / seconds["bare"])
    return {name: Ratios(tuple(values)) for name, values in ratios.items()}


def main(arguments: Sequence[str] | None = None) -> dict[str, dict[str, Ratios]]:
    """Measure, print, and on demand write the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__.splitlines()[0])
    parser.add_argument("--alternations", type=int, default=9, help="pairs of measurements (default 9)")
    parser.add_argument("--rounds", type=int, default=1, help="rounds in each measurement (default 1)")
    parser.add_argument("--quick", action="store_true", help="a few seconds on a tiny federation: does it work at all?")
    parser.add_argument("--write", action="store_true", help="write the table to benchmarks/results/overhead.md")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    start, load = time.perf_counter(), os.getloadavg()[0]
    measured = {}
    for work in QUICK if given.quick else WORKLOADS:
        measured[str(work)] = measure(work, 2 if given.quick else given.alternations, given.rounds)
        print(f"{work}: " + ", ".join(f"{name} {ratios}" for name, ratios in measured[str(work)].items()), flush=True)
    rows = [
        [name, ratios["fedavg"], "yes" if ratios["fedavg"].median <= GOAL else "no", ratios["i2pfl"]]
        for name, ratios in measured.items()
    ]
    text = table(["work of one round", "fedavg / bare", f"goal {GOAL} met", "i2pfl / bare fedavg"], rows)
    print(f"\n{text}")
    if given.write and not given.quick:
        command = f"python -m benchmarks.overhead --alternations {given.alternations} --rounds {given.rounds} --write"
        body = f"Ratios of CPU time, median (lowest to highest) of {given.alternations} alternations.\n\n{text}"
        text = report("Overhead of the framework", command, body, time.perf_counter() - start, load)
        (RESULTS / "overhead.md").write_text(text)
    return measured


if __name__ == "__main__":
    main()

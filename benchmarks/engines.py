"""What stepping together saves: a round on the vmap engine beside the same round in the loop, as a ratio of CPU times.

    python -m benchmarks.engines [--alternations 9] [--quick] [--write]

Both run fedavg in one process with one torch thread and train the same clients on the same batches. Below 1 vmap wins;
on a machine with n cores it has to win against n processes, that is to stay below 1/n.
"""

import argparse
import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import torch

from benchmarks import RESULTS, Ratios, Workload, cpu_seconds, federation, in_turn, report, run_rounds, table

_MODELS = (
    Workload("mlp", "mlp", (1, 28, 28), clients=5, samples=128, epochs=5),
    Workload("lenet5", "lenet5", (1, 28, 28), clients=5, samples=128, epochs=5),
    Workload(
        "resnet10 of width 8", "resnet10", (3, 32, 32), clients=5, samples=64, epochs=5, settings={"model.width": 8}
    ),
)
WORKLOADS = tuple(replace(model, clients=clients) for model in _MODELS for clients in (5, 20, 100))
QUICK = tuple(replace(model, clients=2, samples=32, epochs=1) for model in _MODELS)


def measure(work: Workload, alternations: int) -> Ratios:
    """CPU time of a round in vmap over that of one in the loop, alternation by alternation."""
    with ExitStack() as stack:
        sides = {
            engine: stack.enter_context(federation("fedavg", work, 1 + alternations, engine=engine))
            for engine in ("loop", "vmap")
        }
        ratios = []
        for alternation in range(-1, alternations):
            turn = in_turn(list(sides), alternation)
            seconds = {engine: cpu_seconds(partial(run_rounds, sides[engine]))[0] for engine in turn}
            ratios.append(seconds["vmap"] / seconds["loop"])
    return Ratios(tuple(ratios[1:]))  # the first round warms everything up


def main(arguments: Sequence[str] | None = None) -> dict[str, Ratios]:
    """Measure, print, and on demand write the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.engines", description=__doc__.splitlines()[0])
    parser.add_argument("--alternations", type=int, default=9, help="pairs of measurements (default 9)")
    parser.add_argument("--quick", action="store_true", help="a few seconds on tiny federations: does it work at all?")
    parser.add_argument("--write", action="store_true", help="write the table to benchmarks/results/engines.md")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    start, load = time.perf_counter(), os.getloadavg()[0]
    measured = {}
    for work in QUICK if given.quick else WORKLOADS:
        measured[str(work)] = measure(work, 2 if given.quick else given.alternations)
        print(f"{work}: {measured[str(work)]}", flush=True)
    text = table(["work of one round", "vmap / loop"], list(measured.items()))
    print(f"\n{text}")
    if given.write and not given.quick:
        command = f"python -m benchmarks.engines --alternations {given.alternations} --write"
        body = f"Ratios of CPU time, median (lowest to highest) of {given.alternations} alternations.\n\n{text}"
        text = report("Clients that step together", command, body, time.perf_counter() - start, load)
        (RESULTS / "engines.md").write_text(text)
    return measured


if __name__ == "__main__":
    main()

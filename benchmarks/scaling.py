"""Seconds and memory from ten clients to ten thousand, each holding 60 images, lenet5.

    python -m benchmarks.scaling [--clients 10,100,1000,10000] [--workers N] [--rounds 2] [--quick] [--write]

Every line is a run of `protofed run fedavg` in a process of its own. Memory is the peak of its process tree
(proportional set size, looked at four times a second); `above the data` is what remains without the images.
Start-up is all that is not a round: imports, images, dealing out, processes, results.
"""

import argparse
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from benchmarks import RESULTS, Workload, report, table
from benchmarks.memory import watched
from benchmarks.suite import command
from protofed.system import cores

SAMPLES = 60
SHAPE = (1, 28, 28)
SIZES = (10, 100, 1000, 10_000)
SMALL_PART = 0.01
"""The participation that the largest federation is measured with as well."""
GOAL = 600
_MEGABYTE = 2**20


@dataclass(frozen=True)
class Measured:
    """One run."""

    clients: int
    participants: int
    start_up: float
    round: float
    """Seconds of a round, without evaluation."""
    data: float
    """Megabytes of images."""
    peak: float

    @property
    def above(self) -> float:
        """Megabytes beside the images."""
        return self.peak - self.data


def measure(clients: int, participation: float, workers: int, rounds: int) -> Measured:
    """One run, watched."""
    work = Workload("lenet5", "lenet5", SHAPE, clients, SAMPLES)
    with tempfile.TemporaryDirectory(prefix="protofed-benchmark-") as temporary:
        out = Path(temporary) / "run"
        line = command(work, out, workers, rounds, participation=participation)
        start = time.perf_counter()
        process = subprocess.Popen(line, stdout=subprocess.DEVNULL)
        with watched(process.pid) as peak:
            code = process.wait()
        wall = time.perf_counter() - start
        if code:
            raise RuntimeError(f"the run of {clients} clients ended with code {code}")
        lines = [json.loads(text) for text in (out / "rounds.jsonl").read_text().splitlines()]
    # The first round pays for what happens once, such as touching the images for the first time.
    seconds = [each["seconds"]["train"] + each["seconds"]["aggregate"] for each in lines[1:] or lines]
    return Measured(
        clients,
        len(lines[0]["participants"]),
        wall - sum(each["seconds"]["total"] for each in lines),
        sum(seconds) / len(seconds),
        clients * SAMPLES * prod(SHAPE) / _MEGABYTE,
        peak.bytes / _MEGABYTE,
    )


def as_table(runs: Sequence[Measured]) -> str:
    """All runs, smallest first."""
    heading = [
        "clients",
        "in a round",
        "start-up s",
        "round s",
        "ms per client",
        "data MB",
        "peak MB",
        "above the data",
    ]
    rows = [
        [
            f"{run.clients:,}",
            f"{run.participants:,}",
            f"{run.start_up:.1f}",
            f"{run.round:.2f}",
            f"{1000 * run.round / run.participants:.1f}",
            f"{run.data:.0f}",
            f"{run.peak:.0f}",
            f"{run.above:.0f}",
        ]
        for run in runs
    ]
    return table(heading, rows)


def plot(runs: Sequence[Measured], path: Path) -> None:
    """Two panels: a round's seconds over its participants, megabytes over clients."""
    import matplotlib as mpl

    mpl.use("Agg")
    # Without this every drawing differs from the last in its identifiers.
    mpl.rcParams["svg.hashsalt"] = "protofed"
    from matplotlib import pyplot

    figure, (time_panel, memory_panel) = pyplot.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    by_participants = sorted(runs, key=lambda run: run.participants)
    time_panel.loglog([run.participants for run in by_participants], [run.round for run in by_participants], "o-")
    time_panel.set(xlabel="clients in a round", ylabel="seconds of a round")
    by_clients = sorted(runs, key=lambda run: run.clients)
    clients = [run.clients for run in by_clients]
    memory_panel.semilogx(clients, [run.peak for run in by_clients], "o-", label="peak")
    memory_panel.semilogx(clients, [run.data for run in by_clients], "--", label="images")
    memory_panel.semilogx(clients, [run.data + GOAL for run in by_clients], ":", label=f"images + {GOAL} MB")
    memory_panel.set(xlabel="clients", ylabel="MB")
    memory_panel.legend()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main(arguments: Sequence[str] | None = None) -> list[Measured]:
    """Measure, print, and on demand write table and plot."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=__doc__.splitlines()[0])
    parser.add_argument("--clients", default=",".join(map(str, SIZES)), help="sizes of federations")
    parser.add_argument("--workers", type=int, default=cores(), help="processes (default: one per core)")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of each run; the first is not timed (default 2)")
    parser.add_argument("--quick", action="store_true", help="4 and 8 clients: does it work at all?")
    parser.add_argument("--write", action="store_true", help="write benchmarks/results/scaling.md and scaling.svg")
    given = parser.parse_args(arguments)
    sizes = [4, 8] if given.quick else [int(size) for size in given.clients.split(",")]
    start, load = time.perf_counter(), os.getloadavg()[0]
    cases = [(size, 1.0) for size in sizes]
    cases.insert(-1, (sizes[-1], SMALL_PART))
    runs = []
    for clients, participation in cases:
        runs.append(measure(clients, participation, given.workers, given.rounds))
        print(runs[-1], flush=True)
    text = as_table(runs)
    print(f"\n{text}")
    if given.write and not given.quick:
        line = f"python -m benchmarks.scaling --clients {given.clients} --workers {given.workers} --write"
        most = max(run.above for run in runs)
        verdict = f"At most {most:.0f} MB above the data; the goal is {GOAL}."
        picture = "![seconds of a round and memory](scaling.svg)"
        body = f"{given.workers} processes, {SAMPLES} images of 28x28 each, 1 epoch. {verdict}\n\n{text}\n\n{picture}"
        text = report("From ten clients to ten thousand", line, body, time.perf_counter() - start, load)
        (RESULTS / "scaling.md").write_text(text)
        plot(runs, RESULTS / "scaling.svg")
    return runs


if __name__ == "__main__":
    main()

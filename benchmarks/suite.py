"""Wall time of a round on all cores, beside a bare PyTorch loop and beside Flower's simulation, in one run.

    python -m benchmarks.suite [NAME ...] [--alternations 9] [--workers N] [--quick] [--write]

The sides take turns, round by round, and the order is swapped every time. All do the same work: same images, same order
of samples, same optimiser; whether they arrive at the same model is checked before anything is timed. `start-up` is the
time from the command to the first finished round: imports, data, processes. Without Flower its column stays empty.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import (
    RESULTS,
    Ratios,
    Workload,
    federation,
    generated,
    in_turn,
    report,
    run_rounds,
    table,
    wall_seconds,
)
from benchmarks.bare import BareLoop, refuse_other_work, save_work
from benchmarks.flower import FlowerSide, installed, weights_of
from protofed.system import cores

BARE, FLOWER = "bare", "Flower"
_WARM_UP = 1
_POLL_SECONDS = 0.01


@dataclass(frozen=True)
class Contest:
    """A piece of work, and the ratios that ours should stay below."""

    work: Workload
    goals: dict[str, float] = field(default_factory=dict)


_LENET = Workload("lenet5", "lenet5", (1, 28, 28), clients=20, samples=600, epochs=5)
_RESNET = Workload(
    "resnet10 of width 16", "resnet10", (3, 32, 32), clients=10, samples=200, settings={"model.width": 16}
)
CONTESTS = {
    "lenet5": Contest(_LENET, {BARE: 0.50, FLOWER: 0.75}),
    "resnet10": Contest(_RESNET, {BARE: 0.55}),
    # Two steps must go far enough to tell other work from the rounding of a sum over a thousand clients.
    "thousand": Contest(replace(_LENET, clients=1000, samples=60, epochs=1, lr=0.03), {FLOWER: 0.20}),
}
START = Contest(replace(_LENET, samples=60, epochs=1), {FLOWER: 0.6})
_START_UP = "start-up"


def tiny(contest: Contest) -> Contest:
    """The same in seconds: does it work at all?"""
    work = contest.work
    settings = {"model.width": 2} if "model.width" in work.settings else {}
    small = replace(work, clients=min(work.clients, 4), samples=40, epochs=1, settings=settings)
    return Contest(small, contest.goals)


def measure(work: Workload, alternations: int, workers: int, with_flower: bool) -> dict[str, Ratios]:
    """Our wall time over that of every other side, alternation by alternation."""
    with ExitStack() as stack:
        ours = stack.enter_context(federation("fedavg", work, _WARM_UP + alternations, workers))
        bare = BareLoop(ours.context)
        start = bare.weights
        sides: dict[str, Callable[[], Any]] = {"ours": partial(run_rounds, ours), BARE: partial(bare.run, 1)}
        for side in sides.values():
            side()
        refuse_other_work(start, ours.server.weights.tensors(), bare.weights, "the bare loop")
        if with_flower:
            saved = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="protofed-benchmark-"))) / "work.pt"
            save_work(ours.context, saved)
            flower = stack.enter_context(FlowerSide(saved, workers))
            theirs = weights_of(flower.run(_WARM_UP))
            refuse_other_work(start, ours.server.weights.tensors(), theirs, "Flower's simulation")
            sides[FLOWER] = partial(flower.run, 1)
        return _ratios(sides, alternations)


def measure_start(work: Workload, alternations: int, workers: int) -> dict[str, Ratios]:
    """From the command to the first finished round, each time in a new process."""
    with tempfile.TemporaryDirectory(prefix="protofed-benchmark-") as temporary, federation("fedavg", work, 1) as same:
        saved = Path(temporary) / "work.pt"
        save_work(same.context, saved)
        outs = (Path(temporary) / f"run-{number}" for number in range(10**6))
        sides: dict[str, Callable[[], Any]] = {
            "ours": lambda: _start_ours(work, next(outs), workers),
            FLOWER: lambda: _start_flower(saved, workers),
        }
        return _ratios(sides, alternations, lambda side: side())


def _ratios(
    sides: dict[str, Callable[[], Any]],
    alternations: int,
    clock: Callable[[Callable[[], Any]], float] = lambda side: wall_seconds(side)[0],
) -> dict[str, Ratios]:
    ratios: dict[str, list[float]] = {name: [] for name in sides if name != "ours"}
    for alternation in range(alternations):
        seconds = {name: clock(sides[name]) for name in in_turn(list(sides), alternation)}
        for name, values in ratios.items():
            values.append(seconds["ours"] / seconds[name])
    return {name: Ratios(tuple(values)) for name, values in ratios.items()}


def command(work: Workload, out: Path, workers: int, rounds: int = 1, **more: object) -> list[str]:
    """The work as a command line of ours."""
    options = {
        "plugin": Path(generated.__file__),
        "data": generated.NAME,
        "protocol": f"iid={work.clients}",
        "model": work.model,
        "rounds": rounds,
        "epochs": work.epochs,
        "batch": work.batch,
        "workers": workers,
        "out": out,
        **more,
    }
    settings = [f"{key}={value}" for key, value in {**work.data_settings, **work.settings}.items()]
    given = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    start = "import sys; from protofed.cli import main; sys.exit(main())"
    chosen = [part for context in settings for part in ("--set", context)]
    return [sys.executable, "-c", start, "run", "fedavg", "--quiet", *given, *chosen]


def _start_ours(work: Workload, out: Path, workers: int) -> float:
    start = time.perf_counter()
    process = subprocess.Popen(command(work, out, workers), stdout=subprocess.DEVNULL)
    while not (out / "rounds.jsonl").exists():
        if process.poll() is not None:
            raise RuntimeError(f"the run ended with code {process.returncode} before its first round")
        time.sleep(_POLL_SECONDS)
    seconds = time.perf_counter() - start
    process.wait()
    return seconds


def _start_flower(saved: Path, workers: int) -> float:
    start = time.perf_counter()
    with FlowerSide(saved, workers) as flower:
        flower.run(1)
        return time.perf_counter() - start


def main(arguments: Sequence[str] | None = None) -> dict[str, dict[str, Ratios]]:
    """Measure, print, and on demand write the table."""
    names = [*CONTESTS, _START_UP]
    parser = argparse.ArgumentParser(prog="python -m benchmarks.suite", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"what to measure: {', '.join(names)} (default: all)")
    parser.add_argument("--alternations", type=int, default=9, help="measurements of every side (default 9)")
    parser.add_argument("--workers", type=int, default=cores(), help="processes (default: one per core)")
    parser.add_argument("--quick", action="store_true", help="tiny work, two alternations: does it work at all?")
    parser.add_argument("--no-flower", action="store_true", help="leave Flower's simulation out")
    parser.add_argument("--write", action="store_true", help="write the table to benchmarks/results/suite.md")
    given = parser.parse_args(arguments)
    unknown = [name for name in given.names if name not in names]
    if unknown:
        parser.error(f"there is no {unknown[0]}; choose from {', '.join(names)}")
    torch.set_num_threads(1)
    start, load = time.perf_counter(), os.getloadavg()[0]
    with_flower = installed() and not given.no_flower
    alternations = 2 if given.quick else given.alternations
    measured: dict[str, dict[str, Ratios]] = {}
    rows = []
    for name in given.names or names:
        contest = START if name == _START_UP else CONTESTS[name]
        contest = tiny(contest) if given.quick else contest
        if name != _START_UP:
            measured[name] = measure(contest.work, alternations, given.workers, with_flower)
        elif with_flower:
            measured[name] = measure_start(contest.work, alternations, given.workers)
        for other, ratios in measured.get(name, {}).items():
            goal = contest.goals.get(other)
            met = "" if goal is None else "yes" if ratios.median <= goal else "no"
            title = f"start-up of {contest.work}" if name == _START_UP else str(contest.work)
            rows.append([title, f"ours / {other}", ratios, "" if goal is None else f"{goal:.2f}", met])
            print(f"{name}: ours / {other} {ratios}", flush=True)
    text = table(["work", "wall time", "median (lowest to highest)", "goal", "met"], rows)
    print(f"\n{text}")
    if given.write and not given.quick:
        line = f"python -m benchmarks.suite --alternations {alternations} --workers {given.workers} --write"
        body = f"{given.workers} processes of ours and of Flower; the bare loop is one thread.\n\n{text}"
        text = report("Speed on all cores", line, body, time.perf_counter() - start, load)
        (RESULTS / "suite.md").write_text(text)
    return measured


if __name__ == "__main__":
    main()

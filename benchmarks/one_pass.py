"""One exchange of the closed-form family: seconds and memory by the number of sites, and Office-10 from kept features.

    python -m benchmarks.one_pass [--sites 1000,10000] [--office IMAGES/office_caltech10] [--quick] [--write]

Sites hold 60 images each, with features of 1,280 values that cost next to nothing: what is measured is the exchange,
from the first site's statistics to the head, in one process with one thread or with --workers, and its memory, that of
all processes together. Every case is a process of its own; processor time is what others on the machine hardly change.
Office-10 (ten clients, a fifth of the images) is
the command as a user gives it, twice: the second time all features are kept from the first.
"""

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import RESULTS, Workload, cpu_seconds, federation, report, table

IMAGES = 60
DIM = 1280
CASES: dict[str, tuple[str, dict[str, object]]] = {
    "fedncm": ("fedncm", {}),
    "protoridge gram=none": ("protoridge", {"gram": "none"}),
    "protoridge gram=none project=256": ("protoridge", {"gram": "none", "project": 256}),
    "protoridge gram=sketch": ("protoridge", {"gram": "sketch"}),
    "protoridge gram=full project=256": ("protoridge", {"project": 256}),
    "protoridge gram=full": ("protoridge", {}),
}
OFFICE = ("--clients", "caltech=3,amazon=2,webcam=1,dslr=4", "--fraction", "0.2")


@dataclass(frozen=True)
class Exchange:
    """One case at one number of sites."""

    case: str
    sites: int
    seconds: float
    """Of the exchange, on the clock."""
    cpu: float
    """Its processor time, in all processes, with the evaluation of the head."""
    gigabytes: float
    """Largest sizes of all processes together; what they share counts in each."""
    sent: int
    """Bytes up, of all sites."""


def exchange(case: str, sites: int, workers: int = 0) -> Exchange:
    """Run one case in this process; features come from one wide layer on tiny images, which costs next to nothing."""
    torch.set_num_threads(1)
    method, settings = CASES[case]
    work = Workload(case, "mlp", (1, 4, 4), sites, IMAGES, settings={"model.hidden": DIM, **settings})
    with federation(method, work, rounds=1, workers=workers, evaluated=True) as running:
        others = [process.pid for process in multiprocessing.active_children() if process.pid]
        before = sum(map(_processor_time, others))
        cpu, record = cpu_seconds(lambda: next(running.rounds()))
        seconds = record["seconds"]["train"] + record["seconds"]["aggregate"]
        cpu += sum(map(_processor_time, others)) - before
        largest = sum(map(_largest, (os.getpid(), *others))) / 2**20
    return Exchange(case, sites, seconds, cpu, largest, record["bytes"]["up"]["total"])


def _processor_time(process: int) -> float:
    """Seconds that a process has computed so far."""
    user, system = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def _largest(process: int) -> int:
    """The largest size that a process has had, in KiB."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def in_a_process(case: str, sites: int, workers: int = 0) -> Exchange:
    """The same in a process of its own, so that memory is that of the case alone."""
    words = [sys.executable, "-m", "benchmarks.one_pass", "--one", case, "--sites", str(sites)]
    words += ["--workers", str(workers)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return Exchange(**json.loads(done.stdout.splitlines()[-1]))


def office(data: Path) -> list[list[object]]:
    """The command twice, with a cache of its own: seconds, processor time and accuracy."""
    rows: list[list[object]] = []
    with tempfile.TemporaryDirectory(prefix="protofed-benchmark-") as folder:
        cache = {**os.environ, "PROTOFED_CACHE": f"{folder}/cache"}
        for name in ("from JPEG files", "features kept"):
            out = Path(folder) / name.replace(" ", "-")
            words = ["-m", "protofed", "run", "protoridge", "--data", str(data), *OFFICE, "--out", str(out), "--quiet"]
            before, start = os.times(), time.perf_counter()
            subprocess.run([sys.executable, *words], env=cache, check=True, capture_output=True)
            seconds, after = time.perf_counter() - start, os.times()
            cpu = after.children_user + after.children_system - before.children_user - before.children_system
            accuracy = json.loads((out / "summary.json").read_text())["accuracy_final"]["global"]["average"]
            rows.append([name, f"{seconds:.1f}", f"{cpu:.1f}", f"{100 * accuracy:.1f}"])
    return rows


def main(arguments: Sequence[str] | None = None) -> list[Exchange]:
    """Measure, print, and on demand write the tables."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.one_pass", description=__doc__.splitlines()[0])
    parser.add_argument("--sites", default="1000,10000")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--workers", type=int, default=0, help="processes of an exchange; 0: this one alone")
    parser.add_argument("--office", type=Path, help="class folders of Office-Caltech-10 at 224 pixels")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help="ten sites, in this process: does it work at all?")
    parser.add_argument("--write", action="store_true", help="write the tables to benchmarks/results/one_pass.md")
    given = parser.parse_args(arguments)
    if given.one:
        print(json.dumps(asdict(exchange(given.one, int(given.sites), given.workers))))
        return []
    start, load = time.perf_counter(), os.getloadavg()[0]
    measured: list[Exchange] = []
    for sites in (10,) if given.quick else map(int, given.sites.split(",")):
        for case in given.cases.split(","):
            measured.append(exchange(case, sites) if given.quick else in_a_process(case, sites, given.workers))
            print(measured[-1], flush=True)
    text = _table(measured)
    if given.office is not None:
        text += "\n\n" + table(["Office-10, end to end", "seconds", "CPU s", "accuracy"], office(given.office))
    print(f"\n{text}")
    if given.write:
        goals = "Goals: 1,000 sites in under 2 s, 10,000 in 1 GB; Office-10 in under 5 s, from files in 60 s."
        command = f"python -m benchmarks.one_pass --sites {given.sites} --workers {given.workers} --write"
        page = report("One exchange", command, f"{goals}\n\n{text}", time.perf_counter() - start, load)
        (RESULTS / "one_pass.md").write_text(page)
    return measured


def _table(measured: Sequence[Exchange]) -> str:
    rows: list[list[Any]] = [
        [each.case, each.sites, f"{each.seconds:.1f}", f"{each.cpu:.1f}", f"{each.gigabytes:.2f}", _per_site(each)]
        for each in measured
    ]
    return table(["method", "sites", "exchange s", "CPU s", "GB", "KB up per site"], rows)


def _per_site(each: Exchange) -> str:
    return f"{each.sent / each.sites / 1000:.1f}"


if __name__ == "__main__":
    main()

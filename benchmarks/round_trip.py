"""What a round costs in a deployment beside a round in one process: messages, polling, TLS, processes.

python -m benchmarks.round_trip --sites 3 --rounds 8 --alternations 3
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import protofed
from benchmarks import RESULTS, in_turn, report, table
from benchmarks.soak import loopback, many_sites
from protofed.data import Dataset

_HIDDEN = (32, 2048)
"""Widths of the network: messages of a tenth of a megabyte, and of many."""
_PARTS = ("train", "aggregate", "evaluate", "total")
_SIDES = ("one process", "deployment")
_PATIENCE = 1800.0

Rounds = list[dict[str, Any]]


def deployed(dataset: Dataset, hidden: int, rounds: int) -> Rounds:
    """The rounds of a federation of processes, with TLS and keys, on this machine."""
    with loopback(dataset) as federation:
        words = ["--model", "mlp", "--set", f"model.hidden={hidden}", "--epochs", "1", "--wait", str(_PATIENCE)]
        federation.start_server("i2pfl", "--rounds", str(rounds), *words)
        for name in federation.sites:
            federation.start_site(name)
        if federation.wait("server", _PATIENCE):
            raise RuntimeError(federation.log("server"))
        return protofed.Run(federation.out).rounds


def here(dataset: Dataset, hidden: int, rounds: int) -> Rounds:
    """The same rounds in this process."""
    with loopback(dataset) as idle, tempfile.TemporaryDirectory() as out:
        chosen: dict[str, Any] = {"model": "mlp", "set": {"model.hidden": hidden}, "epochs": 1, "rounds": rounds}
        return protofed.run("i2pfl", str(idle.data), out=Path(out) / "run", engine="loop", **chosen).rounds


def measure(sites: int, rounds: int, alternations: int) -> str:
    """Median seconds of the parts of a round, without the first of each run, in which sites prepare themselves."""
    dataset, tables = many_sites(sites), []
    for hidden in _HIDDEN:
        runs: dict[str, list[Rounds]] = {side: [] for side in _SIDES}
        for alternation in range(alternations):
            for side in in_turn(_SIDES, alternation):
                runs[side].append((here if side == _SIDES[0] else deployed)(dataset, hidden, rounds))
        tables.append(_compared(runs, sites))
    return "\n\n".join(tables)


def _compared(runs: dict[str, list[Rounds]], sites: int) -> str:
    rows = []
    for part in _PARTS:
        alone, apart = (_seconds(runs[side], part) for side in _SIDES)
        rows.append([part, _range(alone), _range(apart), f"{statistics.median(apart) - statistics.median(alone):.2f}"])
    megabytes = runs[_SIDES[0]][0][-1]["bytes"]["up"]["total"] / sites / 1e6
    heading = ["seconds of", *_SIDES, "difference"]
    return f"Messages of {megabytes:.2f} MB:\n\n{table(heading, rows)}"


def _seconds(runs: Sequence[Rounds], part: str) -> list[float]:
    return [line["seconds"][part] for rounds in runs for line in rounds[1:]]


def _range(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sites", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--alternations", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="into benchmarks/results/round_trip.md")
    given = parser.parse_args()
    start, load = time.perf_counter(), os.getloadavg()[0]
    body = measure(given.sites, given.rounds, given.alternations)
    command = f"python -m benchmarks.round_trip {' '.join(sys.argv[1:])}".strip()
    told = f"{given.sites} sites, each evaluated every round; median (lowest to highest) of {given.alternations} runs."
    text = report("A round of a deployment", command, f"{told}\n\n{body}", time.perf_counter() - start, load)
    print(text)
    if given.write:
        (RESULTS / "round_trip.md").write_text(text)


if __name__ == "__main__":
    main()

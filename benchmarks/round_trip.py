"""What a round costs in a deployment beside a round in one process: messages, polling, TLS, processes.

python -m benchmarks.round_trip --sites 3 --rounds 6
"""

import argparse
import os
import statistics
import sys
import time
from typing import Any

import protofed
from benchmarks import RESULTS, report, table
from benchmarks.soak import loopback, many_sites

_OPTIONS: dict[str, Any] = {"model": "mlp", "set": {"model.hidden": 32}, "epochs": 1}
_PATIENCE = 1800.0


def measure(sites: int, rounds: int) -> str:
    """Median seconds of the parts of a round, without the first, in which sites import and load."""
    with loopback(many_sites(sites)) as federation:
        words = ["--model", "mlp", "--set", "model.hidden=32", "--epochs", "1", "--wait", str(_PATIENCE)]
        federation.start_server("i2pfl", "--rounds", str(rounds), *words)
        for name in federation.sites:
            federation.start_site(name)
        federation.wait("server", _PATIENCE)
        deployed = protofed.Run(federation.out).rounds
        here = protofed.run(
            "i2pfl", str(federation.data), out=federation.folder / "loop", engine="loop", rounds=rounds, **_OPTIONS
        ).rounds
        rows = [
            [part, f"{_median(here, part):.2f}", f"{_median(deployed, part):.2f}"]
            for part in ("train", "aggregate", "evaluate", "total")
        ]
        rows.append(
            ["total of round 1", f"{here[0]['seconds']['total']:.2f}", f"{deployed[0]['seconds']['total']:.2f}"]
        )
    return table(["seconds per round", "one process", "deployment"], rows)


def _median(rounds: list[dict[str, Any]], part: str) -> float:
    return statistics.median(line["seconds"][part] for line in rounds[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sites", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--write", action="store_true", help="into benchmarks/results/round_trip.md")
    given = parser.parse_args()
    start, load = time.perf_counter(), os.getloadavg()[0]
    body = measure(given.sites, given.rounds)
    command = f"python -m benchmarks.round_trip {' '.join(sys.argv[1:])}".strip()
    text = report("A round of a deployment", command, body, time.perf_counter() - start, load)
    print(text)
    if given.write:
        (RESULTS / "round_trip.md").write_text(text)


if __name__ == "__main__":
    main()

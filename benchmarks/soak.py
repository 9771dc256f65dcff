"""A federation of real processes under fire: sites are killed at random, the server once; what does each round lose?

python -m benchmarks.soak --sites 8 --rounds 20
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import protofed
from benchmarks import RESULTS, report, table
from benchmarks.loopback import Loopback
from protofed.data import Dataset, Domain, Images, load
from protofed.seeding import generator

_OPTIONS = ("--model", "lenet5", "--epochs", "2")
_PER_SITE = 200
_START_SECONDS = 600.0
_PAUSE = 0.2


def many_sites(sites: int) -> Dataset:
    """Digits dealt out to so many sites, domain by domain."""
    digits = load("digits")
    sources = list(digits.domains.values())
    domains = {}
    for number in range(sites):
        source = sources[number % len(sources)]
        parts = [_part(images, f"{number}", part) for part, images in (("train", source.train), ("test", source.test))]
        domains[f"site{number:02d}"] = Domain(f"site{number:02d}", *parts)
    return Dataset("digits", digits.classes, domains, digits.normalise)


def _part(images: Images, *whose: str) -> Images:
    """Some images by lot."""
    lot = torch.randperm(len(images), generator=generator(0, "soak", *whose))
    return images.take(lot[:_PER_SITE])


@dataclass
class Torment:
    """Kills sites now and then, and starts them again; kills the server once and resumes it."""

    federation: Loopback
    chance: random.Random
    every: float
    """Rounds between kills of sites, on average: by the clock, a slow machine would see nothing but kills."""
    rounds: int
    timeout: float
    deeds: list[tuple[int, str]] = field(default_factory=list)
    """What was done while which round was under way."""
    _down: dict[str, float] = field(default_factory=dict)
    _pace: float = 1.0
    """Seconds that the last complete round has taken."""

    def run(self) -> None:
        """Until the server is done."""
        server_dies = self.rounds // 2
        while self.federation.runs("server") or self.federation.rounds() < self.rounds:
            time.sleep(_PAUSE)
            done = self._look()
            if server_dies and done >= server_dies:
                server_dies = 0
                self.federation.kill("server")
                self._note(done, "server killed, resumed")
                self.federation.start_server("--resume", "--round-timeout", str(self.timeout), "--min-sites", "1")
            elif not self.federation.runs("server") and done < self.rounds:
                raise RuntimeError(f"the server has ended: {self.federation.log('server')[-2000:]}")
            self._bring_back()
            if 0 < done < self.rounds - 1 and self.chance.random() < _PAUSE / (self.every * self._pace):
                self._kill_a_site(done)

    def _look(self) -> int:
        """Rounds that are complete."""
        complete = (self.federation.out / "rounds.jsonl").read_text().split("\n")[:-1]
        self._pace = json.loads(complete[-1])["seconds"]["total"]
        return len(complete)

    def _kill_a_site(self, done: int) -> None:
        alive = [name for name in self.federation.sites if self.federation.runs(name)]
        if len(alive) < 2:
            return
        name = self.chance.choice(alive)
        self.federation.kill(name)
        self._note(done, f"{name} killed")
        self._down[name] = time.monotonic() + self.chance.uniform(0, self._pace)

    def _note(self, done: int, deed: str) -> None:
        self.deeds.append((done + 1, deed))
        print(f"round {done + 1}: {deed}", file=sys.stderr, flush=True)

    def _bring_back(self) -> None:
        for name, when in list(self._down.items()):
            if time.monotonic() > when:
                del self._down[name]
                self.federation.start_site(name)


@contextmanager
def loopback(dataset: Dataset, keep: Path | None = None) -> Iterator[Loopback]:
    """In a temporary folder, or in one that stays, with everybody's logs."""
    with tempfile.TemporaryDirectory(prefix="protofed-soak-") as temporary:
        folder = keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        federation = Loopback(folder, dataset)
        try:
            yield federation
        finally:
            federation.end()


def soak(
    sites: int, rounds: int, every: float, timeout: float, seed: int, keep: Path | None = None, secure: bool = False
) -> str:
    """The table of a tormented run."""
    with loopback(many_sites(sites), keep) as federation:
        limits = ["--round-timeout", str(timeout), "--wait", str(_START_SECONDS)]
        what = ["fedavg", "--guard", "secure=on"] if secure else ["i2pfl"]
        federation.start_server(*what, "--rounds", str(rounds), *limits, *_OPTIONS)
        for name in federation.sites:
            federation.start_site(name)
        federation.wait_for_rounds(1, _START_SECONDS)
        torment = Torment(federation, random.Random(seed), every, rounds, timeout)
        torment.run()
        run = protofed.Run(federation.out)
        assert run.complete, federation.log("server")
        return _told(run.rounds, torment.deeds)


def _told(rounds: list[dict[str, Any]], deeds: list[tuple[int, str]]) -> str:
    rows = []
    for line in rounds:
        lost = [event["client"].removesuffix("-0") for event in line["events"] if event["event"] == "left out"]
        unseen = [event["client"].removesuffix("-0") for event in line["events"] if event["event"] == "not evaluated"]
        reasons = sorted({event["reason"] for event in line["events"]})
        done = [what for round, what in deeds if round == line["round"]]
        rows.append(
            [
                line["round"],
                f"{len(line['participants']) - len(lost)} of {len(line['participants'])}",
                ", ".join(lost) or "-",
                ", ".join(unseen) or "-",
                "; ".join(reasons) or "-",
                ", ".join(done) or "-",
                _percent(line["accuracy"]["global"]["average"]),
                f"{line['seconds']['total']:.1f}",
            ]
        )
    heading = ["round", "uploads", "left out", "not evaluated", "reasons", "done to it", "accuracy (%)", "seconds"]
    kills = sum("site" in what for _, what in deeds)
    return (
        f"{table(heading, rows)}\n\n{kills} kills of sites, one of the server; all {len(rounds)} rounds are complete."
    )


def _percent(accuracy: float | None) -> str:
    return "-" if accuracy is None else f"{100 * accuracy:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sites", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--every", type=float, default=1.0, help="rounds between kills of sites, on average")
    parser.add_argument("--round-timeout", type=float, default=90.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="a new folder in which run, sites and logs stay")
    parser.add_argument("--secure", action="store_true", help="FedAvg with masked uploads instead of I2PFL")
    parser.add_argument("--write", action="store_true", help="into benchmarks/results/soak.md or soak_secure.md")
    given = parser.parse_args()
    start, load_before = time.perf_counter(), os.getloadavg()[0]
    body = soak(given.sites, given.rounds, given.every, given.round_timeout, given.seed, given.keep, given.secure)
    command = f"python -m benchmarks.soak {' '.join(sys.argv[1:])}".strip()
    text = report("A deployment under fire", command, body, time.perf_counter() - start, load_before)
    print(text)
    if given.write:
        (RESULTS / ("soak_secure.md" if given.secure else "soak.md")).write_text(text)


if __name__ == "__main__":
    main()

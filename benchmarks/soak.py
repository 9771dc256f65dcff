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
from protofed.guards.masking import threshold
from protofed.seeding import generator

_OPTIONS = ("--model", "lenet5", "--epochs", "12")
"""A round in which nothing happens takes about as long as a site needs to start, so that kills find sites to kill."""
_PER_SITE = 200
_START_SECONDS = 600.0
_PAUSE = 0.2
_LONGEST_DEATH = 2.0


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
    """Kills sites at random moments, and starts them again; kills the server once and resumes it.

    It is paced by rounds: by the clock, a slow machine would see nothing but kills. A site is down from its kill until
    it is connected again, and no more than `most_down` are at a time, or fall in one round: more than that no secure
    sum survives, by design.
    """

    federation: Loopback
    chance: random.Random
    rounds: int
    kills: int
    most_down: int
    timeout: float
    deeds: list[tuple[int, str]] = field(default_factory=list)
    """What was done while which round was under way."""
    away: list[float] = field(default_factory=list)
    """Seconds from a site's start to when it is connected."""
    _plan: list[tuple[int, float]] = field(default_factory=list)
    """When a site may be killed: after how many rounds, and at which part of the next."""
    _dead: dict[str, float] = field(default_factory=dict)
    """When to start them again."""
    _coming: dict[str, tuple[float, int]] = field(default_factory=dict)
    """When they were started, and how often they had been connected by then."""
    _fallen: int = 0
    _pace: float = float("inf")
    """Seconds of the shortest round so far."""

    def run(self) -> None:
        """Until the server is done."""
        slots = [done for done in range(1, self.rounds) for _ in range(self.most_down)]
        self._plan = sorted((done, self.chance.random()) for done in slots)
        server_dies, seen, since = self.rounds // 2, 0, time.monotonic()
        while self.federation.runs("server") or self.federation.rounds() < self.rounds:
            time.sleep(_PAUSE)
            done = self._look()
            if done > seen:
                seen, since = done, time.monotonic()
            if server_dies and done >= server_dies:
                server_dies = 0
                self.federation.kill("server")
                self._note(done, "server killed, resumed")
                self.federation.start_server("--resume", "--round-timeout", str(self.timeout), "--min-sites", "1")
            elif not self.federation.runs("server") and done < self.rounds:
                raise RuntimeError(f"the server has ended: {self.federation.log('server')[-2000:]}")
            self._bring_back()
            if self._is_due(done, time.monotonic() - since):
                self._kill_a_site(done)

    def _look(self) -> int:
        """Rounds that are complete."""
        complete = (self.federation.out / "rounds.jsonl").read_text().split("\n")[:-1]
        self._pace = min(json.loads(line)["seconds"]["total"] for line in complete)
        return len(complete)

    def _is_due(self, done: int, elapsed: float) -> bool:
        """Whether it is time for the next kill; one for which there was no room in its round is left out."""
        self._plan = [(after, part) for after, part in self._plan if after >= done]
        if self._fallen == self.kills or not self._plan or self._plan[0][0] > done:
            return False
        room = self.most_down - len(self._dead) - len(self._coming)
        return elapsed >= self._plan[0][1] * self._pace and room > 0

    def _kill_a_site(self, done: int) -> None:
        alive = [name for name in self.federation.sites if name not in self._dead and name not in self._coming]
        name = self.chance.choice(alive)
        self._plan.pop(0)
        self._fallen += 1
        self.federation.kill(name)
        self._note(done, f"{name} killed")
        self._dead[name] = time.monotonic() + self.chance.uniform(0, _LONGEST_DEATH)

    def _note(self, done: int, deed: str) -> None:
        self.deeds.append((done + 1, deed))
        print(f"round {done + 1}: {deed}", file=sys.stderr, flush=True)

    def _bring_back(self) -> None:
        for name, when in list(self._dead.items()):
            if time.monotonic() > when:
                del self._dead[name]
                self._coming[name] = time.monotonic(), self._connections(name)
                self.federation.start_site(name)
        for name, (started, before) in list(self._coming.items()):
            if self._connections(name) > before:
                del self._coming[name]
                self.away.append(time.monotonic() - started)

    def _connections(self, name: str) -> int:
        return (self.federation.state(name) / "supernode.log").read_bytes().count(b"SuperNode ID")


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
    sites: int, rounds: int, kills: int, timeout: float, seed: int, keep: Path | None = None, secure: bool = False
) -> str:
    """The table of a tormented run."""
    with loopback(many_sites(sites), keep) as federation:
        limits = ["--round-timeout", str(timeout), "--wait", str(_START_SECONDS)]
        what = ["fedavg", "--guard", "secure=on"] if secure else ["i2pfl"]
        federation.start_server(*what, "--rounds", str(rounds), *limits, *_OPTIONS)
        for name in federation.sites:
            federation.start_site(name)
        federation.wait_for_rounds(1, _START_SECONDS)
        most_down = sites - threshold(sites)
        torment = Torment(federation, random.Random(seed), rounds, kills, most_down, timeout)
        torment.run()
        run = protofed.Run(federation.out)
        assert run.complete, federation.log("server")
        return f"{_told(run.rounds, torment.deeds)}\n\n{_summed_up(federation, torment)}"


def _summed_up(federation: Loopback, torment: Torment) -> str:
    """What became of it all, in words."""
    fallen = sum("site" in what for _, what in torment.deeds)
    again = federation.log("server").count("trying again")
    kept = sum(bool(list(federation.state(name).glob("runs/*/report.json"))) for name in federation.sites)
    back, sites, most = sorted(torment.away) or [float("nan")], len(federation.sites), torment.most_down
    return f"""{fallen} kills of sites, one of the server; all {torment.rounds} rounds are complete, and {kept} of
{sites} sites have kept their final model. Rounds begun again, because too few sites were left: {again}. A site that
was started again is connected after {back[len(back) // 2]:.1f} s (median; at most {back[-1]:.1f} s).

Sites are killed at random moments, at most {most} while a round is under way, and at most {most} are down at
a time, from their kill until they are connected again: of {sites} sites a secure sum takes {threshold(sites)} to
its end, and where fewer are left the round is begun again, by design."""


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
    return table(heading, rows)


def _percent(accuracy: float | None) -> str:
    return "-" if accuracy is None else f"{100 * accuracy:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sites", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--kills", type=int, default=30, help="of sites")
    parser.add_argument("--round-timeout", type=float, default=90.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, help="a new folder in which run, sites and logs stay")
    parser.add_argument("--secure", action="store_true", help="FedAvg with masked uploads instead of I2PFL")
    parser.add_argument("--write", action="store_true", help="into benchmarks/results/soak.md or soak_secure.md")
    given = parser.parse_args()
    start, load_before = time.perf_counter(), os.getloadavg()[0]
    body = soak(given.sites, given.rounds, given.kills, given.round_timeout, given.seed, given.keep, given.secure)
    command = f"python -m benchmarks.soak {' '.join(sys.argv[1:])}".strip()
    text = report("A deployment under fire", command, body, time.perf_counter() - start, load_before)
    print(text)
    if given.write:
        (RESULTS / ("soak_secure.md" if given.secure else "soak.md")).write_text(text)


if __name__ == "__main__":
    main()

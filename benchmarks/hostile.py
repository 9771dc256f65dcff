"""One hostile client of five: accuracy of the common model with the plain mean and with robust ones.

    python -m benchmarks.hostile [--rounds 8] [--seeds 0,1] [--methods fed3r] [--keep FILE] [--write]

Embedded digits dealt out evenly. The first client attacks from the first round on: it reverses or inflates its change
of the weights, trains on wrong labels, or sends the prototypes of other classes in place of its own. Of class sums and
second moments, which are sent once, it sends the reverse, or much more of them than it has. Where it is absent the
others are alone: what they reach is what a rule can keep of the accuracy.
"""

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import RESULTS, report, table
from protofed.clients import Failed, Job, Prepared, Result, RunContext, Train, Trained
from protofed.clients.samples import ClientSamples
from protofed.engines.loop import LoopEngine
from protofed.federation import Diverged, Federation, RoundPolicy, RunFolder
from protofed.records import ClassTable, Message, Record, Weights, decode, encode, parts_of
from protofed.runs.assembly import assemble
from protofed.runs.options import make_options

OPTIONS: dict[str, Any] = {
    "data": "digits",
    "domains": "mnist",
    "protocol": "iid=5",
    "model": "lenet5",
    "lr": 0.05,
    "set": {"data.holdout": 0},
}
RULES = ("none", "median", "trimmed=0.2", "norm-bound=1", "krum=0.2")
METHODS: dict[str, dict[str, str]] = {
    "fedavg": {},
    "fedproto_avg": {"inference": "nearest"},
    "i2pfl": {},
    "fed3r": {},
}
"""With settings in which what is attacked decides: prototypes matter most where the nearest one predicts."""
_ONE_EXCHANGE = ("fed3r",)
_REVERSED, _INFLATED = -5.0, 20.0

Tamper = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Attack:
    """What the hostile client does to its labels and to each field of its upload, given what it received."""

    name: str
    methods: frozenset[str]
    """Who sends what is attacked."""
    tamper: Tamper | None = None
    flips_labels: bool = False
    absent: bool = False
    """It sends nothing at all."""


def _scaled(factor: float) -> Tamper:
    """The change of the weights times `factor`; everything else as it is."""

    def tamper(value: Any, received: Any) -> Any:
        if not isinstance(value, Weights):
            return value
        before = received.params
        moved = {name: before[name] + factor * (after - before[name]) for name, after in value.params.items()}
        return Weights(moved, value.stats)

    return tamper


def _swapped(value: Any, _: Any) -> Any:
    """Every class gets the prototype of the next one, ten times as long."""
    return ClassTable(10 * value.rows.roll(1, 0), value.count.roll(1, 0)) if isinstance(value, ClassTable) else value


def _times(factor: float) -> Tamper:
    """Class sums and second moments times `factor`, of as many samples as before."""

    def tamper(value: Any, _: Any) -> Any:
        return ClassTable(factor * value.rows, value.count) if isinstance(value, ClassTable) else value

    return tamper


_ALL = frozenset(METHODS)
_SUMS = frozenset(_ONE_EXCHANGE)
HONEST = Attack("honest", _ALL)
ABSENT = Attack("absent", _ALL, absent=True)
ATTACKS = (
    HONEST,
    ABSENT,
    Attack(f"sign flip (change x {_REVERSED:g})", _ALL - _SUMS, _scaled(_REVERSED)),
    Attack(f"scaled update (change x {_INFLATED:g})", _ALL - _SUMS, _scaled(_INFLATED)),
    Attack("label flip", _ALL, flips_labels=True),
    Attack("prototype swap", _ALL - {"fedavg"}, _swapped),
    Attack(f"sums x {_REVERSED:g}", _SUMS, _times(_REVERSED)),
    Attack(f"sums x {_INFLATED:g}", _SUMS, _times(_INFLATED)),
)


@dataclass(frozen=True)
class _Poisoned(RunContext):
    """A federation in which one client's labels are wrong: class k of K is called K - 1 - k."""

    poisoned: str = ""

    def samples(self, client: str) -> ClientSamples:
        found = super().samples(client)
        if client == self.poisoned:
            found.y = len(self.dataset.classes) - 1 - found.y
        return found


class _Infiltrated:
    """An engine one of whose clients tampers with its uploads."""

    name, workers, scattered = "infiltrated", 1, False

    def __init__(self, prepared: Prepared, hostile: str, attack: Attack) -> None:
        self._engine = LoopEngine(prepared)
        self._templates, self._hostile, self._attack = prepared.templates, hostile, attack

    def perform(self, jobs: Sequence[tuple[Job, Message]]) -> Iterator[tuple[Job, Result]]:
        received = dict(jobs)
        for job, result in self._engine.perform(jobs):
            tamper = self._attack.tamper
            hostile = isinstance(job, Train) and job.client == self._hostile
            if hostile and self._attack.absent:
                yield job, Failed("it is absent")
            elif hostile and tamper and isinstance(result, Trained):
                down = decode(received[job].blob, self._templates.down, "server")
                yield job, replace(result, blob=self._forged(result.blob, down, tamper))
            else:
                yield job, result

    def close(self) -> None:
        self._engine.close()

    def _forged(self, blob: bytes, down: Record, tamper: Tamper) -> bytes:
        upload = decode(blob, self._templates.upload, self._hostile)
        known = parts_of(down)
        forged = {
            name: replace(item, value=tamper(item.value, known.get(name))) for name, item in parts_of(upload).items()
        }
        return encode(replace(upload, **forged), self._hostile).blob  # type: ignore[type-var]


def accuracy(method: str, attack: Attack, rule: str, **options: Any) -> float:
    """Accuracy of the final model on the test set, which is honest."""
    settings = {**OPTIONS["set"], **METHODS.get(method, {})}
    chosen = {**OPTIONS, "method": method, "set": settings, **options, "robust": None if rule == "none" else rule}
    if method in _ONE_EXCHANGE:
        chosen["rounds"] = 1
    with tempfile.TemporaryDirectory(prefix="protofed-benchmark-") as temporary:
        folder = RunFolder(Path(temporary) / "run")
        assembly = assemble(make_options(chosen), folder.clients)
        prepared, context = assembly.prepared, assembly.context
        hostile = context.partition.clients[0]
        if attack.flips_labels:
            known = {field.name: getattr(context, field.name) for field in fields(context)}
            prepared = replace(prepared, context=_Poisoned(**known, poisoned=hostile))
        engine = _Infiltrated(prepared, hostile, attack)
        folder.create()
        try:
            federation = Federation(prepared, engine, folder, RoundPolicy())
            return _last_accuracy(federation.rounds())
        finally:
            folder.release()


def _last_accuracy(rounds: Iterator[dict[str, Any]]) -> float:
    """After the last round, or after the last one that somebody could train in: an attack may end the federation."""
    last = float("nan")
    with suppress(RuntimeError, Diverged):
        for record in rounds:
            last = record["accuracy"]["global"]["average"]
    return last


class Cells:
    """Accuracies by what was measured, in a file if one is given: what is there is not measured again."""

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._known: dict[str, float] = json.loads(file.read_text()) if file is not None and file.exists() else {}

    def accuracy(self, method: str, attack: Attack, rule: str, seed: int, rounds: int) -> float:
        """Of one run."""
        key = f"{method}, {attack.name}, {rule}, seed {seed}, {rounds} rounds"
        if key not in self._known:
            self._known[key] = accuracy(method, attack, rule, seed=seed, rounds=rounds)
            if self._file is not None:
                self._file.write_text(json.dumps(self._known, indent=2) + "\n")
        return self._known[key]


def measure(
    methods: Sequence[str], seeds: Sequence[int], rounds: int, cells: Cells
) -> dict[tuple[str, str], dict[str, float]]:
    """Mean accuracy over the seeds, by method and attack, for each rule."""
    measured = {}
    for method in methods:
        for attack in ATTACKS:
            if method not in attack.methods:
                continue
            row = {
                rule: float(np.mean([cells.accuracy(method, attack, rule, seed, rounds) for seed in seeds]))
                for rule in RULES
            }
            measured[method, attack.name] = row
            print(method, attack.name, {rule: f"{100 * value:.1f}" for rule, value in row.items()}, flush=True)
    return measured


def _lost(measured: dict[tuple[str, str], dict[str, float]]) -> str:
    """The most that each rule has lost to an attack, against the plain mean of the others without the attacker."""
    calm = (HONEST.name, ABSENT.name)
    lines = []
    for method in dict.fromkeys(name for name, _ in measured):
        attacked = {attack: row for (name, attack), row in measured.items() if name == method and attack not in calm}
        kept = measured[method, ABSENT.name]["none"]
        worst = {rule: 100 * (kept - min(row[rule] for row in attacked.values())) for rule in RULES[1:]}
        lines.append([method, *(f"{points:.1f}" for points in worst.values())])
    what = "Points lost in the worst row, against the plain mean of the other four alone (negative: gained):"
    return f"{what}\n\n{table(['method', *RULES[1:]], lines)}"


def main(arguments: Sequence[str] | None = None) -> dict[tuple[str, str], dict[str, float]]:
    """Measure, print, and on demand write the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hostile", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8, help="rounds of each run (default 8)")
    parser.add_argument("--seeds", default="0,1", help="seeds to average over (default 0,1)")
    parser.add_argument("--methods", default=",".join(METHODS), help=f"default {','.join(METHODS)}")
    parser.add_argument("--keep", type=Path, help="a file of what is measured, to go on where it was stopped")
    parser.add_argument("--write", action="store_true", help="write the table to benchmarks/results")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    start, load = time.perf_counter(), os.getloadavg()[0]
    seeds = [int(seed) for seed in given.seeds.split(",")]
    measured = measure(given.methods.split(","), seeds, given.rounds, Cells(given.keep))
    rows = [[*key, *(f"{100 * row[rule]:.1f}" for rule in RULES)] for key, row in measured.items()]
    text = table(["method", "client 1 of 5", "mean", *RULES[1:]], rows) + f"\n\n{_lost(measured)}"
    print(f"\n{text}")
    if given.write:
        chosen = "" if given.methods == ",".join(METHODS) else f" --methods {given.methods}"
        command = f"python -m benchmarks.hostile --rounds {given.rounds} --seeds {given.seeds}{chosen} --write"
        told = ", ".join(f"{key} {value}" for key, value in OPTIONS.items() if key != "set")
        methods = given.methods.split(",")
        own = [f"{name} with {key}={value}" for name in methods for key, value in METHODS[name].items()]
        own += [f"{name} in one round" for name in methods if name in _ONE_EXCHANGE]
        how = "; ".join([f"{told}, {given.rounds} rounds", *own])
        goes = " Measured in several goes (--keep); the seconds are those of the last." if given.keep else ""
        what = f"{how}. Accuracy (%) of the final model, mean of seeds {given.seeds}.{goes}"
        body = f"{what}\n\n{text}"
        name = f"hostile_{given.methods.replace(',', '_')}" if chosen else "hostile"
        (RESULTS / f"{name}.md").write_text(
            report("One hostile client of five", command, body, time.perf_counter() - start, load)
        )
    return measured


if __name__ == "__main__":
    main()

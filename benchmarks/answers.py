"""Damaged, forged and absurd answers of one member at the server's door: none may crash it, hold it up or fill memory.

    python -m benchmarks.answers [--answers 100000] [--seed 0] [--write]

Honest answers of a site, plain and quantised, are cut, flipped, filled with absurd numbers and given other kinds, most
of them with checksums and sizes that are right. Each goes through the same checks as in a run: the envelope
(`clients/wire.py`), the door (`federation/door.py`), and where it is let in, the sum over clients.
"""

import argparse
import math
import os
import random
import resource
import struct
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load, save

from benchmarks import RESULTS, report, table
from protofed.clients import Evaluate, Failed, Job, Result, Train, Trained, decode_result, encode_result, pack, unpack
from protofed.engines.loop import LoopEngine
from protofed.errors import BadMessage
from protofed.federation.door import Door
from protofed.records import KINDS, Message, Tally, encode
from protofed.records.codec import _checksum
from protofed.runs.assembly import Assembly, assemble
from protofed.runs.options import make_options
from protofed.testing import toy_data

SLOWEST = 5.0
"""Seconds a single answer may take: a shared machine may stall, a hang takes longer."""
LONGEST_REASON = 300

ABSURD: tuple[Any, ...] = (
    None, True, -1, 0, 1, 240, -240, 2**53, 2**64, 10**400, 0.5, 1e30, 1e308, math.nan, math.inf, -math.inf, "", "1",
    "\x1b[2J\x1b]0;x\x07", "x" * 5000, [], [1], [[]], {}, {"": 1}, {"ce": 1e300}, {"\u202e": 1},
)  # fmt: skip
ODD_NUMBERS = (0.0, -1.0, 1.0, 0.5, 1e9, 1e30, -1e30, 3e38, 1e-40, math.nan, math.inf, -math.inf)

Damage = Callable[[bytes, random.Random], bytes]


@dataclass
class Outcome:
    """What became of the answers."""

    tried: Counter[str] = field(default_factory=Counter)
    let_in: Counter[str] = field(default_factory=Counter)
    crashes: list[str] = field(default_factory=list)
    slowest: float = 0.0
    megabytes: float = 0.0
    """By which the largest memory of the process grew."""

    @property
    def passed(self) -> bool:
        """Nothing but refusals and valid answers, in time and memory."""
        return not self.crashes and self.slowest < SLOWEST and self.megabytes < 500


def flipped(answer: bytes, rng: random.Random) -> bytes:
    """A few bytes changed anywhere."""
    damaged = bytearray(answer)
    for _ in range(rng.choice((1, 2, 8))):
        damaged[rng.randrange(len(damaged))] = rng.randrange(256)
    return bytes(damaged)


def cut(answer: bytes, rng: random.Random) -> bytes:
    """The end is missing."""
    return answer[: rng.randrange(len(answer))]


def spliced(answer: bytes, rng: random.Random) -> bytes:
    """A piece of it in another place."""
    begin, end, place = (rng.randrange(len(answer)) for _ in range(3))
    return answer[:place] + answer[begin:end] + answer[place:]


def noise(_: bytes, rng: random.Random) -> bytes:
    """Nothing of it."""
    return rng.randbytes(rng.choice((0, 3, 4, 5, 100, 3000)))


def absurd_header(answer: bytes, rng: random.Random) -> bytes:
    """An entry of the header, or of one of its entries, is something else."""
    header, body = unpack(answer, "b")
    place: Any = header
    while True:
        name = rng.choice(list(place))
        if isinstance(place[name], dict) and place[name] and rng.random() < 0.7:
            place = place[name]
            continue
        place[name] = rng.choice(ABSURD)
        return pack(header, body)


def other_entries(answer: bytes, rng: random.Random) -> bytes:
    """Entries of the header are missing, or there are more."""
    header, body = unpack(answer, "b")
    for name in rng.sample(list(header), rng.randrange(len(header) + 1)):
        del header[name]
    header |= {
        rng.choice(("result", "reason", "x", "parts", "shape")): rng.choice((*ABSURD, "failed", "score", "predicted"))
    }
    return pack(header, body)


def odd_values(answer: bytes, rng: random.Random) -> bytes:
    """Numbers of the record are odd; sizes and checksum are right."""
    return _rewritten(answer, lambda arrays: _change_values(arrays, rng))


def odd_shapes(answer: bytes, rng: random.Random) -> bytes:
    """Tensors of the record have other shapes, types or names; sizes and checksum are right."""
    return _rewritten(answer, lambda arrays: _change_shapes(arrays, rng))


DAMAGES: tuple[Damage, ...] = (
    flipped, cut, spliced, noise, absurd_header, absurd_header, other_entries, odd_values, odd_values, odd_shapes,
)  # fmt: skip


def _rewritten(answer: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    header, body = unpack(answer, "b")
    if "size" not in header:
        return answer[:-1]
    arrays = dict(load(body))
    change(arrays)
    blob = save(arrays, {"check": _checksum(arrays)})
    return pack({**header, "size": {**dict.fromkeys(KINDS, 0), "other": len(blob)}}, blob)


def _change_values(arrays: dict[str, Any], rng: random.Random) -> None:
    for name in rng.sample(sorted(arrays), rng.randint(1, min(3, len(arrays)))):
        array = arrays[name].copy()
        flat = array.reshape(-1)
        if flat.size:
            with np.errstate(all="ignore"):
                picked = np.array(rng.choice(ODD_NUMBERS)).astype(array.dtype)
            where = slice(None) if rng.random() < 0.3 else rng.randrange(flat.size)
            flat[where] = picked
        arrays[name] = array


def _change_shapes(arrays: dict[str, Any], rng: random.Random) -> None:
    name = rng.choice(sorted(arrays))
    array = arrays.pop(name)
    how = rng.randrange(5)
    if how == 0:
        arrays[name] = array[None]
    elif how == 1:
        arrays[name] = array.reshape(-1)[: rng.randrange(array.size + 1)].copy()
    elif how == 2:
        arrays[name] = array.astype(rng.choice((np.float64, np.float16, np.int64, np.uint8, np.bool_)))
    elif how == 3:
        arrays[name + rng.choice(("#grid", "/x", "\x1b[2J"))] = array


class Member:
    """One site of three: its honest answers, and a server's door."""

    def __init__(self, folder: Path, guard: str | None) -> None:
        options = {"method": "fedproto_avg", "data": toy_data(folder / "data", ("a", "b", "c")), "model": "mlp"}
        chosen = make_options({**options, "rounds": 1, "engine": "loop", "guard": guard, "set": {"model.hidden": 8}})
        (folder / "clients").mkdir()
        self.assembly: Assembly = assemble(chosen, folder / "clients")
        prepared = self.assembly.prepared
        context, server = prepared.context, prepared.templates.server
        down = encode(context.method.broadcast(server, context.at(0, "b-0")), "server")
        self.jobs: list[Job] = [Train(0, "b-0"), Evaluate("personal", 0, "b-0", "b")]
        results = dict(LoopEngine(prepared).perform([(job, down) for job in self.jobs]))
        self.answers = [encode_result(results[job]) for job in self.jobs]

    def receive(self, number: int, answer: bytes) -> Result:
        """What a run would make of an answer to one of the jobs; where it is let in, it is also added up."""
        job = self.jobs[number]
        try:
            result = decode_result(answer, "b")
        except BadMessage as error:
            result = Failed(str(error))
        door = Door(_Answers([(job, result)]), self.assembly.prepared)
        ((_, checked),) = door.perform([(job, Message(b"", encode(self.assembly.prepared.templates.down, "x").size))])
        if not isinstance(checked, Trained):
            return checked
        try:
            upload = door.upload("b-0", 0, checked.blob)
        except BadMessage as error:
            return Failed(str(error))
        tally = Tally()
        tally.add("b-0", upload)
        context = self.assembly.context
        state = context.method.aggregate(self.assembly.prepared.templates.server, tally.total(), context.at(0, None))
        encode(state, "server")  # refuses what is not finite
        return checked


class _Answers:
    """An engine whose answers are given."""

    name, workers, scattered, trains_groups = "answers", 1, True, False

    def __init__(self, answers: list[tuple[Job, Result]]) -> None:
        self._answers = answers

    def perform(self, jobs: Sequence[tuple[Job, Message]]) -> Iterator[tuple[Job, Result]]:
        yield from self._answers

    def close(self) -> None:
        """Nothing to stop."""


def attack(answers: int, seed: int = 0) -> Outcome:
    """So many damaged answers."""
    rng, outcome = random.Random(seed), Outcome()
    with tempfile.TemporaryDirectory(prefix="protofed-benchmark-") as temporary:
        members = []
        for name, guard in (("plain", None), ("quantised", "quantise=4")):
            (Path(temporary) / name).mkdir()
            members.append(Member(Path(temporary) / name, guard))
        for member in members:
            for number, honest in enumerate(member.answers):
                assert not isinstance(member.receive(number, honest), Failed), "an honest answer is refused"
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for _ in range(answers):
            member, damage, number = rng.choice(members), rng.choice(DAMAGES), int(rng.random() < 0.3)
            _try(member, damage, number, rng, outcome)
        outcome.megabytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    return outcome


def _try(member: Member, damage: Damage, number: int, rng: random.Random, outcome: Outcome) -> None:
    answer = damage(member.answers[number], rng)
    outcome.tried[damage.__name__] += 1
    begin = time.perf_counter()
    try:
        result = member.receive(number, answer)
    except Exception as error:
        outcome.crashes.append(f"{damage.__name__}: {type(error).__name__}: {error}"[:LONGEST_REASON])
        return
    outcome.slowest = max(outcome.slowest, time.perf_counter() - begin)
    if not isinstance(result, Failed):
        outcome.let_in[damage.__name__] += 1
    elif len(result.reason) > 2 * LONGEST_REASON or struct.pack("B", 27) in result.reason.encode():
        outcome.crashes.append(f"{damage.__name__}: a reason that cannot be shown")


def main(arguments: Sequence[str] | None = None) -> int:
    """Attack, and print what came of it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.answers", description=__doc__.splitlines()[0])
    parser.add_argument("--answers", type=int, default=100_000, help="how many (default 100000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="write the table to benchmarks/results/answers.md")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    begin, load_before = time.perf_counter(), os.getloadavg()[0]
    outcome = attack(given.answers, given.seed)
    seconds = time.perf_counter() - begin
    rows = [[name, tried, outcome.let_in[name]] for name, tried in outcome.tried.items()]
    told = (
        f"{sum(outcome.tried.values())} answers, the slowest {outcome.slowest:.2f} s; memory grew by "
        f"{outcome.megabytes:.0f} MB, {len(outcome.crashes)} crashes. What is let in is valid, if odd: finite, of the "
        "right shape, within what the census allows."
    )
    command = f"python -m benchmarks.answers --answers {given.answers} --seed {given.seed} --write"
    body = f"{told}\n\n{table(['damage', 'tried', 'let in'], rows)}"
    text = report("Damaged answers at the server's door", command, body, seconds, load_before)
    print("\n".join([text, *outcome.crashes[:20]]))
    if given.write:
        (RESULTS / "answers.md").write_text(text)
    return 0 if outcome.passed else 1


if __name__ == "__main__":
    sys.exit(main())

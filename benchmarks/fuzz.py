"""Damaged, forged and absurd messages at the codec's door: none may crash it, hold it up or get in.

    python -m benchmarks.fuzz [--messages 100000] [--seed 0] [--write]

Half of the messages carry a correct checksum, as a sender with a bug or bad intentions would give them. What is let in
must be a valid record by a check of its own (`faults_of`), whatever the codec thinks.
"""

import argparse
import json
import os
import random
import resource
import struct
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load, save
from torch import Tensor

from benchmarks import RESULTS, report, table
from protofed.errors import BadMessage
from protofed.records import ClassTable, Each, Features, Mean, PrototypeSet, Record, Weights, decode, encode

CLASSES, DIM = 3, 4
SLOWEST = 5.0
"""Seconds a single message may take: a shared machine may stall, a hang takes longer."""

Arrays = dict[str, np.ndarray]
Mutation = Callable[[random.Random], bytes]


class Upload(Record):
    """A field of every kind that methods send."""

    weights: Mean[Weights]
    table: Mean[ClassTable]
    own: Each[ClassTable]
    bank: Each[Features]
    centres: Each[PrototypeSet]
    steps: Mean[Tensor]


def upload(seed: int = 0) -> Upload:
    """A valid message."""
    rng = torch.Generator().manual_seed(seed)
    table = ClassTable(torch.randn(CLASSES, DIM, generator=rng), torch.tensor([3.0, 0.0, 2.0]))
    table = ClassTable(table.rows * table.held[:, None], table.count)
    return Upload(
        Mean(Weights({"fc.weight": torch.randn(2, 3, generator=rng)}, {"bn.mean": torch.zeros(3)}), 5.0),
        Mean(table, table.count.double()),
        Each(table),
        Each(Features(torch.randn(5, DIM, generator=rng), torch.tensor([0, 1, 2, 0, 1]), CLASSES)),
        Each(PrototypeSet(torch.randn(2, DIM, generator=rng), torch.tensor([0, 2]), CLASSES)),
        Mean(torch.tensor(7.0, dtype=torch.float64), 5.0),
    )


TEMPLATE = upload()
VALID = encode(TEMPLATE, "site").blob
HEADER = json.loads(VALID[8 : 8 + struct.unpack_from("<Q", VALID)[0]])
BODY = VALID[8 + struct.unpack_from("<Q", VALID)[0] :]
NAMES = [name for name in HEADER if name != "__metadata__"]
ODD_NUMBERS = (-(2**63), -1, 0, 1, 2, 3, 2**16, 2**31, 2**32, 2**40, 2**62, 2**63, 2**64, 10**30)
ODD_VALUES = (float("nan"), float("inf"), -float("inf"), -1.0, 1e300, 0.5)
ODD_TYPES = (
    "F64",
    "F32",
    "F16",
    "BF16",
    "F8_E4M3",
    "I64",
    "I32",
    "I16",
    "U8",
    "U64",
    "BOOL",
    "C64",
    "what",
    "",
    None,
    3,
)
MANY = (
    "".join(f', "x{number}": {{"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}' for number in range(3000)) + "}"
)


def signed(arrays: Arrays) -> bytes:
    """A message with a correct checksum, whatever is in it."""
    check = 0
    for name in sorted(arrays):
        array = arrays[name]
        check = zlib.crc32(f"{name}:{array.dtype.name}:{array.shape}".encode(), check)
        check = zlib.crc32(array.tobytes(), check)
    return save({name: np.ascontiguousarray(array) if array.ndim else array for name, array in arrays.items()},
                {"check": f"{check:08x}"})  # fmt: skip


def framed(header: bytes, body: bytes = BODY, length: int | None = None) -> bytes:
    """Header and body as they lie in a file, with any length for the header."""
    return struct.pack("<Q", (len(header) if length is None else length) % 2**64) + header + body


def flipped_bytes(rng: random.Random) -> bytes:
    damaged = bytearray(VALID)
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        damaged[rng.randrange(len(damaged))] = rng.randrange(256)
    return bytes(damaged)


def truncated(rng: random.Random) -> bytes:
    return VALID[: rng.randrange(len(VALID))]


def extended(rng: random.Random) -> bytes:
    return VALID + rng.randbytes(rng.choice((1, 8, 1000)))


def garbage(rng: random.Random) -> bytes:
    return rng.randbytes(rng.randrange(200))


def shuffled_blocks(rng: random.Random) -> bytes:
    cuts = sorted(rng.sample(range(len(VALID)), 3))
    parts = [VALID[start:end] for start, end in zip([0, *cuts], [*cuts, len(VALID)], strict=True)]
    rng.shuffle(parts)
    return b"".join(parts)


def lying_header(rng: random.Random) -> bytes:
    header = json.loads(json.dumps(HEADER))
    entry = header[rng.choice(NAMES)]
    match rng.randrange(5):
        case 0:
            entry["dtype"] = rng.choice(ODD_TYPES)
        case 1:
            entry["shape"] = [rng.choice(ODD_NUMBERS) for _ in range(rng.randrange(4))]
        case 2:
            entry["data_offsets"] = [rng.choice(ODD_NUMBERS) for _ in range(rng.randrange(4))]
        case 3:
            del entry[rng.choice(list(entry))]
        case 4:
            entry["shape"] = [0, *[2**31] * rng.randrange(1, 40)]
    return framed(json.dumps(header).encode())


def odd_metadata(rng: random.Random) -> bytes:
    odd: Any = rng.choice((None, [], 3, "x", {}, {"check": None}, {"check": "00000000"}, {"check": ["0"]}))
    return framed(json.dumps({**HEADER, "__metadata__": odd}).encode())


def twice_named(rng: random.Random) -> bytes:
    name = rng.choice(NAMES)
    again = json.dumps({name: HEADER[rng.choice(NAMES)]})[1:-1]
    text = json.dumps(HEADER)
    return framed((f"{{{again}, {text[1:]}" if rng.random() < 0.5 else f"{text[:-1]}, {again}}}").encode())


def deeply_nested(rng: random.Random) -> bytes:
    depth = rng.choice((10, 900, 3000))
    return framed(rng.choice((b"[", b'{"a":')) * depth)


def wrong_length(rng: random.Random) -> bytes:
    return framed(json.dumps(HEADER).encode(), length=rng.choice(ODD_NUMBERS) + rng.randrange(3))


def padded_header(rng: random.Random) -> bytes:
    return framed(json.dumps(HEADER).encode() + b" " * rng.choice((7, 5000, 200_000)))


def many_fields(rng: random.Random) -> bytes:
    return framed((json.dumps(HEADER)[:-1] + MANY[rng.randrange(9) :]).encode())


def arrays() -> Arrays:
    return {name: array.copy() for name, array in load(VALID).items()}


def swapped_fields(rng: random.Random) -> bytes:
    found = arrays()
    one, other = rng.sample(NAMES, 2)
    found[one], found[other] = found[other], found[one]
    return signed(found)


def odd_values(rng: random.Random) -> bytes:
    found = arrays()
    array = found[rng.choice(NAMES)]
    odd = rng.choice(ODD_VALUES) if array.dtype.kind == "f" else rng.choice((-1, CLASSES, 2**31, -(2**63)))
    with np.errstate(all="ignore"):
        array.reshape(-1)[rng.randrange(max(1, array.size)) : array.size][:1] = odd
    return signed(found)


def wrong_type(rng: random.Random) -> bytes:
    found = arrays()
    name = rng.choice(NAMES)
    with np.errstate(all="ignore"):
        found[name] = found[name].astype(rng.choice(("f8", "f4", "f2", "i8", "i4", "i2", "u1", "u8", "?")))
    return signed(found)


def wrong_shape(rng: random.Random) -> bytes:
    found = arrays()
    name = rng.choice(NAMES)
    array = found[name]
    shapes: list[np.ndarray] = [array[None], array.reshape(-1), np.repeat(array.reshape(-1), 2), array.reshape(-1)[:0]]
    if array.ndim:
        shapes += [array[:-1], np.concatenate([array, array]), array.T, array[..., :0]]
    found[name] = rng.choice(shapes)
    return signed(found)


def renamed(rng: random.Random) -> bytes:
    found = arrays()
    name = rng.choice(NAMES)
    odd = ("", "/", "../../etc/passwd", f"{name}/", f"/{name}", name.upper(), "x" * 900, "\0", "__metadata", "é")
    found[rng.choice(odd)] = found.pop(name)
    return signed(found)


def lacking_or_more(rng: random.Random) -> bytes:
    found = arrays()
    if rng.random() < 0.5:
        del found[rng.choice(NAMES)]
    else:
        found[f"more{rng.randrange(9)}"] = np.zeros(rng.randrange(4), dtype=np.float32)
    return signed(found)


def other_values(rng: random.Random) -> bytes:
    """Valid, but not what was sent before: to be let in."""
    return encode(upload(rng.randrange(2**31)), "site").blob


MUTATIONS: tuple[Mutation, ...] = (
    flipped_bytes,
    truncated,
    extended,
    garbage,
    shuffled_blocks,
    lying_header,
    odd_metadata,
    twice_named,
    deeply_nested,
    wrong_length,
    padded_header,
    many_fields,
    swapped_fields,
    odd_values,
    wrong_type,
    wrong_shape,
    renamed,
    lacking_or_more,
    other_values,
)


def faults_of(value: Any, like: Any, path: str = "") -> list[str]:
    """Everything that is wrong with a record that was let in."""
    if isinstance(like, Tensor):
        free = path.endswith(("bank/value/rows", "bank/value/labels", "centres/value/rows", "centres/value/labels"))
        wrong = value.dtype != like.dtype or value.shape[free:] != like.shape[free:] or value.ndim != like.ndim
        found = [f"{path}: {value.dtype} {list(value.shape)}"] if wrong else []
        return (
            found if not value.is_floating_point() or bool(value.isfinite().all()) else [*found, f"{path}: not finite"]
        )
    if isinstance(like, dict):
        found = [] if value.keys() == like.keys() else [f"{path}: other keys"]
        return found + [fault for key in like for fault in faults_of(value[key], like[key], f"{path}/{key}")]
    if not isinstance(like, Record):
        return []
    found = [] if type(value) is type(like) else [f"{path}: a {type(value).__name__}"]
    if isinstance(value, ClassTable):
        found += ["negative count"] if bool((value.count < 0).any()) else []
        found += ["a row of a class nobody holds"] if bool(value.rows[~value.held].any()) else []
    if isinstance(value, Features | PrototypeSet):
        found += ["rows without labels"] if len(value.rows) != len(value.labels) else []
        found += ["labels of no class"] if bool(((value.labels < 0) | (value.labels >= CLASSES)).any()) else []
    if isinstance(value, Mean):
        found += ["negative weight"] if bool((torch.as_tensor(value.weight) < 0).any()) else []
        return found + faults_of(value.value, like.value, f"{path}/value")
    for entry in fields(like):  # type: ignore[arg-type]
        found += faults_of(getattr(value, entry.name), getattr(like, entry.name), f"{path}/{entry.name}")
    return found


@dataclass
class Outcome:
    """What became of the messages."""

    tried: Counter[str] = field(default_factory=Counter)
    accepted: Counter[str] = field(default_factory=Counter)
    garbage: list[str] = field(default_factory=list)
    crashes: list[str] = field(default_factory=list)
    slowest: float = 0.0
    grown: int = 0
    """Bytes by which the process grew."""

    @property
    def passed(self) -> bool:
        return not self.garbage and not self.crashes and self.slowest < SLOWEST and self.grown < 256 * 2**20


def fuzz(messages: int, seed: int = 0) -> Outcome:
    """Send so many messages, every mutation in turn."""
    outcome = Outcome()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(messages):
        mutation = MUTATIONS[number % len(MUTATIONS)]
        name = mutation.__name__
        blob = mutation(random.Random(f"{seed}/{number}"))
        outcome.tried[name] += 1
        start = time.perf_counter()
        try:
            record = decode(blob, TEMPLATE, "site")
        except BadMessage:
            continue
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            outcome.crashes.append(f"{name} {seed}/{number}: {type(error).__name__}: {error}")
            continue
        finally:
            outcome.slowest = max(outcome.slowest, time.perf_counter() - start)
        outcome.accepted[name] += 1
        outcome.garbage += [f"{name} {seed}/{number}: {fault}" for fault in faults_of(record, TEMPLATE)]
    outcome.grown = 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    return outcome


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--messages", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="write the table to benchmarks/results/fuzz.md")
    given = parser.parse_args(arguments)
    start, load_before = time.perf_counter(), os.getloadavg()[0]
    outcome = fuzz(given.messages, given.seed)
    rows = [[name, tried, outcome.accepted[name]] for name, tried in outcome.tried.items()]
    told = (
        f"{given.messages} messages: {len(outcome.crashes)} crashes, {len(outcome.garbage)} faults let in, slowest "
        f"{1000 * outcome.slowest:.0f} ms, grown by {outcome.grown / 2**20:.0f} MiB"
    )
    command = f"python -m benchmarks.fuzz --messages {given.messages} --seed {given.seed} --write"
    body = f"{told}. What is let in is a valid record.\n\n{table(['mutation', 'tried', 'let in'], rows)}"
    text = report("Damaged messages at the codec", command, body, time.perf_counter() - start, load_before)
    print("\n".join([text, *[*outcome.crashes, *outcome.garbage][:20]]))
    if given.write:
        (RESULTS / "fuzz.md").write_text(text)
    return 0 if outcome.passed else 1


if __name__ == "__main__":
    sys.exit(main())

"""Who has what: sample indices per client, with a hash that says whether two runs had the same."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from protofed.data.npz import read_arrays
from protofed.errors import UserError

IntArray = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Partition:
    """Sample indices per client into the pooled training set; all a run needs to know about who holds what."""

    protocol: str
    clients: tuple[str, ...]
    train: Mapping[str, IntArray]
    holdout: Mapping[str, IntArray]
    domain: Mapping[str, str]
    held_out: tuple[str, ...] = ()
    warnings: tuple[str, ...] = field(default=())

    @property
    def hash(self) -> str:
        """Changes when a client, its images or a held-out domain changes, and only then."""
        digest = blake2b(digest_size=16)
        names = [self.clients, [self.domain[client] for client in self.clients], self.held_out]
        digest.update(json.dumps(names).encode())
        for client in self.clients:
            for indices in (self.train[client], self.holdout[client]):
                digest.update(len(indices).to_bytes(8, "little"))
                digest.update(np.ascontiguousarray(indices, dtype="<i8").tobytes())
        return digest.hexdigest()

    def pooled(self) -> "Partition":
        """All images at one client: the upper bound of a comparison."""
        return Partition(
            self.protocol,
            ("pool-0",),
            {"pool-0": np.sort(np.concatenate(list(self.train.values())))},
            {"pool-0": np.sort(np.concatenate(list(self.holdout.values())))},
            {"pool-0": ""},
            self.held_out,
            self.warnings,
        )

    def counts(self, y: Tensor | IntArray, classes: int) -> IntArray:
        """Training images of each class per client, [clients, classes], given the labels of the pooled set."""
        labels = np.asarray(y)
        return np.stack([np.bincount(labels[self.train[client]], minlength=classes) for client in self.clients])

    def rows(self, y: Tensor | IntArray, classes: Sequence[str]) -> list[dict[str, str | int]]:
        """A table for display: client, domain, number of images, number of classes held, images per class."""
        table: list[dict[str, str | int]] = []
        for client, counts in zip(self.clients, self.counts(y, len(classes)), strict=True):
            row: dict[str, str | int] = {
                "client": client,
                "domain": self.domain[client],
                "train": len(self.train[client]),
                "holdout": len(self.holdout[client]),
                "classes": int((counts > 0).sum()),
            }
            table.append(row | {name: int(count) for name, count in zip(classes, counts, strict=True)})
        return table

    def save(self, path: str | Path) -> None:
        """Write an npz file; making that atomic is up to the caller."""
        parts = {"train": self.train, "holdout": self.holdout}
        arrays: dict[str, Any] = {}
        for name, part in parts.items():
            arrays[name] = np.concatenate([part[client] for client in self.clients]).astype(np.int64)
            arrays[f"{name}_sizes"] = np.array([len(part[client]) for client in self.clients], dtype=np.int64)
        about = {
            "protocol": self.protocol,
            "clients": self.clients,
            "domain": [self.domain[client] for client in self.clients],
            "held_out": self.held_out,
            "warnings": self.warnings,
        }
        # An open file keeps numpy from adding a suffix to a temporary name.
        with Path(path).open("wb") as file:
            np.savez_compressed(file, about=np.array(json.dumps(about)), **arrays)

    @classmethod
    def load(cls, path: str | Path) -> "Partition":
        """Read what `save` wrote."""
        try:
            archive = read_arrays(Path(path))
            about = json.loads(str(archive["about"]))
            clients = tuple(about["clients"])
            parts = {
                name: np.split(archive[name], np.cumsum(archive[f"{name}_sizes"])[:-1]) for name in ("train", "holdout")
            }
        except FileNotFoundError:
            raise UserError(f"there is no partition {path}") from None
        except Exception as problem:
            raise UserError(f"{path} is not a readable partition ({problem})") from None
        return cls(
            protocol=about["protocol"],
            clients=clients,
            train=dict(zip(clients, parts["train"], strict=True)),
            holdout=dict(zip(clients, parts["holdout"], strict=True)),
            domain=dict(zip(clients, about["domain"], strict=True)),
            held_out=tuple(about["held_out"]),
            warnings=tuple(about["warnings"]),
        )


def stratified_split(labels: IntArray, fraction: float, rng: np.random.Generator) -> tuple[IntArray, IntArray]:
    """Positions to keep and positions to set aside, each sorted, about `fraction` of every class set aside.

    The number set aside is `fraction` of the whole, rounded; both sides get something where two samples and a
    positive fraction allow it. A class keeps its last sample unless there is no other way to reach the number.
    """
    total = len(labels)
    if total < 2 or fraction <= 0:
        return np.arange(total), np.empty(0, dtype=np.int64)
    target = min(max(round(fraction * total), 1), total - 1)
    _, class_of, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    quota = _quotas(sizes, target, rng)

    shuffled = rng.permutation(total)
    by_class = shuffled[np.argsort(class_of[shuffled], kind="stable")]
    rank_in_class = np.arange(total) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    aside = rank_in_class < np.repeat(quota, sizes)
    return np.sort(by_class[~aside]), np.sort(by_class[aside])


def _quotas(sizes: IntArray, target: int, rng: np.random.Generator) -> IntArray:
    """How many of each class to set aside: proportional, rounded by largest remainder, `target` in total."""
    share = sizes * (target / sizes.sum())
    quota: IntArray = np.floor(share + 1e-9).astype(np.int64)
    order = np.lexsort((rng.random(len(sizes)), quota - share))
    for keep in (1, 0):
        for group in order:
            if quota.sum() == target:
                return quota
            if quota[group] < sizes[group] - keep:
                quota[group] += 1
    return quota

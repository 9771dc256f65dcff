"""Rounds played by hand, for vectors that are worked out on paper."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from protofed.clients.optimizers import kept_state, make_optimizers, restore_state
from protofed.clients.training import train
from protofed.method import At, Method
from protofed.models.net import Net
from protofed.records import Record, Tally


class Steps:
    """In the place of a client's samples: `steps` batches of ones per epoch."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def epoch(self, size: int, order: object, chance: object) -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(self.steps):
            yield torch.ones(2, 1), torch.zeros(2, dtype=torch.long)


def take_steps(method: Method, net: Net, at: At, steps: int, kept: dict[str, Tensor] | None = None) -> At:
    """Train for so many steps; where `upload` would stand afterwards. `kept` is what optimisers remember."""
    at = replace(at, start=net.pick())
    optimizers = make_optimizers(method, net, at.plan, at.lr)
    if kept:
        restore_state(method, optimizers, kept)
    train(method, net, Steps(steps), at, optimizers)  # type: ignore[arg-type]
    if kept is not None:
        kept.update(kept_state(method, optimizers))
    return replace(at, taken=optimizers[0].taken, reach=optimizers[0].reach)


def total(uploads: Mapping[str, Record]) -> Any:
    """What `aggregate` sees of the uploads."""
    tally = Tally()
    for client, upload in uploads.items():
        tally.add(client, upload)
    return tally.total()

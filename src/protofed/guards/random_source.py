"""Where a guard's random numbers come from: the run's seed, or the operating system."""

import secrets
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from protofed.guards.guard import Guard
from protofed.method import At


class RandomSource(Protocol):
    """Random numbers for one purpose of one client in one round."""

    def normal(self, like: Tensor) -> Tensor:
        """Independent standard normal numbers in the shape, type and place of `like`."""

    def uniform(self, size: int) -> Tensor:
        """Independent numbers between 0 and 1."""


def source_of(guard: Guard, at: At, purpose: str) -> RandomSource:
    """The guard's source; from the seed, the same numbers come again when a run is repeated."""
    return _SystemSource() if guard.source == "system" else _SeededSource(at.rng(f"guard {purpose}"))


class _SeededSource:
    """Repeatable: who knows the seed knows the noise."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def normal(self, like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=self._generator, dtype=torch.float64).to(like)

    def uniform(self, size: int) -> Tensor:
        return torch.rand(size, generator=self._generator, dtype=torch.float64)


class _SystemSource:
    """Unpredictable: 52 bits of the operating system's secure source for each number, never the same again."""

    def normal(self, like: Tensor) -> Tensor:
        from scipy.special import ndtri  # scipy takes long to import, and few runs need it

        quantiles = ndtri(self.uniform(like.numel()).numpy())
        return torch.from_numpy(np.asarray(quantiles)).reshape(like.shape).to(like)

    def uniform(self, size: int) -> Tensor:
        bits = np.frombuffer(secrets.token_bytes(8 * size), dtype=np.uint64) >> np.uint64(12)
        return torch.from_numpy((bits.astype(np.float64) + 0.5) / 2.0**52)

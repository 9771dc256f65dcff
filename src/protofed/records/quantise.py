"""Numbers on a grid of a few bits: what a tensor becomes on the wire where a guard asks for it.

Values are rounded up or down at random, in proportion, so that the mean over many clients is not biased.
"""

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

GRID = "#grid"
"""Ends the name of the tensor that says how to read another: lowest value, step, and the shape."""

_LONGEST_SIDE = 2**40
"""No side of a tensor is longer, and no tensor larger; beyond it a grid is no shape that torch could count with."""
_MOST_SIDES = 16


@dataclass(frozen=True)
class Quantiser:
    """Rounds to 2^bits levels between the lowest and the highest value of each tensor."""

    bits: int
    rng: torch.Generator

    def pack(self, array: NDArray[Any]) -> tuple[NDArray[np.uint8], NDArray[Any]]:
        """The codes, as many to a byte as fit, and their grid."""
        exact = array.astype(np.float64).reshape(-1)
        low, high = (float(exact.min()), float(exact.max())) if exact.size else (0.0, 0.0)
        step = (high - low) / (2**self.bits - 1)
        chance = torch.rand(exact.size, generator=self.rng, dtype=torch.float64).numpy()
        levels = np.floor((exact - low) / step + chance) if step > 0 else np.zeros_like(exact)
        codes = np.clip(levels, 0, 2**self.bits - 1).astype(np.uint8)
        bits = np.unpackbits(codes[:, None], axis=1)[:, 8 - self.bits :]
        return np.packbits(bits), np.array([low, step, *array.shape], dtype=array.dtype)


def unpack(codes: Tensor, grid: Tensor, bits: int) -> Tensor:
    """The tensor again, on its grid; ValueError where codes and grid do not belong together."""
    if codes.dtype != torch.uint8 or codes.ndim != 1 or grid.ndim != 1 or len(grid) < 2 or not grid.isfinite().all():
        raise ValueError("it is not a quantised tensor")
    low, step, *sides = grid.double().tolist()
    if len(sides) > _MOST_SIDES or any(not 0 <= side <= _LONGEST_SIDE or side != int(side) for side in sides):
        raise ValueError("its grid is for a tensor of another size")
    shape = [int(side) for side in sides]
    # Also where the product is zero: 0 x 1e6 would fit no codes at all.
    if len(codes) != -(-prod(shape) * bits // 8) or prod(max(side, 1) for side in shape) > _LONGEST_SIDE:
        raise ValueError("its grid is for a tensor of another size")
    flat = np.unpackbits(codes.numpy())[: prod(shape) * bits].reshape(-1, bits)
    levels = torch.from_numpy(flat.astype(np.float64) @ 2.0 ** np.arange(bits - 1, -1, -1))
    values: Tensor = low + step * levels
    return values.reshape(shape).to(grid.dtype)

"""Regularisation and temperature of a head, chosen by sites that score heads made without them."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from protofed.records import Mean

LAMS = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""What sites choose `lam` from."""
TEMPERATURES = tuple(10 ** (step / 6 - 3) for step in range(25))
"""From 0.001 to 10."""
_WORST = -16.0
"""A mean log-likelihood below this is as bad as it gets."""


def no_scores(lams: Sequence[float]) -> Mean[Tensor]:
    """Of somebody who has not scored anything."""
    return Mean(torch.zeros(len(lams), len(TEMPERATURES)), 0.0)


def scores(logits: Sequence[Tensor], y: Tensor, lams: Sequence[float]) -> Mean[Tensor]:
    """Mean log-likelihood of the labels for every lam (one tensor of logits each) and temperature."""
    found = no_scores(lams).value
    for row, of_lam in enumerate(logits if len(y) else ()):
        for column, tau in enumerate(TEMPERATURES):
            found[row, column] = max(-functional.cross_entropy(of_lam / tau, y).item(), _WORST)
    return Mean(found, float(len(y)))


def best(scores: Tensor, lams: Sequence[float]) -> tuple[float, float] | None:
    """lam and temperature with the highest likelihood; None where nobody could score."""
    if not scores.any():
        return None
    row, column = divmod(int(scores.argmax()), len(TEMPERATURES))
    return lams[row], TEMPERATURES[column]

"""A cap on what one client counts in a mean, whatever weight it claims."""

from itertools import takewhile

import torch
from torch import Tensor


def capped(weights: Tensor, share: float) -> Tensor:
    """Weights of clients, [N] or [N, C], none of which is more than `share` of their sum; too large ones are cut.

    Where there are too few clients for that, all count the same. Weights that are small enough stay as they are.
    """
    if weights.ndim == 1:
        return _capped(weights, share)
    return torch.stack([_capped(column, share) for column in weights.unbind(1)], 1)


def _capped(weights: Tensor, share: float) -> Tensor:
    held = weights[weights > 0].sort(descending=True).values
    if not len(held) or held[0] <= share * held.sum():
        return weights
    if len(held) * share <= 1:
        return torch.where(weights > 0, held[-1], weights)
    # Of the k largest, each cut to c: c = share (k c + the sum of the others). The last k leaves 1 - share k <= share.
    cuts = takewhile(lambda k: share * k < 1, range(1, len(held)))
    caps = ((k, share * held[k:].sum() / (1 - share * k)) for k in cuts)
    cap = next(cap for k, cap in caps if held[k] <= cap)
    return weights.clamp(max=float(cap))

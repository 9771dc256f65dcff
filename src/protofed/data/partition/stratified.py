"""Dividing labelled samples in two while keeping the mix of labels."""

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]


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

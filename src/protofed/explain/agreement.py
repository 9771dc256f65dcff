"""Whether several clients' models point at the same part of an image."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import mean
from typing import Any

import numpy as np

from protofed.explain.explanation import Explanation
from protofed.explain.maps import Box, random_box
from protofed.seeding import numpy_generator

_RANDOMS = 20


def agreement(explained: Mapping[str, Sequence[Explanation]], classes: Sequence[str], seed: int = 0) -> dict[str, Any]:
    """How far clients agree over images: in class, and where they agree in class, in box and map.

    `pairs`: for every two clients; `classes`: for every predicted class; `images`: for every image; and `overall`:
    `compared` (pairs of views), `same_class` (share of them that predict the same), `iou` (boxes' intersection over
    union; flat maps have none), `iou_random` (that of random boxes of the same sizes) and `rank_correlation`
    (Spearman's, of the maps). Null where there is nothing to compare.
    """
    pairs = list(combinations(explained, 2))
    compared: list[dict[str, Any]] = []
    for left, right in pairs:
        rng = numpy_generator(seed, "agreement", left, right)
        for number, (one, other) in enumerate(zip(explained[left], explained[right], strict=True)):
            compared.append({"pair": (left, right), "image": number, **_compared(one, other, rng)})

    def over(key: str, value: Any) -> dict[str, Any]:
        return _means([entry for entry in compared if entry[key] == value])

    count = len(next(iter(explained.values()))) if explained else 0
    return {
        "pairs": [{"clients": list(pair), **over("pair", pair)} for pair in pairs],
        "classes": {name: over("class", k) for k, name in enumerate(classes)},
        "images": [over("image", number) for number in range(count)],
        "overall": _means(compared),
    }


def _compared(one: Explanation, other: Explanation, rng: np.random.Generator) -> dict[str, Any]:
    """Two clients on one image; their maps say the same thing only where they speak for the same class."""
    from scipy.stats import spearmanr  # scipy takes long to import

    nothing = {"class": None, "iou": None, "iou_random": None, "rank_correlation": None}
    if one.predicted != other.predicted:
        return {"same_class": 0.0, **nothing}
    comparison = {"same_class": 1.0, **nothing, "class": one.predicted}
    left, right = one.strongest, other.strongest
    if left.box is None or right.box is None:
        return comparison
    size = (left.map.shape[0], left.map.shape[1])
    return comparison | {
        "iou": left.box.overlap(right.box),
        "iou_random": _by_chance(left.box, right.box, size, rng),
        "rank_correlation": float(spearmanr(left.map.ravel(), right.map.ravel()).statistic),
    }


def _by_chance(one: Box, other: Box, size: tuple[int, int], rng: np.random.Generator) -> float:
    """Mean overlap of two boxes of these sizes at random places."""
    return mean(random_box(one, size, rng).overlap(random_box(other, size, rng)) for _ in range(_RANDOMS))


def _means(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {"compared": len(entries)}
    for key in ("same_class", "iou", "iou_random", "rank_correlation"):
        values = [entry[key] for entry in entries if entry[key] is not None]
        result[key] = mean(values) if values else None
    return result

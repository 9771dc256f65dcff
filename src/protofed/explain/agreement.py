"""Whether several clients' models point at the same part of an image."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import mean
from typing import Any

from scipy.stats import spearmanr

from protofed.explain.evidence import Explanation


def agreement(explained: Mapping[str, Sequence[Explanation]], classes: Sequence[str]) -> dict[str, Any]:
    """How far clients agree over images: in class, and where they agree in class, in box and map.

    `pairs`: for every two clients, and `classes`: for every predicted class, and `overall`: `images` compared,
    `same_class` (share of pairs that predict the same), `iou` (boxes' intersection over union; flat maps have none)
    and `rank_correlation` (Spearman's, of the maps). Null where there is nothing to compare.
    """
    compared: list[dict[str, Any]] = []
    for left, right in combinations(explained, 2):
        for number, (one, other) in enumerate(zip(explained[left], explained[right], strict=True)):
            compared.append({"pair": (left, right), "image": number, **_compared(one, other)})
    return {
        "pairs": [
            {"clients": [left, right], **_means([entry for entry in compared if entry["pair"] == (left, right)])}
            for left, right in combinations(explained, 2)
        ],
        "classes": {
            name: _means([entry for entry in compared if entry["class"] == k]) for k, name in enumerate(classes)
        },
        "overall": _means(compared),
    }


def _compared(one: Explanation, other: Explanation) -> dict[str, Any]:
    """Two clients on one image; their maps say the same thing only where they speak for the same class."""
    if one.predicted != other.predicted:
        return {"same_class": 0.0, "class": None, "iou": None, "rank_correlation": None}
    left, right = one.strongest, other.strongest
    boxes = None if left.box is None or right.box is None else left.box.overlap(right.box)
    flat = left.box is None or right.box is None
    correlation = None if flat else float(spearmanr(left.map.ravel(), right.map.ravel()).statistic)
    return {"same_class": 1.0, "class": one.predicted, "iou": boxes, "rank_correlation": correlation}


def _means(entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {"images": len(entries)}
    for key in ("same_class", "iou", "rank_correlation"):
        values = [entry[key] for entry in entries if entry[key] is not None]
        result[key] = mean(values) if values else None
    return result

"""Two methods on the same test images: is their difference more than these images would give by chance?

DeLong's test for the area under a ROC curve, McNemar's exact test for accuracy, and the bootstrap for everything else.
Every method has its test sets by name, and of each one prediction for every seed.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from math import erfc, sqrt
from statistics import NormalDist
from typing import NamedTuple, TypedDict

import numpy as np

from protofed.metrics.catalog import ACCURACY, Metric
from protofed.metrics.intervals import average_draws, draws_of, percentile_interval, resamples_for
from protofed.metrics.measures import Figures
from protofed.metrics.predictions import PredictedSet

Panel = Mapping[str, Sequence[PredictedSet]]
"""The predictions of a method: per test set one for every seed."""

Draw = Callable[[PredictedSet, Sequence[Metric], int], Mapping[str, Figures]]

_SAME = 1e-12
"""Variances and differences below this are rounding."""


class PairedOnImages(TypedDict):
    """A method against the baseline on the same test images."""

    difference: float
    interval: list[float] | None
    p: float | None
    images: int
    seeds: int
    test: str


class _Pair(NamedTuple):
    own: PredictedSet
    other: PredictedSet
    share: float
    """Of the mean over all pairs."""


def compare_on_images(metric: Metric, own: Panel, baseline: Panel, draws: Draw = draws_of) -> PairedOnImages | None:
    """The difference of the means over test sets and seeds; None where the images are not the same.

    `draws` gives figures on resampled images.
    """
    pairs = _pairs(metric, own, baseline)
    if not pairs:
        return None
    difference = sum(pair.share * (_value(metric, pair.own) - _value(metric, pair.other)) for pair in pairs)
    seen = {image for pair in pairs for image in pair.own.samples.tolist()}
    seeds = len(next(iter(own.values())))
    once = sum(len(pair.own) for pair in pairs) == len(seen)
    resamples = resamples_for(predictions[0] for predictions in own.values())

    def draw(predicted: PredictedSet) -> Figures:
        return draws(predicted, [metric], resamples)[metric.name]

    interval, p, name = _tested(metric, pairs, difference, once, draw)
    return {
        "difference": difference,
        "interval": interval,
        "p": p,
        "images": len(seen),
        "seeds": seeds,
        "test": name,
    }


def mcnemar_p(only_first: int, only_second: int) -> float:
    """Exact: how likely a split of the images that only one of two classifies correctly is at least this uneven."""
    total, fewer = only_first + only_second, min(only_first, only_second)
    term, below = 1, 0
    for k in range(fewer + 1):
        below += term
        term = term * (total - k) // (k + 1)
    return float(min(1.0, 2 * below / 2**total))


def paired_delong(pairs: Sequence[tuple[PredictedSet, PredictedSet, float]]) -> tuple[float, float]:
    """Weighted sum of the differences of the areas under the ROC curves of two models, and its variance.

    After DeLong, DeLong and Clarke-Pearson (1988). Pairs on the same images add up image by image; different test sets
    are independent.
    """
    difference = 0.0
    by_images: dict[str, list[tuple[Figures, Figures]]] = defaultdict(list)
    for own, other, share in pairs:
        (won, lost), (won_there, lost_there) = _placements(own), _placements(other)
        difference += share * float(won.mean() - won_there.mean())
        by_images[own.images].append((share * (won - won_there), share * (lost - lost_there)))
    variance = 0.0
    for placements in by_images.values():
        for side in zip(*placements, strict=True):
            together = np.sum(side, axis=0)
            variance += float(together.var(ddof=1)) / len(together) if len(together) > 1 else np.nan
    return difference, variance


def _tested(
    metric: Metric, pairs: Sequence[_Pair], difference: float, once: bool, draw: Callable[[PredictedSet], Figures]
) -> tuple[list[float] | None, float | None, str]:
    """Interval, p-value and the name of the test; `once`: every image occurs once."""
    if metric.name == "auc" and pairs[0].own.classes == 2:
        variance = paired_delong(pairs)[1]
        if np.isnan(variance):
            return None, None, "DeLong"
        reach = NormalDist().inv_cdf(0.975) * sqrt(variance)
        return [difference - reach, difference + reach], _normal_p(difference, variance), "DeLong"
    # Both models of a pair see the same resamples.
    draws = average_draws([draw(pair.own) - draw(pair.other) for pair in pairs])
    interval = percentile_interval(draws)
    if metric.name == ACCURACY and once:
        return interval, _mcnemar(pairs), "exact McNemar"
    return interval, _bootstrap_p(draws), "bootstrap"


def _pairs(metric: Metric, own: Panel, baseline: Panel) -> list[_Pair]:
    """Predictions of the same images, where the metric is defined for both."""
    if own.keys() != baseline.keys():
        return []
    found: list[tuple[PredictedSet, PredictedSet]] = []
    for part, predictions in own.items():
        for one, other in zip(predictions, baseline[part], strict=True):
            if one.in_order.images != other.in_order.images:
                return []
            if metric.of(one) is not None and metric.of(other) is not None:
                found.append((one.in_order, other.in_order))
    return [_Pair(one, other, 1 / len(found)) for one, other in found]


def _value(metric: Metric, predicted: PredictedSet) -> float:
    value = metric.of(predicted)
    assert value is not None, "pairs without a value are left out"
    return value


def _placements(predicted: PredictedSet) -> tuple[Figures, Figures]:
    """Per positive the part of the negatives that it beats, and per negative the part of the positives that beat it."""
    score, positive = predicted.probabilities[:, 1], predicted.labels == 1
    own, others = score[positive], score[~positive]

    def part_below(values: Figures, ranked: Figures) -> Figures:
        below, upto = np.searchsorted(ranked, values, "left"), np.searchsorted(ranked, values, "right")
        return np.asarray((below + upto) / (2 * len(ranked)))

    return part_below(own, np.sort(others)), 1 - part_below(others, np.sort(own))


def _normal_p(difference: float, variance: float) -> float | None:
    if variance > _SAME:
        return erfc(abs(difference) / sqrt(2 * variance))
    return 1.0 if abs(difference) <= _SAME else None


def _mcnemar(pairs: Sequence[_Pair]) -> float:
    first = second = 0
    for own, other, _ in pairs:
        right = own.probabilities.argmax(1) == own.labels
        right_there = other.probabilities.argmax(1) == other.labels
        first += int((right & ~right_there).sum())
        second += int((~right & right_there).sum())
    return mcnemar_p(first, second)


def _bootstrap_p(draws: Figures) -> float | None:
    """Two-sided: how often the difference of a resample has the other sign."""
    defined = draws[~np.isnan(draws)]
    if not len(defined):
        return None
    fewer = min(int((defined <= _SAME).sum()), int((defined >= -_SAME).sum()))
    return min(1.0, 2 * (fewer + 1) / (len(defined) + 1))

"""Curves to be drawn: how probabilities and frequencies agree, and what each threshold finds at what price."""

from typing import NamedTuple

import numpy as np

from protofed.metrics.measures import BINS, WeightedImages, bin_of, claims
from protofed.metrics.predictions import PredictedSet


class CurvePoint(NamedTuple):
    """The images of one bin of a reliability curve."""

    claimed: float
    """Mean probability."""
    happened: float
    """How often it came true."""
    images: int


def reliability_curve(predicted: PredictedSet) -> list[CurvePoint]:
    """A point for every bin that has images; a calibrated model has them on the diagonal."""
    claimed, happened = claims(predicted.labels, predicted.probabilities)
    bins = bin_of(claimed)
    count = np.bincount(bins, minlength=BINS)
    sums = [np.bincount(bins, weights=values, minlength=BINS) for values in (claimed, happened)]
    return [
        CurvePoint(float(sums[0][k] / count[k]), float(sums[1][k] / count[k]), int(count[k]))
        for k in np.flatnonzero(count)
    ]


def roc_curve(predicted: PredictedSet) -> list[tuple[float, float]]:
    """(1 - specificity, sensitivity) of every threshold, of two classes; empty where one has no images."""
    found, wrong = WeightedImages.once(predicted).above(1)
    if not found[0, -1] or not wrong[0, -1]:
        return []
    x, y = wrong[0] / wrong[0, -1], found[0] / found[0, -1]
    # A point in the middle of a straight piece is not needed to draw it.
    corner = np.ones(len(x), dtype=bool)
    corner[1:-1] = (np.diff(x)[:-1] * np.diff(y)[1:]) != (np.diff(x)[1:] * np.diff(y)[:-1])
    return list(zip(x[corner].tolist(), y[corner].tolist(), strict=True))

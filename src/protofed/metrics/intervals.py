"""Bootstrap over test images: how much a figure would vary with other images of the same kind.

Images are drawn with replacement within each class, so every sample has the class counts of the test set. The draws
depend on nothing but the images, so models that were tested on the same images are resampled together, and figures of
several test sets can be averaged draw by draw.
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from protofed.metrics.catalog import Metric
from protofed.metrics.measures import Figures, WeightedImages
from protofed.metrics.predictions import Labels, PredictedSet
from protofed.seeding import numpy_generator

_MOST_RESAMPLES, _FEWEST_RESAMPLES = 1000, 100
_WORK = 1e7
"""Images x classes x resamples that take a fraction of a second."""
_AT_ONCE = 2**21
"""Numbers in a piece of the table of weights."""


def resamples_for(predicted: Iterable[PredictedSet]) -> int:
    """How many resamples are worth their time for these test sets together: 1000, or fewer where they are large."""
    size = sum(len(each) * each.classes for each in predicted)
    return int(np.clip(_WORK / max(size, 1), _FEWEST_RESAMPLES, _MOST_RESAMPLES))


def draws_of(predicted: PredictedSet, metrics: Sequence[Metric], resamples: int) -> dict[str, Figures]:
    """Each metric on every resample, [resamples], NaN where it is not defined."""
    if not len(predicted) or not np.isfinite(predicted.probabilities).all():
        return {metric.name: np.full(resamples, np.nan) for metric in metrics}
    pieces: dict[str, list[Figures]] = {metric.name: [] for metric in metrics}
    for weights in _weights(predicted, resamples):
        images = WeightedImages(predicted.labels, predicted.probabilities, weights)
        for metric in metrics:
            pieces[metric.name].append(metric.compute(images))
    return {name: np.concatenate(values) for name, values in pieces.items()}


def average_draws(draws: Sequence[Figures]) -> Figures:
    """The mean over test sets, draw by draw; a set on which a figure is never defined does not count."""
    defined = [each for each in draws if not np.isnan(each).all()]
    return np.asarray(np.mean(defined, axis=0)) if defined else np.full(len(draws[0]) if draws else 0, np.nan)


def percentile_interval(draws: Figures, confidence: float = 0.95) -> list[float] | None:
    """From the draws that are defined; None where there are none."""
    defined = draws[~np.isnan(draws)]
    if not len(defined):
        return None
    low, high = np.quantile(defined, [(1 - confidence) / 2, (1 + confidence) / 2])
    return [float(low), float(high)]


def _weights(predicted: PredictedSet, resamples: int) -> Iterator[Figures]:
    """How often each image is drawn, [some resamples, n], until there are enough."""
    rng = numpy_generator(0, "bootstrap", predicted.images)
    strata = [np.flatnonzero(predicted.labels == k) for k in np.unique(predicted.labels)]
    step = max(1, _AT_ONCE // len(predicted))
    for start in range(0, resamples, step):
        count = min(step, resamples - start)
        weights = np.empty((count, len(predicted)))
        for stratum in strata:
            weights[:, stratum] = _drawn(rng, count, stratum)
        yield weights


def _drawn(rng: np.random.Generator, count: int, stratum: Labels | NDArray[np.intp]) -> NDArray[np.intp]:
    """How often each of a stratum is among as many draws, for every resample."""
    size = len(stratum)
    drawn = rng.integers(0, size, size=(count, size)) + size * np.arange(count)[:, None]
    return np.bincount(drawn.ravel(), minlength=count * size).reshape(count, size)

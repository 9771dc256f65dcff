"""The measures themselves, for many weightings of the same images at once, so that a bootstrap is one computation.

A weighting says how often each image counts. Every measure gives one figure per weighting, NaN where it is not
defined. Of two classes the second is the positive one.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protofed.metrics.predictions import Labels, PredictedSet, Probabilities

Figures = NDArray[np.float64]

BINS = 10
"""Of the reliability curve, and so of the calibration error."""

_ROUNDING = 1e-12


@dataclass(frozen=True, eq=False)
class WeightedImages:
    """Labels [n] and probabilities [n, C] of images, and how often each counts in every weighting, [B, n]."""

    labels: Labels
    probabilities: Probabilities
    weights: Figures

    @classmethod
    def once(cls, predicted: PredictedSet) -> "WeightedImages":
        """Every image counts once."""
        return cls(predicted.labels, predicted.probabilities, np.ones((1, len(predicted))))

    @property
    def classes(self) -> int:
        """How many there are."""
        return int(self.probabilities.shape[1])

    @cached_property
    def predicted(self) -> Labels:
        """The most probable class of each image."""
        return np.asarray(self.probabilities.argmax(1), dtype=np.int64)

    @cached_property
    def total(self) -> Figures:
        """Images of each weighting, [B]."""
        return np.asarray(self.weights.sum(1))

    @cached_property
    def true(self) -> Figures:
        """Images of each class, [B, C]."""
        return self._by_class(self.labels)

    @cached_property
    def said(self) -> Figures:
        """Images that are said to be of each class, [B, C]."""
        return self._by_class(self.predicted)

    @cached_property
    def hits(self) -> Figures:
        """Images of each class that are said to be of it, [B, C]."""
        right = self.predicted == self.labels
        return np.asarray(self.weights[:, right] @ np.eye(self.classes)[self.labels[right]])

    @cached_property
    def recall(self) -> Figures:
        """The part of each class that is found, [B, C]."""
        return _ratio(self.hits, self.true)

    def above(self, k: int) -> tuple[Figures, Figures]:
        """Images of class k, and others, that pass each threshold on its probability, from none to all: [B, T + 1]."""
        score = self.probabilities[:, k]
        order = np.argsort(-score, kind="stable")
        ranked, of_class = score[order], self.labels[order] == k
        # Images with equal scores pass a threshold together.
        ends = np.flatnonzero(np.append(ranked[1:] != ranked[:-1], True))
        weights = self.weights[:, order]
        first = np.zeros((len(weights), 1))
        passed = np.cumsum(weights, axis=1)[:, ends]
        found = np.cumsum(weights * of_class, axis=1)[:, ends]
        return np.concatenate([first, found], 1), np.concatenate([first, passed - found], 1)

    def _by_class(self, labels: Labels) -> Figures:
        return np.asarray(self.weights @ np.eye(self.classes)[labels])


def confusion_matrix(labels: Labels, probabilities: Probabilities) -> NDArray[np.int64]:
    """Images by true class (rows) and predicted class (columns)."""
    classes = probabilities.shape[1]
    cells = labels * classes + probabilities.argmax(1)
    return np.bincount(cells, minlength=classes * classes).reshape(classes, classes)


def accuracy(images: WeightedImages) -> Figures:
    """The part that is classified correctly."""
    return _ratio(images.hits.sum(1), images.total)


def balanced_accuracy(images: WeightedImages) -> Figures:
    """Mean recall of the classes there are."""
    return _mean_of_defined(images.recall)


def macro_f1(images: WeightedImages) -> Figures:
    """Mean over classes of the harmonic mean of precision and recall; a class nobody has or predicts does not count."""
    return _mean_of_defined(_ratio(2 * images.hits, images.true + images.said))


def auc(images: WeightedImages) -> Figures:
    """Area under the ROC curve; of more than two classes its mean over each against the rest."""
    classes = [1] if images.classes == 2 else range(images.classes)
    return np.asarray(np.mean([_area(images, k) for k in classes], axis=0))


def sensitivity(images: WeightedImages) -> Figures:
    """The part of the positives that is found where the more probable class is taken."""
    return images.recall[:, 1]


def specificity(images: WeightedImages) -> Figures:
    """The part of the negatives that is left alone where the more probable class is taken."""
    return images.recall[:, 0]


def sensitivity_at_specificity(images: WeightedImages, level: float) -> Figures:
    """The highest sensitivity of a threshold whose specificity is at least `level`."""
    found, wrong = images.above(1)
    allowed = _ratio(wrong, wrong[:, -1:]) <= 1 - level + _ROUNDING
    return _best(_ratio(found, found[:, -1:]), allowed)


def specificity_at_sensitivity(images: WeightedImages, level: float) -> Figures:
    """The highest specificity of a threshold whose sensitivity is at least `level`."""
    found, wrong = images.above(1)
    allowed = _ratio(found, found[:, -1:]) >= level - _ROUNDING
    return _best(1 - _ratio(wrong, wrong[:, -1:]), allowed)


def quadratic_kappa(images: WeightedImages) -> Figures:
    """Cohen's kappa with weights that grow with the square of the distance between grades."""
    grades = np.arange(images.classes, dtype=np.float64)
    observed = images.weights @ (images.labels - images.predicted).astype(np.float64) ** 2
    # Of two independent grades the mean squared distance follows from their moments.
    true, said = _ratio(images.true, images.total[:, None]), _ratio(images.said, images.total[:, None])
    expected = true @ grades**2 + said @ grades**2 - 2 * (true @ grades) * (said @ grades)
    return 1 - _ratio(_ratio(observed, images.total), np.where(expected > _ROUNDING, expected, 0))


def calibration_error(images: WeightedImages) -> Figures:
    """Expected calibration error: how far probability and frequency are apart, over bins of equal width."""
    claimed, happened = claims(images.labels, images.probabilities)
    bins = np.eye(BINS)[bin_of(claimed)]
    gaps = images.weights @ (bins * (happened - claimed)[:, None])
    return _ratio(np.abs(gaps).sum(1), images.total)


def claims(labels: Labels, probabilities: Probabilities) -> tuple[Figures, Figures]:
    """What probability is claimed for each image, and whether it came true.

    Of two classes that of the positive one, as in studies of diagnoses; of more that of the class predicted.
    """
    if probabilities.shape[1] == 2:
        return probabilities[:, 1].astype(np.float64), (labels == 1).astype(np.float64)
    return probabilities.max(1).astype(np.float64), (probabilities.argmax(1) == labels).astype(np.float64)


def bin_of(claimed: Figures) -> NDArray[np.intp]:
    """The bin of each probability; a border belongs to the bin above it, and 1 to the last."""
    return np.clip((claimed * BINS).astype(np.intp), 0, BINS - 1)


def _area(images: WeightedImages, k: int) -> Figures:
    """The part of all pairs of an image of class k and another that the first one wins; ties count half."""
    score, of_class = images.probabilities[:, k], images.labels == k
    others = np.flatnonzero(~of_class)[np.argsort(score[~of_class], kind="stable")]
    # How many others there are up to each place in their order of score.
    beaten = np.zeros((len(images.weights), len(others) + 1))
    np.cumsum(images.weights.take(others, axis=1), axis=1, out=beaten[:, 1:])
    below, upto = (np.searchsorted(score[others], score[of_class], side) for side in ("left", "right"))
    own = images.weights[:, of_class]
    won = beaten.take(below, axis=1)
    if (upto != below).any():
        won = (won + beaten.take(upto, axis=1)) / 2
    return _ratio(np.einsum("bi,bi->b", own, won), own.sum(1) * beaten[:, -1])


def _best(values: Figures, allowed: NDArray[np.bool_]) -> Figures:
    best = np.where(allowed, values, -np.inf).max(1)
    return np.asarray(np.where(np.isfinite(best), best, np.nan))


def _ratio(part: Any, whole: Any) -> Figures:
    """NaN where there is nothing to divide by."""
    part, whole = np.asarray(part, dtype=np.float64), np.asarray(whole, dtype=np.float64)
    return np.asarray(np.divide(part, whole, out=np.full(np.broadcast(part, whole).shape, np.nan), where=whole != 0))


def _mean_of_defined(values: Figures) -> Figures:
    known = ~np.isnan(values)
    return _ratio(np.where(known, values, 0).sum(1), known.sum(1))

"""The metrics by name, and for which data each is meant."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from protofed.errors import UserError, unknown_name
from protofed.metrics import measures
from protofed.metrics.measures import Figures, WeightedImages
from protofed.metrics.predictions import PredictedSet

ACCURACY = "accuracy"
_LEVEL = 0.9
"""The specificity, or sensitivity, at which the other is told."""
_FEWEST_GRADES, _MOST_GRADES = 3, 7
_KNOWN_GRADES = (("no dr", "mild", "moderate", "severe", "proliferative"),)
"""Scales whose grades have names rather than numbers."""


@dataclass(frozen=True)
class Metric:
    """A figure between a test set and a model; all but the calibration error are better the higher they are."""

    name: str
    title: str
    compute: Callable[[WeightedImages], Figures]
    binary: bool = False
    """Needs two classes, the second of which is the positive one."""
    graded: bool = False
    """Needs classes that are in an order."""
    higher_is_better: bool = True

    @property
    def heading(self) -> str:
        """The title where it stands first."""
        return self.title[0].upper() + self.title[1:]

    def of(self, predicted: PredictedSet) -> float | None:
        """Its value; None where it is not defined, as without images of a class that it needs."""
        if not len(predicted) or not np.isfinite(predicted.probabilities).all():
            return None
        value = float(self.compute(WeightedImages.once(predicted))[0])
        return value if np.isfinite(value) else None


METRICS = {
    metric.name: metric
    for metric in (
        Metric(ACCURACY, "accuracy", measures.accuracy),
        Metric("balanced_accuracy", "balanced accuracy", measures.balanced_accuracy),
        Metric("macro_f1", "macro F1", measures.macro_f1),
        Metric("auc", "AUC", measures.auc),
        Metric("sensitivity", "sensitivity", measures.sensitivity, binary=True),
        Metric("specificity", "specificity", measures.specificity, binary=True),
        Metric(
            "sensitivity_at_90_specificity",
            "sensitivity at 90 % specificity",
            partial(measures.sensitivity_at_specificity, level=_LEVEL),
            binary=True,
        ),
        Metric(
            "specificity_at_90_sensitivity",
            "specificity at 90 % sensitivity",
            partial(measures.specificity_at_sensitivity, level=_LEVEL),
            binary=True,
        ),
        Metric("quadratic_kappa", "quadratic kappa", measures.quadratic_kappa, graded=True),
        Metric("ece", "calibration error", measures.calibration_error, higher_is_better=False),
    )
}

CHOICES = tuple(name for name, metric in METRICS.items() if metric.higher_is_better)
"""What `--metric` may be."""


def find_metric(name: str) -> Metric:
    """A metric by its name."""
    if name not in METRICS:
        raise unknown_name("metric", name, CHOICES)
    return METRICS[name]


def metrics_for(classes: Sequence[str], chosen: str = ACCURACY) -> list[Metric]:
    """Those that make sense for data with these classes, and the one that was chosen."""
    graded = are_grades(classes)
    return [
        metric
        for metric in METRICS.values()
        if metric.name == chosen or ((not metric.binary or len(classes) == 2) and (not metric.graded or graded))
    ]


def main_metric(classes: Sequence[str], chosen: str = ACCURACY) -> Metric:
    """What is told first: the metric that was chosen, or instead of accuracy what such data is usually judged by."""
    if chosen != ACCURACY:
        return find_metric(chosen)
    if len(classes) == 2:
        return METRICS["auc"]
    return METRICS["quadratic_kappa" if are_grades(classes) else ACCURACY]


def are_grades(classes: Sequence[str]) -> bool:
    """Whether classes are grades in their order: three to seven numbers that follow each other, or a known scale."""
    if not _FEWEST_GRADES <= len(classes) <= _MOST_GRADES:
        return False
    if tuple(name.lower() for name in classes) in _KNOWN_GRADES:
        return True
    if not all(name.isdecimal() for name in classes):
        return False
    numbers = [int(name) for name in classes]
    return numbers == list(range(numbers[0], numbers[0] + len(numbers)))


def refuse_unsuited(name: str, classes: Sequence[str]) -> None:
    """Raise where the chosen metric says nothing about such data."""
    if find_metric(name).binary and len(classes) != 2:
        raise UserError(
            f"--metric {name} needs two classes, but this data has {len(classes)}; regroup them with --labels, "
            'for example --labels "0=healthy,1-4=diseased", or choose another metric'
        )

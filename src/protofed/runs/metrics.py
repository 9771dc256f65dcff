"""`metrics` of summary.json: what a run's predictions on test images amount to, view by view and part by part.

Figures are those of the final model, not means over rounds, because that is the model whose predictions are kept.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from protofed.metrics import (
    ACCURACY,
    KeptPredictions,
    Metric,
    PredictedSet,
    average_draws,
    confusion_matrix,
    draws_of,
    metrics_for,
    percentile_interval,
    resamples_for,
)
from protofed.metrics.measures import Figures
from protofed.metrics.predictions import Labels, Probabilities
from protofed.runs.opened import Run

_MOST_PARTS = 100
"""Above this many clients only the figures of all their images together are written."""
_MOST_CLASSES = 20
"""Above this many classes a confusion matrix is not written; it can be made from the predictions."""

Draws = dict[str, Figures]


def run_metrics(run: Run) -> dict[str, Any] | None:
    """The metrics of a run; None where it has kept no predictions."""
    predictions = run.predictions()
    if predictions is None:
        return None
    return summarise_predictions(predictions, run.config["partition"]["held_out"], run.options.get("metric", ACCURACY))


def summarise_predictions(predictions: KeptPredictions, held_out: Iterable[str], chosen: str) -> dict[str, Any]:
    """Per view every part with intervals, their average, and how far the parts are apart."""
    classes = predictions.classes
    metrics = metrics_for(classes, chosen)
    content: dict[str, Any] = {
        "metric": chosen,
        "positive": classes[1] if len(classes) == 2 else None,
        "global": None,
        "personal": None,
        "fairness": {},
    }
    for name, parts in predictions.views.items():
        if len(parts) > _MOST_PARTS:
            whole = pooled(parts.values())
            draws = draws_of(whole, metrics, resamples_for([whole]))
            content[name] = {"pooled": scores_with_intervals(whole, metrics, draws)}
            continue
        view = _View(parts, metrics, set(held_out), name == "global")
        content[name], content["fairness"][name] = view.content(), view.fairness()
    return content


def scores_with_intervals(predicted: PredictedSet, metrics: Sequence[Metric], draws: Draws) -> dict[str, Any]:
    """Every metric of one test set with its interval, how many images there are, and the confusion matrix."""
    scores: dict[str, Any] = {metric.name: _figure(metric.of(predicted), draws[metric.name]) for metric in metrics}
    scores["images"] = len(predicted)
    if predicted.classes <= _MOST_CLASSES:
        scores["confusion"] = confusion_matrix(predicted.labels, predicted.probabilities).tolist()
    return scores


def own_metrics(labels: Labels, probabilities: Probabilities, classes: Sequence[str]) -> dict[str, Any]:
    """The same of a single test set, for a site that keeps its predictions to itself."""
    metrics = metrics_for(classes)
    predicted = PredictedSet(labels, probabilities, np.arange(len(labels)))
    return scores_with_intervals(predicted, metrics, draws_of(predicted, metrics, resamples_for([predicted])))


class _View:
    """The parts of one view: domains, or clients."""

    def __init__(
        self, parts: Mapping[str, PredictedSet], metrics: Sequence[Metric], held_out: set[str], pooled: bool
    ) -> None:
        self._parts = parts
        self._metrics = metrics
        self._counted = [name for name in parts if not (pooled and name in held_out)]
        self._pooled = pooled
        self._resamples = resamples_for(parts.values())
        drawn: dict[tuple[int, str], Draws] = {}
        self._draws: dict[str, Draws] = {}
        for name, part in parts.items():
            # Clients that would use the same model on the same images have the same figures.
            key = (part.probabilities.ctypes.data, part.images)
            if key not in drawn:
                drawn[key] = draws_of(part, metrics, self._resamples)
            self._draws[name] = drawn[key]
        self._values = {metric.name: {name: metric.of(parts[name]) for name in self._counted} for metric in metrics}

    def content(self) -> dict[str, Any]:
        view: dict[str, Any] = {
            name: scores_with_intervals(part, self._metrics, self._draws[name]) for name, part in self._parts.items()
        }
        view["average"] = {
            metric.name: _figure(
                _mean(self._values[metric.name].values()),
                average_draws([self._draws[name][metric.name] for name in self._counted]),
            )
            for metric in self._metrics
        }
        if self._pooled:
            whole = pooled(self._parts[name] for name in self._counted)
            view["pooled"] = scores_with_intervals(
                whole, self._metrics, draws_of(whole, self._metrics, self._resamples)
            )
        return view

    def fairness(self) -> dict[str, Any]:
        """Of every metric the worst part, and how far it is from the best."""
        found: dict[str, Any] = {}
        for metric in self._metrics:
            known = {name: value for name, value in self._values[metric.name].items() if value is not None}
            if known:
                ranked = sorted(known, key=lambda name: known[name], reverse=not metric.higher_is_better)
                gap = abs(known[ranked[-1]] - known[ranked[0]])
                found[metric.name] = {"worst": known[ranked[0]], "worst_part": ranked[0], "gap": gap}
        return found


def pooled(parts: Iterable[PredictedSet]) -> PredictedSet:
    """Test sets as one."""
    sets = list(parts)
    return PredictedSet(
        np.concatenate([each.labels for each in sets]),
        np.concatenate([each.probabilities for each in sets]),
        np.concatenate([each.samples for each in sets]),
    )


def _figure(value: float | None, draws: Figures) -> dict[str, Any]:
    return {"value": value, "interval": None if value is None else percentile_interval(draws)}


def _mean(values: Iterable[float | None]) -> float | None:
    """Over those that are known."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None

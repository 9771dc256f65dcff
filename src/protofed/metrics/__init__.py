"""What classifiers are judged by: measures, intervals over images, paired tests, and the predictions they come from."""

from protofed.metrics.catalog import (
    ACCURACY,
    CHOICES,
    METRICS,
    Metric,
    are_grades,
    find_metric,
    main_metric,
    metrics_for,
    refuse_unsuited,
)
from protofed.metrics.curves import CurvePoint, reliability_curve, roc_curve
from protofed.metrics.intervals import average_draws, draws_of, percentile_interval, resamples_for
from protofed.metrics.measures import WeightedImages, confusion_matrix
from protofed.metrics.paired import PairedOnImages, compare_on_images, mcnemar_p, paired_delong
from protofed.metrics.predictions import KeptPredictions, PredictedSet

__all__ = [
    "ACCURACY",
    "CHOICES",
    "METRICS",
    "CurvePoint",
    "KeptPredictions",
    "Metric",
    "PairedOnImages",
    "PredictedSet",
    "WeightedImages",
    "are_grades",
    "average_draws",
    "compare_on_images",
    "confusion_matrix",
    "draws_of",
    "find_metric",
    "main_metric",
    "mcnemar_p",
    "metrics_for",
    "paired_delong",
    "percentile_interval",
    "refuse_unsuited",
    "reliability_curve",
    "resamples_for",
    "roc_curve",
]

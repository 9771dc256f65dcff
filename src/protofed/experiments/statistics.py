"""Honest figures from few seeds: mean, spread, and paired tests corrected for how many there are."""

from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import Any

from scipy.stats import ttest_rel


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Mean, standard deviation (None for a single seed) and every value."""
    return {"mean": mean(values), "std": stdev(values) if len(values) > 1 else None, "seeds": list(values)}


def paired_tests(scores: Mapping[str, Sequence[float]], baseline: str) -> dict[str, dict[str, Any] | None]:
    """Each method against the baseline over the same seeds, p-values corrected after Holm; None with one seed."""
    reference = scores.get(baseline)
    others = [name for name in scores if name != baseline]
    if reference is None or len(reference) < 2:
        return dict.fromkeys(others)
    raw = {name: _p_value(scores[name], reference) for name in others}
    corrected = _holm(raw)
    return {
        name: {
            "difference": mean(scores[name]) - mean(reference),
            "p": raw[name],
            "p_holm": corrected[name],
            "test": "paired t",
        }
        for name in others
    }


def _p_value(values: Sequence[float], reference: Sequence[float]) -> float:
    """1 where every seed gives the same, for which a t statistic is undefined; 0 where the gap never varies."""
    gaps = [value - other for value, other in zip(values, reference, strict=True)]
    if max(gaps) == min(gaps):
        return 1.0 if gaps[0] == 0 else 0.0
    return float(ttest_rel(values, reference).pvalue)


def _holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Holm's step-down correction, which holds whatever the dependence between the tests."""
    corrected: dict[str, float] = {}
    largest = 0.0
    for rank, name in enumerate(sorted(p_values, key=lambda key: p_values[key])):
        largest = max(largest, min(1.0, p_values[name] * (len(p_values) - rank)))
        corrected[name] = largest
    return corrected

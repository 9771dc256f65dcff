"""Honest figures from few seeds: mean, spread, and paired tests corrected for how many there are."""

from collections.abc import Mapping, Sequence
from statistics import mean, stdev
from typing import Any, TypedDict

_SAME = 1e-9
"""Differences of accuracies below this are rounding."""


class Spread(TypedDict):
    """Mean, standard deviation (None for a single seed) and the value of every seed."""

    mean: float
    std: float | None
    seeds: list[float]


class PartialSpread(TypedDict):
    """The same for a figure that some seeds lack: how many reached it; mean and std only where all did."""

    mean: float | None
    std: float | None
    seeds: list[float | None]
    reached: int


class PairedTest(TypedDict):
    """A method against the baseline over the seeds that both have."""

    difference: float
    interval: list[float] | None
    p: float | None
    seeds: int
    test: str
    p_holm: float | None
    tests: int


def spread(values: Sequence[float]) -> Spread:
    """Mean, standard deviation (None for a single seed) and every value."""
    return {"mean": mean(values), "std": stdev(values) if len(values) > 1 else None, "seeds": list(values)}


def partial_spread(values: Sequence[float | None]) -> PartialSpread:
    """The same for figures that some seeds lack; a mean over the lucky ones would mislead, so there is none then."""
    reached = [value for value in values if value is not None]
    complete = spread(reached) if reached and len(reached) == len(values) else None
    return {
        "mean": complete["mean"] if complete else None,
        "std": complete["std"] if complete else None,
        "seeds": list(values),
        "reached": len(reached),
    }


def paired_tests(
    scores: Mapping[str, Mapping[int, float] | Sequence[float]], baseline: str, confidence: float = 0.95
) -> dict[str, PairedTest | None]:
    """Each method against the baseline over the seeds both have; p-values corrected by Holm's method.

    `scores` are {method: {seed: score}}, or lists where all methods have the same seeds. None where there are fewer
    than two seeds. Where the gap is the same for every seed a t-test says nothing: p is 1 if the gap is zero, else
    None; it counts in the correction all the same.
    """
    by_seed = {name: dict(v if isinstance(v, Mapping) else enumerate(v)) for name, v in scores.items()}
    reference = by_seed.pop(baseline, {})
    tests: dict[str, dict[str, Any] | None] = {}
    for name, own in by_seed.items():
        pairs = [(own[seed], reference[seed]) for seed in sorted(own.keys() & reference.keys())]
        tests[name] = _paired(pairs, confidence) if len(pairs) > 1 else None
    return _corrected(tests)


def _corrected(tests: Mapping[str, dict[str, Any] | None]) -> dict[str, PairedTest | None]:
    """The same tests with p-values corrected for how many there are."""
    family = [test for test in tests.values() if test is not None]
    known = {name: test["p"] for name, test in tests.items() if test is not None and test["p"] is not None}
    corrected = holm(known, len(family))
    return {
        name: None if test is None else PairedTest(**test, p_holm=corrected.get(name), tests=len(family))  # type: ignore[typeddict-item]
        for name, test in tests.items()
    }


def holm(p_values: Mapping[str, float], family: int | None = None) -> dict[str, float]:
    """Holm's step-down correction, which holds under any dependence between the tests.

    `family` says how many tests there are, where more were made than have a p-value.
    """
    count = len(p_values) if family is None else family
    corrected: dict[str, float] = {}
    largest = 0.0
    for rank, name in enumerate(sorted(p_values, key=lambda key: p_values[key])):
        largest = max(largest, min(1.0, p_values[name] * (count - rank)))
        corrected[name] = largest
    return corrected


def _paired(pairs: Sequence[tuple[float, float]], confidence: float) -> dict[str, Any]:
    gaps = [value - other for value, other in pairs]
    test: dict[str, Any] = {"difference": mean(gaps), "interval": None, "p": None, "seeds": len(gaps)}
    if max(gaps) - min(gaps) > _SAME:
        from scipy.stats import ttest_rel  # half of the time an import of protofed would take

        result = ttest_rel(*zip(*pairs, strict=True))
        interval = result.confidence_interval(confidence)
        test |= {"p": float(result.pvalue), "interval": [float(interval.low), float(interval.high)]}
    elif abs(gaps[0]) <= _SAME:
        test["p"] = 1.0
    return {**test, "test": "paired t"}

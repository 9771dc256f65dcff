"""The chosen metric of compared methods: over seeds as accuracy is, and over the test images that all of them saw."""

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

import numpy as np

from protofed.metrics import (
    KeptPredictions,
    Metric,
    PairedOnImages,
    PredictedSet,
    average_draws,
    compare_on_images,
    draws_of,
    percentile_interval,
    resamples_for,
)
from protofed.metrics.measures import Figures
from protofed.runs.opened import Run
from protofed.studies.schema import ImageInterval, ImageTest, MetricOverSeeds
from protofed.studies.statistics import PairedTest, holm, paired_tests, spread
from protofed.text import Table, p_value, percent

Seeds = Mapping[int, Mapping[str, PredictedSet]]
"""Of one method in one view: per seed its test sets by name."""

_MOST_REMEMBERED = 5000
_MOST_PARTS = 100
"""More clients are not judged one by one."""
_MOST_COLUMNS = 6
"""Test sets that have a column of their own."""


def compare_metric(
    runs: Mapping[str, Mapping[int, Run]], baseline: str, metric: Metric
) -> dict[str, dict[str, MetricOverSeeds | None]]:
    """Every method in every view, from the predictions its runs kept; None where they kept none."""
    kept: dict[str, dict[int, KeptPredictions]] = {}
    for name, by_seed in runs.items():
        read = {seed: run.predictions() for seed, run in by_seed.items()}
        kept[name] = {seed: each for seed, each in read.items() if each is not None}
    views = {view: _compare_view(kept, view, baseline, metric) for view in ("global", "personal")}
    return {name: {view: methods.get(name) for view, methods in views.items()} for name in runs}


def _compare_view(
    kept: Mapping[str, Mapping[int, KeptPredictions]], view: str, baseline: str, metric: Metric
) -> dict[str, MetricOverSeeds]:
    methods: dict[str, Seeds] = {}
    for name, by_seed in kept.items():
        # A seed in which the metric is nowhere defined has no average.
        seeds = {seed: each.views[view] for seed, each in by_seed.items() if view in each.views}
        seeds = {seed: own for seed, own in seeds.items() if len(own) <= _MOST_PARTS and _values(metric, own)}
        if seeds:
            methods[name] = seeds
    averages = {
        name: {seed: mean(_values(metric, parts).values()) for seed, parts in seeds.items()}
        for name, seeds in methods.items()
    }
    over_seeds = paired_tests(averages, baseline)
    on_images = _tests_on_images(methods, baseline, metric)
    return {name: _figures(metric, seeds, over_seeds.get(name), on_images.get(name)) for name, seeds in methods.items()}


def _figures(
    metric: Metric, seeds: Seeds, over_seeds: PairedTest | None, on_images: ImageTest | None
) -> MetricOverSeeds:
    values = [_values(metric, parts) for parts in seeds.values()]
    common = [part for part in values[0] if all(part in each for each in values)]
    resamples = resamples_for(next(iter(seeds.values())).values())
    draws = {part: _draws(metric, [parts[part] for parts in seeds.values()], resamples) for part in common}
    names = [min(each, key=lambda part, each=each: each[part]) for each in values]  # type: ignore[misc]
    return {
        "average": {
            **spread([mean(each.values()) for each in values]),
            "interval": percentile_interval(average_draws(list(draws.values()))) if draws else None,
        },
        "parts": {
            part: {**spread([each[part] for each in values]), "interval": percentile_interval(draws[part])}
            for part in common
        },
        "worst": {**spread([each[name] for each, name in zip(values, names, strict=True)]), "names": names},
        "gap": spread([max(each.values()) - min(each.values()) for each in values]),
        "test": over_seeds,
        "test_on_images": on_images,
    }


def _tests_on_images(methods: Mapping[str, Seeds], baseline: str, metric: Metric) -> dict[str, ImageTest | None]:
    """Each method against the baseline over the seeds and images that both have."""
    if baseline not in methods:
        return {}
    found: dict[str, PairedOnImages | None] = {}
    for name, seeds in methods.items():
        shared = [seed for seed in seeds if seed in methods[baseline]]
        if name != baseline:
            own, other = _panel(seeds, shared), _panel(methods[baseline], shared)
            found[name] = compare_on_images(metric, own, other, _remembered) if own else None
    known = {name: test["p"] for name, test in found.items() if test is not None and test["p"] is not None}
    corrected = holm(known, sum(test is not None for test in found.values()))
    return {name: None if test is None else {**test, "p_holm": corrected.get(name)} for name, test in found.items()}


def _panel(seeds: Seeds, shared: Sequence[int]) -> dict[str, list[PredictedSet]]:
    """Per test set one prediction for every seed."""
    if not shared:
        return {}
    first, *others = (seeds[seed] for seed in shared)
    return {part: [parts[part] for parts in (first, *others)] for part in first if all(part in each for each in others)}


def _values(metric: Metric, parts: Mapping[str, PredictedSet]) -> dict[str, float]:
    """The parts for which the metric is defined."""
    return {part: value for part, predicted in parts.items() if (value := metric.of(predicted)) is not None}


def _draws(metric: Metric, predicted: Sequence[PredictedSet], resamples: int) -> Figures:
    """The mean over seeds, draw by draw."""
    return average_draws([_remembered(each, [metric], resamples)[metric.name] for each in predicted])


_known: dict[tuple[str, str, int], Figures] = {}


def _remembered(predicted: PredictedSet, metrics: Sequence[Metric], resamples: int) -> dict[str, Figures]:
    """The draws of a test set; a comparison is written after each of its runs, and asks for the same again."""
    draws: dict[str, Figures] = {}
    for metric in metrics:
        key = (predicted.content, metric.name, resamples)
        if key not in _known:
            if len(_known) >= _MOST_REMEMBERED:
                _known.clear()
            _known[key] = draws_of(predicted, [metric], resamples)[metric.name].astype(np.float64)
        draws[metric.name] = _known[key]
    return draws


def metric_table(methods: Mapping[str, MetricOverSeeds], metric: Metric, view: str, baseline: str) -> Table:
    """One row for each method, with intervals over images and both tests against the baseline."""
    title = (
        f"{metric.heading} (%) of the final models, {view} view, 95 % intervals over images; p with Holm's correction"
    )
    if not methods:
        return Table(title, [], [])
    parts = list(next(iter(methods.values()))["parts"])
    parts = parts if len(parts) <= _MOST_COLUMNS else []
    rows = [
        [
            name,
            *(_with_interval(scores["parts"].get(part)) for part in parts),
            _with_interval(scores["average"]),
            percent(scores["worst"]["mean"]),
            percent(scores["gap"]["mean"]),
            *_test_cells(scores),
        ]
        for name, scores in methods.items()
    ]
    columns = ["method", *parts, "average", "worst", "gap", f"vs {baseline}", "p (images)", "p (seeds)"]
    return Table(title, columns, rows)


def _with_interval(figure: ImageInterval | None) -> str:
    if figure is None:
        return "-"
    bounds = figure["interval"]
    return percent(figure["mean"]) + ("" if bounds is None else f" [{100 * bounds[0]:.1f}, {100 * bounds[1]:.1f}]")


def _test_cells(scores: MetricOverSeeds) -> tuple[str, str, str]:
    """Difference to the baseline in points, and the p-values over images and over seeds."""
    images, seeds = scores["test_on_images"], scores["test"]
    known: Any = images or seeds
    difference = "-" if known is None else f"{round(100 * known['difference'], 2) + 0.0:+.2f}"
    on_images, over_seeds = (p_value(None if test is None else test["p_holm"]) for test in (images, seeds))
    return difference, on_images, over_seeds

"""Search for hyper-parameters on validation data; test data is looked at once, for the winner, at the end."""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, islice, product
from pathlib import Path
from statistics import mean
from typing import Any, Literal

from protofed.errors import UserError, unknown_name
from protofed.metrics import find_metric
from protofed.registry import find_method, knobs, load_plugin, make_method
from protofed.runs.opened import Run
from protofed.runs.options import Options, make_options
from protofed.seeding import numpy_generator
from protofed.studies.comparison import accuracy_over_seeds, domains_of_clients
from protofed.studies.metrics import compare_metric
from protofed.studies.schedule import PlannedRun, RunOutcomes
from protofed.studies.schema import VIEWS
from protofed.studies.statistics import spread
from protofed.studies.study import run_study
from protofed.studies.sweep_result import Sweep

Score = Literal["last", "best"]

_SWEPT_OPTIONS = (
    "model", "weights", "image_size", "balanced", "rounds", "epochs", "plan", "batch", "participation", "optimizer",
    "lr", "momentum", "weight_decay", "schedule", "preset",
)  # fmt: skip
"""Run options that change how a model is trained, not on whose images it is judged."""

_EVALUATION_SETTINGS = (
    "data.validation",
    "data.holdout",
    "data.min_size",
    "data.ensure_all_classes",
    "data.merge_test",
)
_VALIDATION = "0.2"
_LAST_ROUNDS = 5
_SAMPLES_PER_TRIAL = 50


@dataclass(frozen=True)
class _CategoricalAxis:
    """A hyper-parameter and the values it may take."""

    key: str
    values: tuple[str, ...]

    def values_to_validate(self) -> tuple[str, ...]:
        """Each must be valid for the axis to be."""
        return self.values

    def sample(self, seed: int, index: int) -> str:
        """The value of one trial."""
        return self.values[int(numpy_generator(seed, "sweep", index, self.key).integers(len(self.values)))]

    def text(self) -> str:
        """As --over takes it."""
        return _join_values(self.values)


@dataclass(frozen=True)
class _RangeAxis:
    """A hyper-parameter and the interval its values are drawn from: uniformly, or uniformly in the logarithm."""

    key: str
    low: float
    high: float
    log: bool
    integer: bool

    def values_to_validate(self) -> tuple[str, ...]:
        """An interval is valid if both ends are."""
        return self._rounded(self.low), self._rounded(self.high)

    def sample(self, seed: int, index: int) -> str:
        """The value of one trial."""
        rng = numpy_generator(seed, "sweep", index, self.key)
        if self.integer and not self.log:
            return self._rounded(int(rng.integers(int(self.low), int(self.high) + 1)))
        if self.log:
            return self._rounded(math.exp(rng.uniform(math.log(self.low), math.log(self.high))))
        return self._rounded(rng.uniform(self.low, self.high))

    def text(self) -> str:
        """As --over takes it."""
        return f"{self.low:g}..{self.high:g}{':log' if self.log else ''}{':int' if self.integer else ''}"

    def _rounded(self, value: float) -> str:
        """Four digits are enough for a search, and easy to type."""
        return str(round(value)) if self.integer else f"{value:.4g}"


Axis = _CategoricalAxis | _RangeAxis


def sweep(
    method: str,
    over: Mapping[str, Any] | Sequence[str],
    *,
    out: str | Path,
    random: int | None = None,
    seeds: Sequence[int] | None = None,
    score: Score = "last",
    shard: str | None = None,
    callbacks: Iterable[Any] = (),
    **options: Any,
) -> Sweep:
    """Try a method's hyper-parameters, in parallel over the cores, and rank them on validation data.

    `over` has the values of each: {"tau": [0.07, 0.5], "lr": "0.001..0.1:log"}, or the same as KEY=VALUES texts. Keys
    are the method's hyper-parameters, `model.KEY`, `data.KEY` and the options of training. Without `random` every
    combination is tried; with it that many are drawn, and ranges LOW..HIGH[:log][:int] are possible. More draws later
    begin with the same ones. The other options are those of `run`; `data.validation` is 0.2 unless it is set.

    A trial's score is its accuracy, or another `metric`, on validation data, the mean of the last 5 evaluated rounds or
    the `best` round.
    """
    base = make_options({**options, "method": method})
    for plugin in base.plugin:
        load_plugin(plugin)
    if score not in ("last", "best"):
        raise unknown_name("score", score, ("last", "best"))
    axes = _parse_axes(over, base, options)
    seeds = list(dict.fromkeys(seeds)) if seeds else [base.seed]
    folder = Path(out)
    base = _with_validation(base)
    trials = _random_trials(axes, random, base.seed) if random is not None else _grid(axes)
    runs = [[_planned_run(folder, base, settings, seed) for seed in seeds] for settings in trials]
    conditions = {
        "method": method,
        "over": {axis.key: axis.text() for axis in axes},
        "random": random,
        "score": score,
        "metric": base.metric,
        "validation": base.set["data.validation"],
        "seeds": seeds,
        "options": base.model_dump(),
    }

    def result(outcomes: RunOutcomes) -> Sweep:
        entries = _ranked([_trial(settings, own, score) for settings, own in zip(trials, runs, strict=True)])
        content = {**conditions, **_results(entries, runs, score, outcomes)}
        return Sweep(folder, content, outcomes.failures())

    return run_study(
        folder,
        "sweep",
        # Seed by seed, so that every trial has a score before any has its second.
        [own[position] for position in range(len(seeds)) for own in runs],
        result,
        validate=[_planned_run(folder, base, settings, seeds[0]) for settings in _one_at_a_time(axes)],
        shard=shard,
        callbacks=callbacks,
    )


def _with_validation(base: Options) -> Options:
    """The same options with some training images kept for validation."""
    given = base.set.get("data.validation") if base.validation is None else str(base.validation)
    validation = _VALIDATION if given is None else given
    if validation.strip("0.") == "":
        raise UserError("a sweep needs validation data; set data.validation above 0, or leave it at 0.2")
    # A preset must not bring test images in.
    settings = {"data.merge_test": "false", **base.set, "data.validation": validation}
    return base.model_copy(update={"validation": None, "set": settings})


def _parse_axes(over: Mapping[str, Any] | Sequence[str], base: Options, given: Mapping[str, Any]) -> list[Axis]:
    """What is searched; each key must be something that training takes and that is not set already."""
    texts = [f"{key}={_join_values(value)}" for key, value in over.items()] if isinstance(over, Mapping) else list(over)
    axes = [_parse_axis(text) for text in texts]
    if not axes:
        raise UserError("there is nothing to sweep over; give --over KEY=V1,V2 at least once")
    known = {knob.name for knob in knobs(find_method(base.method))}
    keys = [axis.key for axis in axes]
    for key in keys:
        if keys.count(key) > 1:
            raise UserError(f"--over {key} is given more than once; put all its values into one option")
        if key in _EVALUATION_SETTINGS:
            raise UserError(f"--over {key}: all trials must be judged on the same images; fix it with --set")
        if not key.startswith(("model.", "data.")) and key not in (*known, *_SWEPT_OPTIONS):
            raise unknown_name(
                f"hyper-parameter of {base.method} or option of training", key, [*known, *_SWEPT_OPTIONS]
            )
        if key in base.set or (key in given and key not in known):
            raise UserError(f"{key} is swept over, so it cannot have a fixed value as well")
    return axes


def _parse_axis(text: str) -> Axis:
    """KEY=V1,V2 (or V1;V2 where values have commas), or KEY=LOW..HIGH[:log][:int]."""
    key, equals, values = (part.strip() for part in text.partition("="))
    if not (key and equals and values):
        raise UserError(f"--over takes KEY=V1,V2 or KEY=LOW..HIGH, not {text!r}")
    if match := re.fullmatch(r"([^:]+?)\.\.([^:]+)((?::log|:int)*)", values):
        return _parse_range(text, key, *match.groups())
    choices = [value.strip() for value in values.split(";" if ";" in values else ",")]
    if not all(choices):
        raise UserError(f"--over {text}: one value is empty")
    return _CategoricalAxis(key, tuple(dict.fromkeys(choices)))


def _parse_range(text: str, key: str, first: str, last: str, flags: str) -> _RangeAxis:
    """`text` is the whole of it, for messages."""
    log, integer = ":log" in flags, ":int" in flags
    try:
        low, high = float(first), float(last)
    except ValueError:
        raise UserError(
            f"--over {text}: a range is LOW..HIGH, two numbers, optionally followed by :log or :int"
        ) from None
    if not (low < high and math.isfinite(low) and math.isfinite(high)) or (log and low <= 0):
        raise UserError(
            f"--over {text}: the second number must be larger than the first" + (", both above 0" if log else "")
        )
    if integer and not (low.is_integer() and high.is_integer()):
        raise UserError(f"--over {text}: with :int both ends must be whole numbers")
    return _RangeAxis(key, low, high, log, integer)


def _grid(axes: Sequence[Axis]) -> list[dict[str, str]]:
    """Every combination; the last hyper-parameter changes fastest."""
    values: list[tuple[str, ...]] = []
    for axis in axes:
        if isinstance(axis, _RangeAxis):
            raise UserError(f"--over {axis.text()} is a range; give --random N to draw from it")
        values.append(axis.values)
    keys = [axis.key for axis in axes]
    return [dict(zip(keys, combination, strict=True)) for combination in product(*values)]


def _random_trials(axes: Sequence[Axis], wanted: int, seed: int) -> list[dict[str, str]]:
    """Different combinations, each drawn by its number alone; fewer where there are no more."""
    if wanted < 1:
        raise UserError(f"--random {wanted}: give the number of trials, at least 1")
    trials: list[dict[str, str]] = []
    for index in islice(count(), wanted * _SAMPLES_PER_TRIAL):
        settings = {axis.key: axis.sample(seed, index) for axis in axes}
        if settings not in trials:
            trials.append(settings)
        if len(trials) == wanted:
            break
    return trials


def _one_at_a_time(axes: Sequence[Axis]) -> Iterator[dict[str, str]]:
    """Combinations in which every value occurs, to be tried for validity."""
    first = {axis.key: axis.values_to_validate()[0] for axis in axes}
    yield first
    for axis in axes:
        for value in axis.values_to_validate()[1:]:
            yield {**first, axis.key: value}


def _planned_run(folder: Path, base: Options, settings: Mapping[str, str], seed: int) -> PlannedRun:
    """One trial with one seed; where method and training have a setting of the same name, the method's is meant."""
    known = {knob.name for knob in knobs(find_method(base.method))}
    own = {key: value for key, value in settings.items() if key in known or "." in key}
    make_method(find_method(base.method), {key: value for key, value in own.items() if "." not in key})
    options = {**base.model_dump(), **{key: value for key, value in settings.items() if key not in own}}
    label = ", ".join(f"{key}={value}" for key, value in settings.items())
    return PlannedRun(label, folder, make_options({**options, "set": {**base.set, **own}, "seed": seed}))


def _trial(settings: Mapping[str, str], runs: Sequence[PlannedRun], score: Score) -> dict[str, Any]:
    """A trial's entry in sweep.json; without a score unless all its seeds are complete."""
    complete = all(each.is_complete() for each in runs)
    scores = [_score(each.run, score) for each in runs] if complete else []
    return {
        "settings": dict(settings),
        "validation": spread(scores) if scores else None,
        "rank": None,
        "runs": [each.path.name for each in runs],
    }


def _score(run: Run, score: Score) -> float:
    """The metric on validation data. Nothing else of a trial is looked at."""
    values: list[float] = [record["validation"] for record in run.rounds if record["validation"] is not None]
    if not values:
        raise UserError(f"the clients of {run.path.name} have too few images to hold any out for validation")
    return max(values) if score == "best" else mean(values[-_LAST_ROUNDS:])


def _ranked(trials: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same trials with their ranks; among equals the first."""
    scored = [index for index, trial in enumerate(trials) if trial["validation"] is not None]
    order = sorted(scored, key=lambda index: -trials[index]["validation"]["mean"])
    ranks = {index: rank for rank, index in enumerate(order, start=1)}
    return [{**trial, "rank": ranks.get(index)} for index, trial in enumerate(trials)]


def _results(
    trials: Sequence[Mapping[str, Any]], runs: Sequence[Sequence[PlannedRun]], score: Score, outcomes: RunOutcomes
) -> dict[str, Any]:
    """What sweep.json says about the trials; there is no best one while runs are still to come."""
    missing = [{"trial": label, **entry} for label, entry in outcomes.missing()]
    over = all(entry["failed"] for entry in missing)
    return {
        "trials": trials,
        "best": _best(trials, runs, score, runs[0][0].options.metric) if over else None,
        "complete": not missing,
        "missing": missing,
    }


def _best(
    trials: Sequence[Mapping[str, Any]], runs: Sequence[Sequence[PlannedRun]], score: Score, metric: str
) -> dict[str, Any] | None:
    """The winner, and the one look at test data."""
    winner = next((index for index, trial in enumerate(trials) if trial["rank"] == 1), None)
    if winner is None:
        return None
    own = [each.run for each in runs[winner]]
    accuracies = [run.summary["accuracy" if score == "last" else "accuracy_best_validation"] for run in own]
    domain_of = domains_of_clients(own[0])
    return {
        "settings": trials[winner]["settings"],
        "validation": trials[winner]["validation"],
        "test": {
            view: accuracy_over_seeds([each[view] for each in accuracies], domain_of if view == "personal" else {})
            if accuracies[0][view] is not None
            else None
            for view in VIEWS
        },
        "by_metric": compare_metric({"": {run.seed: run for run in own}}, "", find_metric(metric))[""],
        "runs": trials[winner]["runs"],
    }


def _join_values(values: Any) -> str:
    """Values given in Python, as the command line has them."""
    if isinstance(values, str):
        return values
    texts = [str(value) for value in values]
    return (";" if any("," in text for text in texts) else ",").join(texts)

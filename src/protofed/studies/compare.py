"""Several methods under equal conditions: for each seed the same partition, initial weights and client draws."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from protofed.errors import UserError, unknown_name
from protofed.method import Method
from protofed.metrics import ACCURACY
from protofed.registry import find_method, knobs, load_plugin, method_names
from protofed.runs.assembly import dealing_of_preset
from protofed.runs.opened import Run
from protofed.runs.options import Options, make_options
from protofed.studies.comparison import Comparison, summarise
from protofed.studies.schedule import PlannedRun, RunOutcomes
from protofed.studies.schema import (
    VIEWS,
    ComparisonConditions,
    ComparisonContent,
    ComparisonSummary,
    MissingMethodRun,
)
from protofed.studies.study import run_study

Methods = Sequence[str] | Mapping[str, Mapping[str, Any]]


def compare(
    methods: Methods,
    *,
    out: str | Path,
    seeds: Sequence[int] = (0,),
    baseline: str | None = None,
    target: float | None = None,
    shard: str | None = None,
    paper: Mapping[str, float | Mapping[str, float]] | None = None,
    paper_view: str = "global",
    callbacks: Iterable[Any] = (),
    **options: Any,
) -> Comparison:
    """Run every method with every seed, in parallel over the cores, and compare the results.

    The options are those of `run`. Finished runs found in `out` are not repeated, unfinished ones are resumed. A
    setting `METHOD.KEY` goes to one method, a plain `KEY` to every method that has such a hyper-parameter. `methods`
    may also map labels to variants, each with its own options: {"no mixup": {"method": "i2pfl", "set": {...}}}.

    Methods are tested against the `baseline`: fedavg if it is among them, else the first. Rounds and bytes are counted
    up to the `target` accuracy, by default the baseline's average. `paper` has published figures as fractions, per
    method an average or {"average": x, DOMAIN: y, ...}, which were measured in `paper_view`.

    With `shard="K/N"` only every N-th run is done here, and the comparison covers all complete runs in the folder.
    A failing run does not stop the others: see `Comparison.failures`.
    """
    metric = make_options({"metric": options.get("metric") or ACCURACY}).metric
    variants = _variant_options(methods, options)
    baseline = _baseline(baseline, list(variants))
    if target is not None and not 0 < target <= 1:
        raise UserError(f"target={target} is not valid: give an accuracy, for example 0.8")
    paper_figures = _paper_figures(paper or {}, paper_view)
    folder = Path(out)
    conditions: ComparisonConditions = {
        "baseline": baseline,
        "metric": metric,
        "seeds": list(dict.fromkeys(seeds)),
        "options": make_options({name: value for name, value in options.items() if name != "set"}).model_dump(),
        "settings": make_options(options).set,
    }
    # Seed by seed, so that all methods have a result before any has its second.
    runs = [
        PlannedRun(label, folder, _judged_later(own).model_copy(update={"seed": seed}))
        for seed in conditions["seeds"]
        for label, own in variants.items()
    ]

    def result(outcomes: RunOutcomes) -> Comparison:
        summary = summarise(_complete(runs), baseline, target, paper_figures, folder, metric)
        return Comparison(folder, _content(conditions, summary, outcomes), outcomes.failures())

    first = [PlannedRun(label, folder, own) for label, own in variants.items()]
    return run_study(
        folder, "comparison", runs, result, validate=first, shard=shard, callbacks=callbacks, write_first=True
    )


def _judged_later(options: Options) -> Options:
    """Without validation data a run does not depend on the metric, so another metric needs no new runs."""
    validates = "data.validation" in options.set
    return options if validates else options.model_copy(update={"metric": ACCURACY})


def _baseline(name: str | None, compared: Sequence[str]) -> str:
    if name is None:
        return "fedavg" if "fedavg" in compared else compared[0]
    if name not in compared:
        raise unknown_name("baseline among the compared methods", name, compared)
    return name


def _complete(runs: Sequence[PlannedRun]) -> dict[str, dict[int, Run]]:
    """The complete runs by method and seed; a method without any is there all the same."""
    complete: dict[str, dict[int, Run]] = {each.label: {} for each in runs}
    for each in runs:
        if each.is_complete():
            complete[each.label][each.options.seed] = each.run
    return complete


def _content(conditions: ComparisonConditions, summary: ComparisonSummary, outcomes: RunOutcomes) -> ComparisonContent:
    missing: list[MissingMethodRun] = [{"method": label, **entry} for label, entry in outcomes.missing()]
    return {**conditions, **summary, "complete": not missing, "missing": missing}


def _paper_figures(paper: Mapping[str, float | Mapping[str, float]], view: str) -> dict[str, dict[str, Any]]:
    """A paper's figures as comparison.json has them."""
    if view not in VIEWS:
        raise unknown_name("view", view, VIEWS)
    empty = {"view": view, "average": None}
    return {
        name: {**empty, **(figures if isinstance(figures, Mapping) else {"average": figures})}
        for name, figures in paper.items()
    }


def _variant_options(methods: Methods, options: Mapping[str, Any]) -> dict[str, Options]:
    """The options of each method's runs; a setting or preset that no method takes is a mistake."""
    for name in ("method", "seed"):
        if name in options:
            raise UserError(f"compare has no option {name}; give methods and seeds")
    common = make_options(options)
    for plugin in common.plugin:
        load_plugin(plugin)
    variants = _variants(methods)
    classes = {label: find_method(own["method"]) for label, own in variants.items()}
    known = {label: {knob.name for knob in knobs(cls)} for label, cls in classes.items()}
    _refuse_unused_settings(common.set, known)
    with_preset = [cls for cls in classes.values() if common.preset in cls.presets]
    if common.preset is not None and not with_preset:
        raise UserError(f"--preset {common.preset}: none of the methods has such a preset")
    dealing = _dealing_of_presets(common, with_preset)

    def options_of(label: str, own: Mapping[str, Any]) -> Options:
        cls = classes[label]
        own_options = {**options, "preset": common.preset if common.preset in cls.presets else None, **own}
        settings = {
            **dealing,
            **scaled_plan(cls, known[label], {**own_options, "set": {}}),
            **_settings_of(label, common.set, known),
            **make_options({"set": own.get("set", {})}).set,
        }
        specified = {name: value for name, value in own_options.items() if value is not None}
        return make_options({**specified, "set": settings})

    return {label: options_of(label, own) for label, own in variants.items()}


def _dealing_of_presets(common: Options, classes: Sequence[type[Method]]) -> dict[str, str]:
    """How the presets of some methods deal out the images: then so for all methods, to be fair."""
    return {
        f"data.{key}": str(value)
        for cls in classes
        for key, value in dealing_of_preset(cls, common.preset, common.protocol).items()
    }


def _variants(methods: Methods) -> dict[str, dict[str, Any]]:
    """Label and own options of everything that is compared."""
    if isinstance(methods, Mapping):
        variants = {label: {"method": label, **own} for label, own in methods.items()}
    else:
        names = method_names() if list(methods) == ["ALL"] else methods
        variants = {name: {"method": name} for name in names}
    if not variants:
        raise UserError("there is nothing to compare; name at least one method, or ALL")
    return variants


def _refuse_unused_settings(settings: Mapping[str, str], known: Mapping[str, set[str]]) -> None:
    for key in settings:
        if key.startswith(("model.", "data.")):
            continue
        owner = _owner(key, known)
        if owner is None and "." in key:
            raise UserError(f"--set {key}: {key.rpartition('.')[0]!r} is not among the compared methods")
        accepted = set[str]().union(*known.values()) if owner is None else known[owner]
        if (key if owner is None else key.removeprefix(f"{owner}.")) not in accepted:
            raise UserError(f"--set {key}: none of the methods has such a hyper-parameter")


def _settings_of(label: str, settings: Mapping[str, str], known: Mapping[str, set[str]]) -> dict[str, str]:
    """What of the common settings concerns one method; METHOD.KEY goes before KEY."""
    general = {
        key: value for key, value in settings.items() if key.startswith(("model.", "data.")) or key in known[label]
    }
    own = {key.removeprefix(f"{label}."): value for key, value in settings.items() if _owner(key, known) == label}
    return {**general, **own}


def _owner(key: str, labels: Iterable[str]) -> str | None:
    """The method that METHOD.KEY names; a label such as file.py:Class also has dots."""
    return max((label for label in labels if key.startswith(f"{label}.")), key=len, default=None)


def scaled_plan(cls: type[Method], known: set[str], options: Mapping[str, Any]) -> dict[str, str]:
    """A method that brings its own plan gets it scaled to the epochs of the others, so that all train equally long."""
    if "plan" not in known:
        return {}
    requested = make_options({name: value for name, value in options.items() if value is not None}).training_plan()
    budget, own = sum(requested.epochs), cls().plan(requested).epochs
    return {"plan": ",".join(str(max(1, round(budget * epochs / sum(own)))) for epochs in own)}

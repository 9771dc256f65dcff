"""Several methods under equal conditions: for each seed the same partition, initial weights and client draws."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from statistics import mean
from typing import Any

from protofed.clients import write_atomically
from protofed.errors import UserError
from protofed.experiments.options import make_options
from protofed.experiments.results import Run
from protofed.experiments.run import run
from protofed.experiments.statistics import paired_tests, spread
from protofed.method import Method
from protofed.registry import find_method, knobs, load_plugin, method_names

_VIEWS = ("global", "personal")


class Comparison:
    """The content of comparison.json, and tables of it."""

    def __init__(self, path: Path, content: dict[str, Any]) -> None:
        self.path = path
        self.content = content

    def table(self, view: str, show: Callable[[float | None], str]) -> tuple[list[str], list[list[str]]]:
        """Columns and rows of one view; methods for which it makes no sense are left out."""
        methods = {name: entry[view] for name, entry in self.content["methods"].items() if entry[view] is not None}
        if not methods:
            return [], []
        parts = list(next(iter(methods.values()))["per_part"]) if view == "global" else []
        rows = []
        for name, entry in methods.items():
            average, test = entry["average"], entry["test"]
            row = [name, *(show(entry["per_part"][part]["mean"]) for part in parts), show(average["mean"])]
            row.append("-" if average["std"] is None else show(average["std"]))
            row.append(show(entry["worst"]["mean"]))
            row.append("-" if test is None else f"{test['p_holm']:.3f}")
            rows.append(row)
        return ["method", *parts, "average", "std", "worst", f"p vs {self.content['baseline']}"], rows

    def costs(self, show: Callable[[float], str]) -> tuple[list[str], list[list[str]]]:
        """Bytes and seconds of a run of each method."""
        rows = [
            [
                name,
                show(entry["bytes"]["up"]["total"]),
                show(entry["bytes"]["down"]["total"]),
                f"{entry['seconds']:.1f} s",
            ]
            for name, entry in self.content["methods"].items()
        ]
        return ["method", "sent up", "sent down", "time"], rows


def compare(
    methods: Sequence[str],
    *,
    out: str | Path,
    seeds: Sequence[int] = (0,),
    baseline: str = "fedavg",
    callbacks: Iterable[Any] = (),
    **options: Any,
) -> Comparison:
    """Run every method with every seed and put the results side by side.

    The options are those of `run`. Finished runs found in `out` are not repeated, unfinished ones are resumed. A
    setting `METHOD.KEY` goes to one method, a plain `KEY` to every method that has such a hyper-parameter.
    """
    folder = Path(out)
    for plugin in _listed(options.get("plugin")):
        load_plugin(plugin)
    names = method_names() if list(methods) == ["ALL"] else list(dict.fromkeys(methods))
    plans = _options_of_each(names, make_options(options).set, options)
    runs = {
        name: [_run_once(folder, {**plan, "seed": seed}, list(callbacks)) for seed in seeds]
        for name, plan in plans.items()
    }
    content = {
        "baseline": baseline,
        "seeds": list(seeds),
        "options": make_options({key: value for key, value in options.items() if key != "set"}).model_dump(),
        "methods": _summaries(runs, baseline, folder),
    }
    result = Comparison(folder, content)
    write_atomically(folder / "comparison.json", json.dumps(content, indent=2).encode() + b"\n")
    write_atomically(folder / "comparison.md", _markdown(result).encode())
    return result


def _options_of_each(
    names: Sequence[str], settings: Mapping[str, str], options: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """The options of each method's runs; a setting or preset that no method takes is a mistake."""
    classes = {name: find_method(name) for name in names}
    knobs_of = {name: {knob.name for knob in knobs(cls)} for name, cls in classes.items()}
    for key in settings:
        owner, dot, knob = key.partition(".")
        if owner in ("model", "data"):
            continue
        if dot and owner not in classes:
            raise UserError(f"--set {key}: {owner!r} is not among the methods that are compared")
        if not any((knob if dot else key) in taken for name, taken in knobs_of.items() if not dot or name == owner):
            raise UserError(f"--set {key}: none of the methods has such a hyper-parameter")
    preset = options.get("preset")
    if preset is not None and not any(preset in cls.presets for cls in classes.values()):
        raise UserError(f"--preset {preset}: none of the methods has such a preset")
    return {
        name: {
            **options,
            "method": name,
            "preset": preset if preset in cls.presets else None,
            "set": {**_own_plan(knobs_of[name], cls, options), **_settings_of(name, settings, knobs_of[name])},
        }
        for name, cls in classes.items()
    }


def _own_plan(known: set[str], cls: type[Method], options: Mapping[str, Any]) -> dict[str, str]:
    """A method that brings its own plan gets it scaled to the epochs of the others, so that all train equally long."""
    if "plan" not in known:
        return {}
    asked = make_options({key: value for key, value in options.items() if key != "set"}).training_plan()
    budget, own = sum(asked.epochs), cls().plan(asked).epochs
    return {"plan": ",".join(str(max(1, round(budget * epochs / sum(own)))) for epochs in own)}


def _settings_of(name: str, settings: Mapping[str, str], known: set[str]) -> dict[str, str]:
    general = {key: value for key, value in settings.items() if key.startswith(("model.", "data.")) or key in known}
    own = {key.removeprefix(f"{name}."): value for key, value in settings.items() if key.startswith(f"{name}.")}
    return {**general, **own}


def _run_once(folder: Path, options: dict[str, Any], callbacks: list[Any]) -> Run:
    """One run, in a folder named by a hash of what defines it; done, resumed or started as its folder shows."""
    chosen = make_options({key: value for key, value in options.items() if value is not None})
    defining = chosen.model_dump(exclude={"engine", "workers", "device"})
    digest = blake2b(json.dumps(defining, sort_keys=True).encode(), digest_size=4).hexdigest()
    path = folder / f"{Path(chosen.method).stem}-seed{chosen.seed}-{digest}"
    existing = Run(path)
    if existing.complete:
        return existing
    return run(out=path, resume=(path / "run.json").exists(), callbacks=callbacks, **chosen.model_dump())


def _summaries(runs: Mapping[str, list[Run]], baseline: str, folder: Path) -> dict[str, Any]:
    summaries = {name: [each.summary for each in listed] for name, listed in runs.items()}
    views = {view: _view(summaries, view, baseline) for view in _VIEWS}
    return {
        name: {
            "kind": runs[name][0].config["method"]["kind"],
            **{view: views[view].get(name) for view in _VIEWS},
            "bytes": {
                way: {kind: mean(each["bytes"][way][kind] for each in listed) for kind in listed[0]["bytes"][way]}
                for way in ("up", "down")
            },
            "seconds": mean(each["seconds"]["total"] for each in listed),
            "paper": None,
            "runs": [str(each.path.relative_to(folder)) for each in runs[name]],
        }
        for name, listed in summaries.items()
    }


def _view(summaries: Mapping[str, list[dict[str, Any]]], view: str, baseline: str) -> dict[str, Any]:
    """Mean, spread and paired test of every method that has this view."""
    found = {
        name: [each["accuracy"][view] for each in listed]
        for name, listed in summaries.items()
        if listed[0]["accuracy"][view] is not None
    }
    tests = paired_tests({name: [each["average"] for each in listed] for name, listed in found.items()}, baseline)
    entries = {}
    for name, listed in found.items():
        parts = [part for part in listed[0] if part not in ("average", "pooled", "held_out", "quantiles")]
        per_part = {part: spread([each[part] for each in listed]) for part in parts}
        entries[name] = {
            "average": spread([each["average"] for each in listed]),
            "worst": spread([min((each[part] for part in parts), default=each["average"]) for each in listed]),
            "per_part": per_part,
            "test": tests.get(name),
        }
    return entries


def _markdown(result: Comparison) -> str:
    def percent(value: float | None) -> str:
        return "-" if value is None else f"{100 * value:.2f}"

    def megabytes(count: float) -> str:
        return f"{count / 1e6:.2f} MB"

    blocks = ["# Comparison", f"Seeds {', '.join(map(str, result.content['seeds']))}; accuracy in %."]
    for view in _VIEWS:
        columns, rows = result.table(view, percent)
        if rows:
            blocks += [f"## {view.capitalize()} view", _rows_as_markdown(columns, rows)]
    blocks += ["## Costs per run", _rows_as_markdown(*result.costs(megabytes))]
    return "\n\n".join(blocks) + "\n"


def _rows_as_markdown(columns: list[str], rows: list[list[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in [columns, ["---"] * len(columns), *rows])


def _listed(value: object) -> list[str]:
    if value is None:
        return []
    return [value] if isinstance(value, str) else list(value)  # type: ignore[call-overload]

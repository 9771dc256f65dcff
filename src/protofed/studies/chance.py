"""What models that have learned nothing would reach in a comparison, and the warnings of its runs."""

from collections.abc import Iterable, Mapping, Sequence
from statistics import mean
from typing import Any

from protofed.runs.opened import Run
from protofed.studies.schema import ChanceView, SeedWarning, View

_NOT_PARTS = ("average", "pooled", "held_out", "quantiles")


def chance_of(runs: Iterable[Run], view: View) -> ChanceView | None:
    """Chance in one view, averaged over the runs that have it; None where no run does, such as those of old folders."""
    known = [(run, levels) for run in runs if (levels := (run.config.get("chance") or {}).get(view)) is not None]
    if not known:
        return None
    partition = known[0][0].config["partition"]
    held_out = partition["held_out"]
    parts = _means([levels for _, levels in known])
    average = parts.pop("average")
    if view == "global":
        by_domain = {name: value for name, value in parts.items() if name not in held_out}
        return {
            "average": average,
            "per_domain": by_domain,
            "held_out": {name: parts[name] for name in held_out if name in parts},
            "per_client": {},
        }
    domains: dict[str, list[float]] = {}
    for client, value in parts.items():
        domain = partition["clients"].get(client, {}).get("domain")
        if domain:
            domains.setdefault(domain, []).append(value)
    per_domain = {domain: mean(values) for domain, values in domains.items()}
    return {"average": average, "per_domain": per_domain, "held_out": {}, "per_client": parts}


def warnings_of(runs: Mapping[int, Run]) -> list[SeedWarning]:
    """What went wrong in the complete runs of a method, seed by seed."""
    return [
        {"seed": seed, **warning}  # type: ignore[typeddict-item]
        for seed, run in runs.items()
        for warning in run.summary.get("warnings", [])
    ]


def _means(views: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Of every part, over the views that know it."""
    names = dict.fromkeys(name for view in views for name in view if name == "average" or name not in _NOT_PARTS)
    known = {name: [view[name] for view in views if view.get(name) is not None] for name in names}
    return {name: mean(values) for name, values in known.items() if values}

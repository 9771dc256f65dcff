"""The content of comparison.json, as `compare` writes it for methods and `reproduce` for the tables of papers."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NotRequired, TypedDict

from protofed.errors import UserError
from protofed.federation.required import require
from protofed.metrics import PairedOnImages
from protofed.runs.health import RunWarning
from protofed.studies.statistics import PairedTest, PartialSpread, Spread

if TYPE_CHECKING:
    from typing_extensions import TypeIs  # in typing from Python 3.13 on

View = Literal["global", "personal"]
"""Whose model is scored: the server's, or what each client would use."""

Scale = Literal["lite", "paper", "imagenet"]
"""How a table is run: small from scratch, as published, or from a backbone that has seen ImageNet."""

VIEWS: tuple[View, ...] = ("global", "personal")

BytesByKind = dict[str, dict[str, float]]
"""By direction (`up`, `down`) and kind of content; `total` is one of the kinds."""


class WorstSpread(Spread):
    """The lowest part of each seed, and which part it was."""

    names: list[str]


class AccuracyOverSeeds(TypedDict):
    """Accuracy of a method in one view."""

    average: Spread
    pooled: Spread | None
    per_domain: dict[str, Spread]
    worst_domain: WorstSpread | None
    held_out: dict[str, Spread]
    per_client: dict[str, Spread]
    worst_client: WorstSpread | None


class ImageInterval(Spread):
    """A figure over seeds, and its 95 % interval over test images."""

    interval: list[float] | None


class ImageTest(PairedOnImages):
    """A paired test on test images, its p-value corrected for the number of methods."""

    p_holm: float | None


class MetricOverSeeds(TypedDict):
    """One method in one view, by the chosen metric."""

    average: ImageInterval
    parts: dict[str, ImageInterval]
    worst: WorstSpread
    gap: Spread
    """Between the best and the worst part."""
    test: PairedTest | None
    """Over seeds."""
    test_on_images: ImageTest | None


class ComparedView(AccuracyOverSeeds):
    """The same with its test against the baseline, and how the runs converged."""

    test: PairedTest | None
    rounds_to_target: PartialSpread
    bytes_to_target: PartialSpread
    convergence_round: PartialSpread
    fluctuation: PartialSpread


class ChanceView(TypedDict):
    """What a model that has learned nothing would reach in one view: always the most frequent class of a test set."""

    average: float
    per_domain: dict[str, float]
    held_out: dict[str, float]
    per_client: dict[str, float]


class SeedWarning(RunWarning):
    """A warning of one run of a method."""

    seed: int


ComparedMethod = TypedDict(
    "ComparedMethod",
    {
        "kind": str | None,
        "knobs": dict[str, Any] | None,
        "global": ComparedView | None,
        "personal": ComparedView | None,
        "bytes": BytesByKind | None,
        "seconds": float | None,
        "paper": dict[str, Any] | None,
        "seeds": list[int],
        "runs": list[str],
        "warnings": list[SeedWarning],
        "by_metric": NotRequired[dict[str, MetricOverSeeds | None]],
    },
)
"""A method of a comparison; figures are None before its first run is complete."""


class MissingRun(TypedDict):
    """A run without a result, and why."""

    seed: int
    run: str
    reason: str
    failed: bool


class MissingMethodRun(MissingRun):
    """The same, of a comparison."""

    method: str


class ComparisonSummary(TypedDict):
    """What the complete runs of a comparison amount to."""

    target: dict[str, float | None]
    chance: dict[View, ChanceView | None]
    methods: dict[str, ComparedMethod]


class ComparisonConditions(TypedDict):
    """Under what conditions methods are compared."""

    baseline: str
    metric: NotRequired[str]
    """What `by_metric` of the methods is about."""
    seeds: list[int]
    options: dict[str, Any]
    settings: dict[str, str]


class ComparisonContent(ComparisonConditions, ComparisonSummary):
    """comparison.json of `compare`."""

    complete: bool
    missing: list[MissingMethodRun]


class ReproducedView(TypedDict):
    """Accuracy of a row in one view: its columns, their average, and the test against the baseline."""

    average: Spread
    worst: Spread
    columns: dict[str, Spread]
    test: PairedTest | None


ReproducedMethod = TypedDict(
    "ReproducedMethod",
    {
        "method": str,
        "settings": dict[str, Any],
        "global": ReproducedView | None,
        "personal": ReproducedView | None,
        "bytes": BytesByKind | None,
        "seconds": float | None,
        "leakage": dict[str, Any] | None,
        "curve": list[tuple[int, float]],
        "paper": dict[str, Any] | None,
        "runs": dict[str, list[str]],
    },
)
"""A row of a table that is trained; `runs` are by condition."""


class TrainedBlock(TypedDict):
    """A data set of a table that is trained, row by row."""

    methods: dict[str, ReproducedMethod]


class ComputedBlock(TypedDict):
    """A data set of a table that is computed without training."""

    columns: list[str]
    rows: list[list[Any]]


class ReproductionContent(TypedDict):
    """comparison.json of `reproduce`."""

    preset: str
    title: str
    scale: Scale
    seeds: list[int]
    methods: list[str] | None
    columns: list[str] | None
    options: dict[str, Any]
    baseline: str
    notes: list[str]
    datasets: dict[str, TrainedBlock | ComputedBlock]


_KEYS = {
    "options": {"data": str},
    "methods": dict,
    "seeds": list,
    "missing": list,
    "baseline": object,
    "target": object,
}
"""What every reader of a comparison expects."""


def read_comparison(folder: Path) -> ComparisonContent | ReproductionContent:
    """comparison.json of a folder; `is_reproduction` tells which of the two it is."""
    path = folder / "comparison.json"
    try:
        content = json.loads(path.read_text())
    except ValueError:
        raise UserError(f"{path} is damaged: it is not JSON") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} is damaged: it is not a JSON object")
    return require(content, {} if "preset" in content else _KEYS, path)  # type: ignore[return-value]


def is_reproduction(content: ComparisonContent | ReproductionContent) -> "TypeIs[ReproductionContent]":
    """Whether `reproduce` wrote it."""
    return "preset" in content


def is_trained(block: TrainedBlock | ComputedBlock) -> "TypeIs[TrainedBlock]":
    """Whether a data set of a table has runs."""
    return "methods" in block

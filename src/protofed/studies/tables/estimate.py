"""What the runs of a published table would take here, from one batch of each on generated images."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any, get_args

from protofed.clients.trial import Trial
from protofed.method import Plan
from protofed.registry import find_method, knobs
from protofed.runs.assembly import Assembly
from protofed.runs.estimate import WEIGHT_COPIES, samples_of_run
from protofed.runs.options import Options
from protofed.studies.schema import Scale
from protofed.studies.tables.fixtures import fixture, shape_in_runs
from protofed.studies.tables.leakage import attack_seconds
from protofed.studies.tables.preset import Preset, PublishedRow
from protofed.studies.tables.traffic import traffic
from protofed.system import cores

_DECIDING = {
    *("method", "model", "weights", "train", "views", "batch", "optimizer", "guard", "plugin"),
    *("device", "dtype", "autocast", "layout", "frozen"),
}
"""Options that decide how long training on an image takes."""


@dataclass(frozen=True)
class Estimate:
    """Of one run of one row."""

    dataset: str
    row: str
    method: str
    runs: int
    """Of such runs for one seed: one for each condition of the table."""
    clients: int
    rounds: int
    seconds: float
    """On one core of this machine, when what frozen stages make of the images is there; with the attack on it in a
    table about that."""
    memory: int
    up: int
    down: int
    frozen: int
    """Stages that are computed once for each image."""
    extraction: float
    """Seconds of that; all runs with as many frozen stages on the same images share it."""

    def as_dict(self) -> dict[str, Any]:
        """For machines."""
        return asdict(self)


@dataclass(frozen=True)
class ImageCost:
    """Processor time that runs of one kind take for an image on this machine, and what attacks on them take."""

    trained: float
    extracted: float
    """Of the frozen stages, once for each view."""
    views: int
    frozen: int
    """Stages that are computed once for each image."""
    attack: float
    saved_bytes: float
    """Kept of an image between the forward and the backward pass."""

    @classmethod
    def measure(cls, preset: Preset, assembly: Assembly) -> "ImageCost":
        """From one batch of one client."""
        trial, context = Trial(assembly.prepared), assembly.context
        sample = trial.sample_cost()
        return cls(
            sample.seconds,
            trial.extraction_seconds(),
            context.views,
            max((len(part.prefix) for part in context.frozen), default=0),
            attack_seconds(context) if preset.kind == "leakage" else 0.0,
            sample.saved_bytes,
        )

    def of_run(self, plan: Plan, options: Options, sizes: Mapping[str, int], test_images: int) -> float:
        """Of a run for whose images frozen stages were computed."""
        return self.trained * samples_of_run(plan, options, sizes, test_images) + self.attack

    def of_extraction(self, sizes: Mapping[str, int], test_images: int) -> float:
        """Of the frozen stages for all images of a run."""
        return self.extracted * (test_images + self.views * sum(sizes.values()))


def measured_cost(
    preset: Preset, row: PublishedRow, dataset: str, scale: Scale, overrides: Mapping[str, Any]
) -> ImageCost:
    """Assemble one row on generated images and let one client train on one batch."""
    with fixture(preset, row, dataset, scale, overrides) as ready:
        return ImageCost.measure(preset, ready.assembly)


def cost_key(preset: Preset, dataset: str, scale: Scale, options: Options) -> str:
    """The same for runs that take as long for an image: the same network, trained in the same way on as many pixels.

    Neither clients nor rounds count, nor hyper-parameters that are fractions or weights.
    """
    weights = {knob.name for knob in knobs(find_method(options.method)) if float in (knob.hint, *get_args(knob.hint))}
    # What a suite says of data decides by the pixels that it gives.
    counted = {key: value for key, value in options.set.items() if key not in weights and not key.startswith("data.")}
    deciding = {
        **options.model_dump(include=_DECIDING),
        "set": counted | {"data.augment": options.set.get("data.augment")},
        "shape": shape_in_runs(preset.images(dataset, scale).shape, options),
        "attacked": preset.kind == "leakage",
    }
    return json.dumps(deciding, sort_keys=True)


def estimate_row(
    preset: Preset, row: PublishedRow, dataset: str, scale: Scale, overrides: Mapping[str, Any], *, runs: int
) -> Estimate:
    """Assemble one row on generated images, let one client train on one batch, and scale up."""
    with fixture(preset, row, dataset, scale, overrides) as ready:
        cost, context = ImageCost.measure(preset, ready.assembly), ready.assembly.context
        plan, sizes = context.plan, ready.sizes
        sent = traffic(ready.assembly, sizes)
        weights = 4 * sum(parameter.numel() for parameter in context.model.parameters())
        pixels = prod(context.dataset.image_shape) * (
            ready.test_images + sum(train for train, _ in preset.images(dataset, scale).images.values())
        )
        return Estimate(
            dataset,
            row.title,
            row.method,
            runs,
            len(sizes),
            plan.rounds,
            cost.of_run(plan, ready.assembly.options, sizes, ready.test_images),
            int(pixels + WEIGHT_COPIES * weights + cost.saved_bytes * plan.batch),
            sent.up.total,
            sent.down.total,
            cost.frozen,
            cost.of_extraction(sizes, ready.test_images),
        )


def total_hours(estimates: Sequence[Estimate], seeds: int) -> float:
    """Of the whole table on all cores of this machine."""
    shared = {(each.dataset, each.frozen): each.extraction for each in estimates}
    seconds = sum(each.seconds * each.runs for each in estimates) * seeds + sum(shared.values())
    return seconds / cores() / 3600

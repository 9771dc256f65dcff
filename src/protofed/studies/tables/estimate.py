"""What the runs of a published table would take here, from one batch of each on generated images."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from protofed.clients.trial import Trial
from protofed.runs.estimate import WEIGHT_COPIES, samples_of_run
from protofed.studies.schema import Scale
from protofed.studies.tables.fixtures import fixture
from protofed.studies.tables.leakage import attack_seconds
from protofed.studies.tables.preset import Preset, PublishedRow
from protofed.studies.tables.traffic import traffic
from protofed.system import cores


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


def estimate_row(
    preset: Preset, row: PublishedRow, dataset: str, scale: Scale, overrides: Mapping[str, Any], *, runs: int
) -> Estimate:
    """Assemble one row on generated images, let one client train on one batch, and scale up."""
    with fixture(preset, row, dataset, scale, overrides) as ready:
        trial, context = Trial(ready.assembly.prepared), ready.assembly.context
        cost = trial.sample_cost()
        plan, sizes = context.plan, ready.sizes
        sent = traffic(ready.assembly, sizes)
        weights = 4 * sum(parameter.numel() for parameter in context.model.parameters())
        extracted = ready.test_images + context.views * sum(sizes.values())
        pixels = prod(context.dataset.image_shape) * (
            ready.test_images + sum(train for train, _ in preset.images(dataset, scale).images.values())
        )
        attack = attack_seconds(context) if preset.kind == "leakage" else 0.0
        return Estimate(
            dataset,
            row.title,
            row.method,
            runs,
            len(sizes),
            plan.rounds,
            cost.seconds * samples_of_run(ready.assembly, sizes, ready.test_images) + attack,
            int(pixels + WEIGHT_COPIES * weights + cost.saved_bytes * plan.batch),
            sent.up.total,
            sent.down.total,
            max((len(part.prefix) for part in context.frozen), default=0),
            trial.extraction_seconds() * extracted,
        )


def total_hours(estimates: Sequence[Estimate], seeds: int) -> float:
    """Of the whole table on all cores of this machine."""
    shared = {(each.dataset, each.frozen): each.extraction for each in estimates}
    seconds = sum(each.seconds * each.runs for each in estimates) * seeds + sum(shared.values())
    return seconds / cores() / 3600

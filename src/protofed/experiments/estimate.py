"""What a published table would take here, from one batch of each of its methods on generated images."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from protofed.clients import Setting, Templates, Train, Trained
from protofed.engines import cores
from protofed.engines.loop import LoopEngine
from protofed.experiments.fixtures import Fixture, fixture, trial_batch
from protofed.experiments.published import Preset, Row, Scale
from protofed.experiments.traffic import traffic
from protofed.records import encode

_FORWARD = 1 / 3
"""Share of the forward pass in a step of training."""
_COPIES = 4
"""Of the weights while a client trains: as received, trained, their gradients and the optimiser's memory."""


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
    """On one core of this machine."""
    memory: int
    up: int
    down: int

    def as_dict(self) -> dict[str, Any]:
        """For machines."""
        return asdict(self)


def estimate_row(preset: Preset, row: Row, dataset: str, scale: Scale, options: Mapping[str, Any]) -> Estimate:
    """Assemble one row on generated images, let one client train on one batch, and scale up."""
    conditions = preset.conditions(dataset, scale)
    with fixture(preset, dataset, scale, row.method, options) as ready:
        trial = _one_batch(ready, preset.images(dataset, scale).shape)
        plan, sizes = ready.assembly.setting.plan, ready.sizes
        batches = sum(plan.epochs) * (len(sizes) if plan.unit == "steps" else 0)
        trained = batches * plan.batch or sum(plan.epochs) * sum(sizes.values())
        evaluated = ready.test_images * (plan.rounds // ready.assembly.options.evaluate_every)
        sent = traffic(ready.assembly, sizes)
        weights = 4 * sum(parameter.numel() for parameter in ready.assembly.setting.model.parameters())
        pixels = prod(preset.images(dataset, scale).shape) * (
            ready.test_images + sum(train for train, _ in preset.images(dataset, scale).images.values())
        )
        return Estimate(
            dataset,
            row.title,
            row.method,
            len(conditions),
            len(sizes),
            plan.rounds,
            trial.seconds * (trained + _FORWARD * evaluated),
            int(pixels + _COPIES * weights + trial.saved * plan.batch),
            sent.up.total,
            sent.down.total,
        )


@dataclass(frozen=True)
class _Trial:
    """Per sample: time, and bytes that the forward pass keeps for the backward pass."""

    seconds: float
    saved: float


def _one_batch(ready: Fixture, shape: tuple[int, int, int]) -> _Trial:
    assembly = ready.assembly
    batch = trial_batch(shape, assembly.setting.plan.batch)
    plan = replace(assembly.setting.plan, epochs=(1,) * assembly.setting.plan.rounds, unit="steps", batch=batch)
    setting: Setting = replace(assembly.setting, plan=plan)
    client = setting.partition.clients[0]
    message = encode(setting.method.broadcast(assembly.templates.server, setting.at(0, client)), "server")
    saved = _Saved()
    # The first time counts what is kept and warms up; the second is timed, in CPU time, which other work hardly moves.
    with torch.autograd.graph.saved_tensors_hooks(saved.keep, lambda tensor: tensor):
        _trained(setting, assembly.templates, client, message)
    start = time.process_time()
    result = _trained(setting, assembly.templates, client, message)
    seconds = time.process_time() - start
    return _Trial(seconds / max(result.samples, 1), saved.bytes / max(result.samples, 1))


def _trained(setting: Setting, templates: Templates, client: str, message: Any) -> Trained:
    setting.clients_folder.mkdir(parents=True, exist_ok=True)
    ((_, result),) = LoopEngine(setting, templates).perform([(Train(0, client), message)])
    if not isinstance(result, Trained):
        raise RuntimeError(f"{client} cannot train: {result}")
    return result


class _Saved:
    """Counts what the forward pass keeps, each storage once."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}

    def keep(self, tensor: Tensor) -> Tensor:
        """Called by torch for every tensor that is kept."""
        storage = tensor.untyped_storage()
        self._seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    @property
    def bytes(self) -> int:
        return sum(self._seen.values())


def total_hours(estimates: Sequence[Estimate], seeds: int) -> float:
    """Of the whole table on all cores of this machine."""
    return sum(each.seconds * each.runs for each in estimates) * seeds / cores() / 3600

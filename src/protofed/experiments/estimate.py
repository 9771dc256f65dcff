"""What a run would take here, from one batch of it: of a published table on generated images, or of the user's own."""

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from protofed.clients import Setting, Templates, Train, Trained
from protofed.engines import cores
from protofed.engines.loop import LoopEngine
from protofed.experiments.assembly import Assembly
from protofed.experiments.fixtures import fixture, trial_batch
from protofed.experiments.published import Preset, Row, Scale
from protofed.experiments.traffic import traffic
from protofed.guards import UNGUARDED
from protofed.memory import available, refuse_beyond_memory
from protofed.records import encode

_FORWARD = 1 / 3
"""Share of the forward pass in a step of training."""
_NEVER_MORE = 1000
"""Times its size in memory that the forward pass of any of our networks keeps of an image."""
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


def estimate_row(
    preset: Preset, row: Row, dataset: str, scale: Scale, options: Mapping[str, Any], *, runs: int
) -> Estimate:
    """Assemble one row on generated images, let one client train on one batch, and scale up."""
    with fixture(preset, dataset, scale, row.method, options) as ready:
        trial = _one_batch(ready.assembly)
        plan, sizes = ready.assembly.setting.plan, ready.sizes
        sent = traffic(ready.assembly, sizes)
        weights = 4 * sum(parameter.numel() for parameter in ready.assembly.setting.model.parameters())
        pixels = prod(preset.images(dataset, scale).shape) * (
            ready.test_images + sum(train for train, _ in preset.images(dataset, scale).images.values())
        )
        return Estimate(
            dataset,
            row.title,
            row.method,
            runs,
            len(sizes),
            plan.rounds,
            trial.seconds * _samples(ready.assembly, sizes, ready.test_images),
            int(pixels + _COPIES * weights + trial.saved * plan.batch),
            sent.up.total,
            sent.down.total,
        )


@dataclass(frozen=True)
class _Trial:
    """Per sample: time, and bytes that the forward pass keeps for the backward pass."""

    seconds: float
    saved: float


def _samples(assembly: Assembly, sizes: Mapping[str, int], test_images: int) -> float:
    """Samples trained on in a whole run; those that are only scored count as a part of one."""
    plan, options = assembly.setting.plan, assembly.options
    batches = sum(plan.epochs) * (len(sizes) if plan.unit == "steps" else 0)
    trained = batches * plan.batch or sum(plan.epochs) * sum(sizes.values())
    evaluated = test_images * -(-plan.rounds // options.evaluate_every)
    return options.participation * trained + _FORWARD * evaluated


def _one_batch(assembly: Assembly) -> _Trial:
    """A client of the federation trains on one batch; the folder of its clients is written to."""
    batch = trial_batch(assembly.setting.dataset.image_shape, assembly.setting.plan.batch)
    plan = replace(assembly.setting.plan, epochs=(1,) * assembly.setting.plan.rounds, unit="steps", batch=batch)
    # Nothing is kept for later epochs, which a trial does not have.
    setting: Setting = replace(assembly.setting, plan=plan, frozen=())
    client = setting.partition.clients[0]
    message = encode(setting.method.broadcast(assembly.templates.server, setting.at(0, client)), "server")
    saved = _Saved()
    # The first time counts what is kept and warms up; the second is timed, in CPU time, which other work hardly moves.
    # Gradients of single samples, which a guard may take, cannot be watched.
    with torch.autograd.graph.saved_tensors_hooks(saved.keep, lambda tensor: tensor):
        _trained(replace(setting, guard=UNGUARDED), assembly.templates, client, message)
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


def estimate_seconds(assembly: Assembly) -> float:
    """Of a federation that is ready to run, on one core of this machine; a client trains on one batch of its images."""
    with _elsewhere(assembly) as trial:
        tests = sum(len(domain.test) for domain in assembly.setting.dataset.domains.values())
        return _one_batch(trial).seconds * _samples(assembly, assembly.setting.sizes, tests)


def refuse_if_too_large(assembly: Assembly) -> None:
    """A run that would not fit into memory is refused before it starts; small ones are not even tried."""
    setting, processes = assembly.setting, assembly.engine.workers
    if setting.device.type != "cpu":
        return
    number = torch.empty(0, dtype=setting.dtype).element_size()
    image = number * prod(setting.dataset.image_shape)
    # While it trains, a client has its images as numbers beside its weights.
    lasting = number * _COPIES * sum(parameter.numel() for parameter in setting.model.parameters())
    lasting += image * max(setting.sizes.values())
    room = available()
    if room is None or processes * (lasting + _NEVER_MORE * image * setting.plan.batch) < room:
        return
    with _elsewhere(assembly) as trial:
        saved = _one_batch(trial).saved * setting.plan.batch
    remedy = "lower --batch, --image-size or --workers, or take a smaller --model"
    refuse_beyond_memory(processes * (lasting + saved), f"training in {processes} process(es)", remedy)


@contextmanager
def _elsewhere(assembly: Assembly) -> Iterator[Assembly]:
    """Inside: the same federation with clients that leave nothing behind."""
    with tempfile.TemporaryDirectory(prefix="protofed-trial-") as folder:
        yield replace(assembly, setting=replace(assembly.setting, clients_folder=Path(folder)))

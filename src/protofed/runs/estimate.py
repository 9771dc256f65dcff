"""What a run would take here, from one batch of it; a run that would not fit into memory is refused."""

from collections.abc import Mapping
from math import prod

from protofed.clients.samples import KEPT_NORMALISED
from protofed.clients.trial import Trial
from protofed.method import Plan
from protofed.runs.assembly import Assembly
from protofed.runs.options import Options
from protofed.system import available_memory, require_memory

_FORWARD = 1 / 3
"""Share of the forward pass in a step of training."""
_NEVER_MORE = 1000
"""Times its size in memory that the forward pass of any of our networks keeps of an image."""
WEIGHT_COPIES = 4
"""Of the weights while a client trains: as received, trained, their gradients and the optimiser's memory."""


def estimate_seconds(assembly: Assembly) -> float:
    """Of a federation that is ready to run, on one core of this machine; a client trains on one batch of its images."""
    tests = sum(len(domain.test) for domain in assembly.context.dataset.domains.values())
    trial, sizes = Trial(assembly.prepared), assembly.context.sizes
    images = tests + assembly.context.views * sum(sizes.values())
    samples = samples_of_run(assembly.context.plan, assembly.options, sizes, tests)
    return trial.sample_cost().seconds * samples + trial.extraction_seconds() * images


def refuse_if_too_large(assembly: Assembly) -> None:
    """A run that would not fit into memory is refused before it starts; small ones are not even tried."""
    context, processes = assembly.context, assembly.engine.workers
    if context.device.type != "cpu":
        return
    number = context.dtype.itemsize
    image = number * prod(context.dataset.image_shape)
    # While it trains, a client has its images as numbers beside its weights, unless they are many.
    lasting = number * WEIGHT_COPIES * sum(parameter.numel() for parameter in context.model.parameters())
    lasting += min(image * max(context.sizes.values()), KEPT_NORMALISED)
    room = available_memory()
    if room is None or processes * (lasting + _NEVER_MORE * image * context.plan.batch) < room:
        return
    if not any(context.plan.epochs):
        return  # nothing is trained, so nothing is kept for a backward pass
    saved = Trial(assembly.prepared).sample_cost().saved_bytes * context.plan.batch
    remedy = "lower --batch, --image-size or --workers, or use a smaller --model"
    require_memory(processes * (lasting + saved), f"training in {processes} process(es)", remedy)


def samples_of_run(plan: Plan, options: Options, sizes: Mapping[str, int], test_images: int) -> float:
    """Samples trained on in a whole run; those that are only scored count as a part of one."""
    batches = sum(plan.epochs) * (len(sizes) if plan.unit == "steps" else 0)
    trained = batches * plan.batch or sum(plan.epochs) * sum(sizes.values())
    evaluated = test_images * -(-plan.rounds // options.evaluate_every)
    return options.participation * trained + _FORWARD * evaluated

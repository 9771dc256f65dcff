"""Which engine: what the user asked for, or behind `auto` what a short trial on the run's own clients speaks for.

`loop` and `workers` give the same bits, so between them only time decides. `vmap` agrees with them to rounding, which
in float32 a long training may amplify; `auto` therefore takes it only for a run that is long enough for it to matter
and where it is measured to win clearly. run.json says which engine it was and why, and a resumed run goes on with it.
"""

from dataclasses import dataclass, replace

from protofed.clients import Prepared, RunContext
from protofed.clients.trial import Trial
from protofed.engines.flower import prepare_flower
from protofed.errors import UserError
from protofed.models.freezing import frozen_tensors
from protofed.system import CAN_FORK, cores

_HEAVY_STEP = 0.05
"""Seconds of a step from which on arithmetic outweighs everything that vmap saves."""
_LONG_RUN = 60.0
"""Seconds of training from which on the last bits may be traded for time."""
_CLEAR_WIN = 0.8
_SHORT_RUN = 0.5
"""Seconds of training below which starting processes takes longer than they save."""
_PROCESS_SHARE = 1.06
"""Time of n processes over 1/n of the time of one: they share memory and caches."""


@dataclass(frozen=True)
class EngineChoice:
    """An engine, its processes, and why."""

    name: str
    workers: int
    reason: str


def choose_engine(name: str, workers: int | None, participants: int, prepared: Prepared) -> EngineChoice:
    """The engine the user asked for, if it can run this; or the one `auto` takes for so many participants a round."""
    context = prepared.context
    processes = min(workers or cores(), len(context.partition.clients))
    if name == "loop":
        return EngineChoice("loop", 1, "asked for")
    if name == "workers":
        return EngineChoice("workers", processes, "asked for")
    if name == "flower":
        prepare_flower()
        if context.device.type != "cpu":
            raise UserError("engine=flower computes on the CPU; omit --device, or use another engine")
        return EngineChoice("flower", processes, "asked for")
    if name == "vmap":
        _refuse_unless_vectorised(prepared)
        return EngineChoice("vmap", 1, "asked for")
    if workers is not None and processes > 1:
        return EngineChoice("workers", processes, "a number of processes was given")
    if context.device.type != "cpu":
        return EngineChoice("loop", 1, "one process feeds the device")
    if participants == 1:
        return EngineChoice("loop", 1, "one client at a time: there is nothing to distribute")
    return _fastest(processes if CAN_FORK else 1, participants, prepared)


def _fastest(processes: int, participants: int, prepared: Prepared) -> EngineChoice:
    """From a trial of a few batches."""
    context, trial = prepared.context, Trial(prepared)
    try:
        step = trial.step_seconds()
    except Exception as error:  # the run itself will leave the client out and say so
        untimed = f"a trial batch failed ({type(error).__name__})"
        return EngineChoice("workers", processes, untimed) if processes > 1 else EngineChoice("loop", 1, untimed)
    steps = participants * context.plan.rounds * trial.steps_each
    alone = step * steps
    share = _largest_share(processes, participants, context) * _PROCESS_SHARE if processes > 1 else 1.0
    measured = f"a batch takes {1000 * step:.3g} ms, all rounds about {alone:.3g} s in one process"
    if processes == 1 or alone < _SHORT_RUN:
        best = EngineChoice("loop", 1, measured)
    else:
        best = EngineChoice("workers", processes, f"{measured}, {share * alone:.3g} s in {processes}")
    bit_equal = alone if best.name == "loop" else share * alone
    if bit_equal < _LONG_RUN or step > _HEAVY_STEP or _not_vectorised(context):
        return best
    try:
        together = trial.stacked_step_seconds() * steps
    except Exception:  # vmap does not support everything a method may do; the other engines do
        return best
    if together > _CLEAR_WIN * bit_equal:
        return replace(best, reason=f"{best.reason}, {together:.3g} s in vmap")
    reason = f"{best.reason}, {together:.3g} s in vmap, whose results agree with the others' to rounding"
    return EngineChoice("vmap", 1, reason)


def _largest_share(processes: int, participants: int, context: RunContext) -> float:
    """The part of a round's work that the busiest process has, when the longest clients go first."""
    sizes = sorted(context.sizes.values(), reverse=True)[:participants]
    loads = [0] * processes
    for size in sizes:
        loads[loads.index(min(loads))] += size
    return max(loads) / sum(sizes)


def _not_vectorised(context: RunContext) -> str:
    """Why clients of this run cannot step together, as far as that is known without trying."""
    if context.guard.trains_privately:
        return "their gradients are clipped per sample"
    if frozen_tensors(context.model):
        return "their frozen stages are computed once per image, which vmap does not do"
    return context.method.not_vectorised


def _refuse_unless_vectorised(prepared: Prepared) -> None:
    """By what the method says of itself, or by trying."""
    context = prepared.context
    reason = _not_vectorised(context)
    if not reason:
        try:
            Trial(prepared).check_stacked()
        except Exception as error:
            reason = str(error).strip().splitlines()[0]
    if reason:
        raise UserError(
            f"engine=vmap: the clients of {type(context.method).__name__} cannot be trained together: {reason}; "
            "use --engine workers or loop"
        )

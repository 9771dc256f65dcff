"""Which engine: what the user asked for, or behind `auto` what a short trial on the run's own clients speaks for.

`loop` and `workers` give the same bits, so between them only time decides. `vmap` agrees with them to rounding, which
in float32 a long training may amplify; `auto` therefore takes it only for a run that is long enough for it to matter
and where it is measured to win clearly. run.json says which engine it was and why, and a resumed run goes on with it.
"""

import math
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from protofed.clients import ClientSide, Setting, Templates, Train
from protofed.clients.client import Ready
from protofed.clients.optimizers import make_optimizers
from protofed.clients.training import train
from protofed.clients.vectorised import alike, train_together
from protofed.engines.grid import prepare_flower
from protofed.errors import UserError
from protofed.records import encode

CAN_FORK = sys.platform == "linux"

_TRIAL_STEPS = 4
_TRIAL_CREW = 8
_HEAVY_STEP = 0.05
"""Seconds of a step from which on arithmetic outweighs everything that vmap saves."""
_LONG_STEP = 0.2
"""Seconds of a step that is estimated and not measured."""
_STEP_IN_LOOKS = 3
"""A step of training is a look at the images and twice as much on the way back."""
_LONG_RUN = 60.0
"""Seconds of training from which on the last bits may be traded for time."""
_CLEAR_WIN = 0.8
_SHORT_RUN = 0.5
"""Seconds of training below which starting processes takes longer than they save."""
_PROCESS_SHARE = 1.06
"""Time of n processes over 1/n of the time of one: they share memory and caches."""


@dataclass(frozen=True)
class Choice:
    """An engine, its processes, and why."""

    name: str
    workers: int
    reason: str


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def choose_engine(
    name: str, workers: int | None, participation: float, setting: Setting, templates: Templates
) -> Choice:
    """The engine the user asked for, if it can run this; or the one `auto` takes."""
    participants = max(1, math.ceil(participation * len(setting.partition.clients) - 1e-9))
    processes = min(workers or cores(), len(setting.partition.clients))
    if name == "loop":
        return Choice("loop", 1, "asked for")
    if name == "workers":
        return Choice("workers", processes, "asked for")
    if name == "flower":
        prepare_flower()
        if setting.device.type != "cpu":
            raise UserError("engine=flower computes on the CPU; leave out --device, or take another engine")
        return Choice("flower", processes, "asked for")
    if name == "vmap":
        _refuse_unless_vectorised(setting, templates)
        return Choice("vmap", 1, "asked for")
    if workers is not None and processes > 1:
        return Choice("workers", processes, "a number of processes was asked for")
    if setting.device.type != "cpu":
        return Choice("loop", 1, "one process feeds the device")
    if participants == 1:
        return Choice("loop", 1, "one client at a time: there is nothing to share out")
    return _fastest(processes if CAN_FORK else 1, participants, setting, templates)


def _fastest(processes: int, participants: int, setting: Setting, templates: Templates) -> Choice:
    """From a trial of a few batches."""
    trial = Trial(setting, templates)
    try:
        step = trial.alone()
    except Exception as error:  # the run itself will leave the client out and say so
        untimed = f"a trial batch failed ({type(error).__name__})"
        return Choice("workers", processes, untimed) if processes > 1 else Choice("loop", 1, untimed)
    steps = participants * setting.plan.rounds * trial.steps_each
    alone = step * steps
    share = _largest_share(processes, participants, setting) * _PROCESS_SHARE if processes > 1 else 1.0
    measured = f"a batch takes {1000 * step:.3g} ms, all rounds about {alone:.3g} s in one process"
    if processes == 1 or alone < _SHORT_RUN:
        best = Choice("loop", 1, measured)
    else:
        best = Choice("workers", processes, f"{measured}, {share * alone:.3g} s in {processes}")
    bit_equal = alone if best.name == "loop" else share * alone
    if bit_equal < _LONG_RUN or step > _HEAVY_STEP or _not_vectorised(setting):
        return best
    try:
        together = trial.together() * steps
    except Exception:  # whatever a method does that vmap does not know: the others can do it
        return best
    if together > _CLEAR_WIN * bit_equal:
        return replace(best, reason=f"{best.reason}, {together:.3g} s in vmap")
    reason = f"{best.reason}, {together:.3g} s in vmap, whose results agree with the others' to rounding"
    return Choice("vmap", 1, reason)


def _largest_share(processes: int, participants: int, setting: Setting) -> float:
    """The part of a round's work that the busiest process has, when the longest clients go first."""
    sizes = sorted(setting.sizes.values(), reverse=True)[:participants]
    loads = [0] * processes
    for size in sizes:
        loads[loads.index(min(loads))] += size
    return max(loads) / sum(sizes)


def _not_vectorised(setting: Setting) -> str:
    """Why clients of this run cannot step together, as far as that is known without trying."""
    if setting.guard.trains_privately:
        return "their gradients are clipped sample by sample"
    return setting.method.not_vectorised


def _refuse_unless_vectorised(setting: Setting, templates: Templates) -> None:
    """By what the method says of itself, or by trying."""
    reason = _not_vectorised(setting)
    if not reason:
        try:
            Trial(setting, templates).rehearse_together()
        except Exception as error:
            reason = str(error).strip().splitlines()[0]
    if reason:
        raise UserError(
            f"engine=vmap: the clients of {type(setting.method).__name__} cannot step together: {reason}; "
            "use --engine workers or loop"
        )


class Trial:
    """Times the training of the run's first clients, from its first broadcast; nothing is written."""

    def __init__(self, setting: Setting, templates: Templates) -> None:
        self._setting = setting
        # Without kept features, which are filled client by client: a trial must not do the work of the run.
        self._side = ClientSide(replace(setting, frozen=()), templates)
        self._message = encode(templates.down, "server")

    @property
    def steps_each(self) -> float:
        """Batches of a client in a round, on average."""
        plan, sizes = self._setting.plan, self._setting.sizes.values()
        epochs = sum(plan.epochs) / plan.rounds
        if plan.unit == "steps":
            return epochs
        return epochs * sum(math.ceil(size / plan.batch) for size in sizes) / len(sizes)

    def alone(self) -> float:
        """Seconds of a batch of one client after the other."""
        (ready,) = self._crew(1, _TRIAL_STEPS)
        guess = self._guess(ready)
        if guess > _LONG_STEP:
            return guess  # what decides is far away, and whole batches would take long
        self._train(_shortened(ready, 1))
        return _seconds(lambda: self._train(ready)) / _TRIAL_STEPS

    def _guess(self, ready: Ready) -> float:
        """About the seconds of a batch, from looking at two images; the first look wakes everything up."""
        net = self._side.net_of(ready.job.client)
        x, _ = next(ready.samples.batches(2))
        with torch.no_grad(), net.eval():
            look = min(_seconds(lambda: net.features(x)) for _ in range(3))
        return look / len(x) * min(self._setting.plan.batch, len(ready.samples)) * _STEP_IN_LOOKS

    def together(self) -> float:
        """Seconds of a batch of one client among others."""
        crew = self._crew(_TRIAL_CREW, _TRIAL_STEPS)
        self._train_together([_shortened(ready, 1) for ready in crew])
        return _seconds(lambda: self._train_together(crew)) / (_TRIAL_STEPS * len(crew))

    def rehearse_together(self) -> None:
        """One step of two clients; raises whatever goes wrong."""
        self._train_together(self._crew(2, 1))

    def _crew(self, size: int, steps: int) -> list[Ready]:
        """The first clients, ready for a few steps only."""
        clients = list(self._setting.partition.clients)[:size]
        return [_shortened(self._side.prepare(Train(0, client), self._message), steps) for client in clients]

    def _train(self, ready: Ready) -> None:
        setting, net = self._setting, self._side.net_of(ready.job.client)
        optimizers = make_optimizers(setting.method, net, setting.plan, ready.at.lr)
        train(setting.method, net, ready.samples, ready.at, optimizers, setting.precision)

    def _train_together(self, crew: list[Ready]) -> None:
        for group in alike(crew):
            net = self._side.net_of(group[0].job.client)
            for _ in train_together(self._setting.method, net, group, self._setting.precision):
                pass


def _shortened(ready: Ready, steps: int) -> Ready:
    """The same client with that many batches to train on."""
    plan = ready.at.plan
    return replace(ready, at=replace(ready.at, plan=replace(plan, unit="steps", epochs=(steps,) * plan.rounds)))


def _seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start

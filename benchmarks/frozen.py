"""What a frozen backbone saves: a round of ours beside a bare PyTorch loop over the same frozen model, in CPU time.

    python -m benchmarks.frozen [--alternations 9] [--quick] [--write]

The bare loop computes the backbone in every step, and trains and averages nothing but what is trained. Ours keeps the
features behind the frozen prefix and folds batch normalisation. Two rounds of ours are timed: the first, in which the
features are computed, and the second, in which they are at hand. That both sides do the same is checked before.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from benchmarks import RESULTS, Ratios, Workload, cpu_seconds, federation, in_turn, report, run_rounds, table
from benchmarks.bare import BareLoop, refuse_other_work
from protofed.federation import Federation
from protofed.method import At, Terms
from protofed.methods.fedadapter import AveragesShared, FedAdapter, FrozenBackbone, FrozenBackboneServer
from protofed.models import Split, build_model, head
from protofed.models.net import Net
from protofed.registry import registered
from protofed.verbs import cross_entropy


class HeadOnly(AveragesShared):
    """Nothing but the last stage of the network is trained and averaged."""

    trained = head

    def loss(self, net: Net, x: Tensor, y: Tensor, at: At) -> Terms:
        """Cross-entropy."""
        return {"ce": cross_entropy(net(x), y)}


@dataclass(frozen=True)
class Case:
    """What is trained on a frozen backbone, and what the two rounds may cost beside the bare loop's."""

    name: str
    method: type[FrozenBackbone]
    work: Workload
    first_goal: float | None
    later_goal: float
    settings: dict[str, object] = field(default_factory=dict)


class Measured(NamedTuple):
    """CPU time of our first round and of a later one over that of a round of the bare loop."""

    first: Ratios
    later: Ratios


_WORK = Workload("resnet50", "resnet50", (3, 64, 64), clients=2, samples=192, epochs=10)
_ONLY_CROSS_ENTROPY = {"beta": 0, "mu": 0}
CASES = (
    Case("adapters", FedAdapter, replace(_WORK, epochs=3), None, 0.75, _ONLY_CROSS_ENTROPY),
    Case("last stage", HeadOnly, _WORK, 0.2, 0.05),
)
_TINY = Workload("resnet10", "resnet10", (3, 16, 16), clients=2, samples=20, settings={"model.width": 4})
QUICK = tuple(replace(case, work=_TINY) for case in CASES)
_BATCH = 16
_ROUNDS = 2
_LR = 1e-4
"""Labels of noise pull a deep network nowhere in particular, so it must not be pulled far."""


def measure(case: Case, alternations: int) -> Measured:
    """The ratios, alternation by alternation, each with a federation that has computed nothing yet."""
    with tempfile.TemporaryDirectory(prefix="protofed-benchmark-") as temporary, registered(case.method) as name:
        weights = Path(temporary) / "backbone.safetensors"
        save_file(_backbone(case.work).state_dict(), weights)
        options = {"batch": _BATCH, "optimizer": "sgd", "lr": _LR, "weights": str(weights), "set": case.settings}
        _check(name, case, options)
        seconds = []
        for alternation in range(alternations):
            with federation(name, case.work, _ROUNDS, **options) as ours:
                seconds.append(_seconds(ours, BareLoop(ours.context, case.method.trained), alternation))
    return Measured(*(Ratios(tuple(one[side] / one["bare"] for one in seconds)) for side in ("first", "later")))


def _seconds(ours: Federation, bare: BareLoop, alternation: int) -> dict[str, float]:
    """CPU time of our two rounds, and of a round of the bare loop."""
    seconds: dict[str, float] = {}
    for side in in_turn(("bare", "ours"), alternation):
        if side == "bare":
            seconds["bare"] = cpu_seconds(lambda: bare.run(1))[0]
        else:
            seconds["first"], seconds["later"] = (cpu_seconds(lambda: run_rounds(ours))[0] for _ in range(_ROUNDS))
    return seconds


def _check(name: str, case: Case, options: dict[str, Any]) -> None:
    """Both do the same: seen in float64, because a deep network of random weights amplifies the rounding of float32."""
    work = replace(case.work, clients=2, samples=_BATCH, epochs=1)
    with federation(name, work, _ROUNDS, **options, dtype="float64") as ours:
        bare = BareLoop(ours.context, case.method.trained)
        start = bare.weights
        bare.run(_ROUNDS)
        run_rounds(ours, _ROUNDS)
        ours_now = cast(FrozenBackboneServer, ours.server).shared.weights.tensors()
        refuse_other_work(start, ours_now, bare.weights, "the bare loop")


@torch.no_grad()
def _backbone(work: Workload) -> Split:
    """A network that has seen images: with statistics as it was built, what it makes of them would know no bounds."""
    torch.manual_seed(0)
    model = build_model(work.model, work.image_shape, 10, {key[6:]: value for key, value in work.settings.items()})
    images = (torch.rand(4 * _BATCH, *work.image_shape) - 0.45) / 0.225  # as protofed normalises images of noise
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None
    model.train()(images)
    return model


def main(arguments: Sequence[str] | None = None) -> dict[str, Measured]:
    """Measure, print, and on demand write the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.frozen", description=__doc__.splitlines()[0])
    parser.add_argument("--alternations", type=int, default=9, help="measurements of each (default 9)")
    parser.add_argument("--quick", action="store_true", help="a few seconds on a tiny federation: does it work at all?")
    parser.add_argument("--write", action="store_true", help="write the table to benchmarks/results/frozen.md")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    begun, load = time.perf_counter(), os.getloadavg()[0]
    measured, rows = {}, []
    for case in QUICK if given.quick else CASES:
        found = measured[case.name] = measure(case, 2 if given.quick else given.alternations)
        rows.append(
            [
                f"{case.name}: {case.work}",
                found.first,
                _judged(found.first, case.first_goal),
                found.later,
                _judged(found.later, case.later_goal),
            ]
        )
        print(f"{case.name}: first {found.first}, later {found.later}", flush=True)
    text = table(["trained, and work of a round", "first round / bare", "goal", "later rounds / bare", "goal"], rows)
    print(f"\n{text}")
    if given.write and not given.quick:
        command = f"python -m benchmarks.frozen --alternations {given.alternations} --write"
        body = f"Ratios of CPU time, median (lowest to highest) of {given.alternations} alternations.\n\n{text}"
        text = report("What a frozen backbone saves", command, body, time.perf_counter() - begun, load)
        (RESULTS / "frozen.md").write_text(text)
    return measured


def _judged(ratios: Ratios, goal: float | None) -> str:
    if goal is None:
        return "none"
    return f"{goal} {'met' if ratios.median <= goal else 'missed'}"


if __name__ == "__main__":
    main()

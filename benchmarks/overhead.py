"""What the framework costs: a round of ours beside the same work in a bare PyTorch loop, as a ratio of CPU times.

    python -m benchmarks.overhead [--alternations 9] [--rounds 1] [--quick] [--write]

Ours is everything `protofed run --engine loop` does in a round that is not evaluated; see benchmarks/README.md for what
that includes. The bare loop keeps normalised images in memory and does nothing but train and average. Both see the same
samples in the same order and must arrive at the same model, which is checked before anything is timed.
"""

import argparse
import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import RESULTS, Ratios, Workload, cpu_seconds, federation, in_turn, report, run_rounds, table
from protofed.clients import Setting
from protofed.models import Group, everything
from protofed.seeding import generator

GOAL = 1.05
METHODS = ("fedavg", "i2pfl")
_ROUNDING = 0.01

_LENET = Workload("lenet5", "lenet5", (1, 28, 28), clients=20, samples=600)
_RESNET = Workload(
    "resnet10 of width 16", "resnet10", (3, 32, 32), clients=10, samples=200, settings={"model.width": 16}
)
WORKLOADS = (_LENET, replace(_LENET, epochs=5), _RESNET)
QUICK = (replace(_LENET, clients=3, samples=64),)


class BareLoop:
    """Federated averaging as one writes it for a single experiment, of a whole model or of what is trained of it."""

    def __init__(self, setting: Setting, trained: Group = everything) -> None:
        self._plan = setting.plan
        self._seed = setting.seed
        self._model = deepcopy(setting.model)
        self._trained = trained.names(self._model)
        self._model.train(trained == everything)  # what is frozen must not drift
        for name, param in self._model.named_parameters():
            param.requires_grad_(name in self._trained)
        self._data = {client: _in_memory(setting, client) for client in setting.partition.clients}
        self.weights = {name: tensor.clone() for name, tensor in self._state().items()}
        self._round = 0

    def run(self, rounds: int) -> None:
        """The next rounds."""
        for _ in range(rounds):
            total = sum(len(y) for _, y in self._data.values())
            mean = {name: torch.zeros_like(tensor) for name, tensor in self.weights.items()}
            for client, (x, y) in self._data.items():
                self._train(x, y, generator(self._seed, "order", self._round, client))
                for name, tensor in self._state().items():
                    mean[name].add_(tensor, alpha=len(y) / total)
            self.weights = mean
            self._round += 1

    def _state(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in self._model.state_dict().items() if name in self._trained}

    def _train(self, x: Tensor, y: Tensor, order: torch.Generator) -> None:
        plan, model = self._plan, self._model
        model.load_state_dict(self.weights, strict=False)
        learning = [param for param in model.parameters() if param.requires_grad]
        optimizer = torch.optim.SGD(learning, lr=plan.lr, momentum=plan.momentum, weight_decay=plan.weight_decay)
        for _ in range(plan.epochs[self._round]):
            for chosen in torch.randperm(len(y), generator=order).split(plan.batch):
                optimizer.zero_grad()
                F.cross_entropy(model(x[chosen]), y[chosen]).backward()
                optimizer.step()


def measure(work: Workload, alternations: int, rounds: int) -> dict[str, Ratios]:
    """CPU time of each method's rounds over that of the bare loop, alternation by alternation."""
    planned = 1 + alternations * rounds
    with ExitStack() as stack:
        ours = {name: stack.enter_context(federation(name, work, planned)) for name in METHODS}
        bare = BareLoop(ours["fedavg"].setting)
        # One round warms everything up, and shows whether the two really do the same.
        for running in ours.values():
            run_rounds(running)
        start = bare.weights
        bare.run(1)
        same_model(start, ours["fedavg"].server.weights.tensors(), bare.weights)
        sides: dict[str, Callable[[], Any]] = {"bare": partial(bare.run, rounds)}
        sides.update({name: partial(run_rounds, running, rounds) for name, running in ours.items()})
        ratios: dict[str, list[float]] = {name: [] for name in METHODS}
        for alternation in range(alternations):
            seconds = {name: cpu_seconds(sides[name])[0] for name in in_turn(list(sides), alternation)}
            for name in METHODS:
                ratios[name].append(seconds[name] / seconds["bare"])
    return {name: Ratios(tuple(values)) for name, values in ratios.items()}


def _in_memory(setting: Setting, client: str) -> tuple[Tensor, Tensor]:
    parts = list(setting.samples(client).batches())
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def same_model(start: dict[str, Tensor], ours: dict[str, Tensor], bare: dict[str, Tensor]) -> None:
    """Both went the same way, up to rounding; measured by how far they went, which is little in one round."""
    way = sum(float((tensor - start[name]).square().sum()) for name, tensor in ours.items())
    apart = sum(float((tensor - bare[name]).square().sum()) for name, tensor in ours.items())
    if not apart < _ROUNDING**2 * way:
        raise RuntimeError("the bare loop does other work than ours: their models differ after one round")


def main(arguments: Sequence[str] | None = None) -> dict[str, dict[str, Ratios]]:
    """Measure, print, and on demand write the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__.splitlines()[0])
    parser.add_argument("--alternations", type=int, default=9, help="pairs of measurements (default 9)")
    parser.add_argument("--rounds", type=int, default=1, help="rounds in each measurement (default 1)")
    parser.add_argument("--quick", action="store_true", help="a few seconds on a tiny federation: does it work at all?")
    parser.add_argument("--write", action="store_true", help="write the table to benchmarks/results/overhead.md")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    start, load = time.perf_counter(), os.getloadavg()[0]
    measured = {}
    for work in QUICK if given.quick else WORKLOADS:
        measured[str(work)] = measure(work, 2 if given.quick else given.alternations, given.rounds)
        print(f"{work}: " + ", ".join(f"{name} {ratios}" for name, ratios in measured[str(work)].items()), flush=True)
    rows = [
        [name, ratios["fedavg"], "yes" if ratios["fedavg"].median <= GOAL else "no", ratios["i2pfl"]]
        for name, ratios in measured.items()
    ]
    text = table(["work of one round", "fedavg / bare", f"goal {GOAL} met", "i2pfl / bare fedavg"], rows)
    print(f"\n{text}")
    if given.write and not given.quick:
        command = f"python -m benchmarks.overhead --alternations {given.alternations} --rounds {given.rounds} --write"
        body = f"Ratios of CPU time, median (lowest to highest) of {given.alternations} alternations.\n\n{text}"
        text = report("Overhead of the framework", command, body, time.perf_counter() - start, load)
        (RESULTS / "overhead.md").write_text(text)
    return measured


if __name__ == "__main__":
    main()

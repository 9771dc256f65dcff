"""Federated averaging as one writes it for a single experiment: the loop that every figure is measured against."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from protofed.clients import RunContext
from protofed.models import Group, everything
from protofed.seeding import generator

# Layouts round differently, and a rounding that turns a ReLU or a maximum over changes the way by a sample's gradient.
_ROUNDING = 0.05


def train_locally(
    model: nn.Module, x: Tensor, y: Tensor, epochs: int, batch: int, order: torch.Generator, **optimizer: float
) -> None:
    """Plain stochastic gradient descent on one client's images, of what asks for gradients."""
    step = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], **optimizer)
    for _ in range(epochs):
        for chosen in torch.randperm(len(y), generator=order).split(batch):
            step.zero_grad()
            F.cross_entropy(model(x[chosen]), y[chosen]).backward()
            step.step()


class BareLoop:
    """One process, one thread, every client's normalised images in memory; of a whole model, or of a part of it."""

    def __init__(self, context: RunContext, trained: Group = everything) -> None:
        self._plan = context.plan
        self._seed = context.seed
        self._model = deepcopy(context.model)
        self._trained = trained.names(self._model)
        self._model.train(trained == everything)  # what is frozen must not drift
        for name, param in self._model.named_parameters():
            param.requires_grad_(name in self._trained)
        self._data = {client: _in_memory(context, client) for client in context.partition.clients}
        self.weights = {name: tensor.clone() for name, tensor in self._state().items()}
        self._round = 0

    def run(self, rounds: int) -> None:
        """The next rounds."""
        for _ in range(rounds):
            total = sum(len(y) for _, y in self._data.values())
            mean = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in self.weights.items()}
            for client, (x, y) in self._data.items():
                self._train(x, y, generator(self._seed, "order", self._round, client))
                for name, tensor in self._state().items():
                    mean[name].add_(tensor, alpha=len(y) / total)
            self.weights = {name: tensor.to(self.weights[name].dtype) for name, tensor in mean.items()}
            self._round += 1

    def _state(self) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in self._model.state_dict().items() if name in self._trained}

    def _train(self, x: Tensor, y: Tensor, order: torch.Generator) -> None:
        plan = self._plan
        self._model.load_state_dict(self.weights, strict=False)
        optimizer = {"lr": plan.lr, "momentum": plan.momentum, "weight_decay": plan.weight_decay}
        train_locally(self._model, x, y, plan.epochs[self._round], plan.batch, order, **optimizer)


def save_work(context: RunContext, path: Path) -> None:
    """All that another program needs to do the same work."""
    plan, pool = context.plan, context.dataset.pooled_train()
    work: dict[str, Any] = {
        "model": deepcopy(context.model),
        "x": pool.x,
        "y": pool.y,
        "normalise": context.dataset.normalise,
        "clients": {client: torch.from_numpy(context.partition.train[client]) for client in context.partition.clients},
        "seed": context.seed,
        "epochs": plan.epochs[0],
        "batch": plan.batch,
        "optimizer": {"lr": plan.lr, "momentum": plan.momentum, "weight_decay": plan.weight_decay},
    }
    torch.save(work, path)


def refuse_other_work(start: dict[str, Tensor], ours: dict[str, Tensor], other: dict[str, Tensor], whose: str) -> None:
    """Both went the same way, up to rounding; measured by how far they went, which is little in one round."""
    way = sum(float((tensor - start[name]).square().sum()) for name, tensor in ours.items())
    apart = sum(float((tensor - other[name]).square().sum()) for name, tensor in ours.items())
    if not apart < _ROUNDING**2 * way:
        raise RuntimeError(f"{whose} does other work than ours: their models differ after one round")


def _in_memory(context: RunContext, client: str) -> tuple[Tensor, Tensor]:
    parts = list(context.samples(client).batches())
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])

"""DP-SGD: gradients of single samples, clipped, summed and noised.

Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar, Zhang. Deep Learning with Differential Privacy. CCS 2016. The
gradients of single samples come from `torch.func`, so that any loss that is a pure tensor function can be trained this
way; the accounting is that of opacus.
"""

from collections.abc import Callable
from math import ceil
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, vmap

from protofed.guards.guard import Guard
from protofed.guards.random_source import RandomSource, source_of
from protofed.method import At, Method, Plan, Step
from protofed.models import torchs_own_kernels
from protofed.models.net import Net
from protofed.records import Weights

_CHUNK = 64
"""Samples whose gradients are held in memory at the same time."""


def sampling_rate(plan: Plan, size: int) -> float:
    """How likely a sample is in a step of training: a batch's part of the client's samples."""
    return min(1.0, plan.batch / size)


def steps_in(plan: Plan, round: int, size: int) -> int:
    """Optimiser steps of a round: as many as an epoch has batches, or as many as were asked for."""
    amount = plan.epochs[round]
    return amount if plan.unit == "steps" else amount * ceil(size / plan.batch)


class PrivateGradients:
    """Draws the samples of every step and makes its gradients, for one client in one round."""

    def __init__(self, guard: Guard, at: At) -> None:
        self._clip = float(guard.clip or 0.0)
        self._noise = guard.noise
        self._rate = sampling_rate(at.plan, at.size)
        self._expected = self._rate * at.size
        self._noise_source = source_of(guard, at, "gradients")
        self._sampler: RandomSource = source_of(guard, at, "samples")
        self.steps = steps_in(at.plan, at.round, at.size)
        """Optimiser steps of this round."""

    def draw(self, size: int) -> Tensor:
        """The samples of one step: each is drawn independently, as the accounting assumes."""
        return (self._sampler.uniform(size) < self._rate).nonzero()[:, 0]

    def of(self, method: Method, step: Step, net: Net, x: Tensor, y: Tensor, at: At) -> list[Tensor]:
        """What replaces the batch's gradient, in the order of the parameters the step trains."""
        params = {name: param.detach() for name, param in net.params(step.trains).items()}
        total = {name: torch.zeros_like(param) for name, param in params.items()}
        gradient = vmap(grad(_loss_of_one(method, step, net, at)), in_dims=(None, 0, 0), randomness="different")
        for some_x, some_y in zip(torch.split(x, _CHUNK), torch.split(y, _CHUNK), strict=True):
            if len(some_y) == 0:
                continue
            with torchs_own_kernels(net.model):
                each = gradient(params, some_x, some_y)
            squares = [tensor.flatten(1).double().pow(2).sum(1) for tensor in each.values()]
            norms = torch.stack(squares).sum(0).sqrt().clamp(min=1e-12)
            shrink = (self._clip / norms).clamp(max=1.0)
            for name, tensor in each.items():
                total[name] += torch.einsum("n,n...->...", shrink.to(tensor.dtype), tensor)
        deviation = self._noise * self._clip
        return [(tensor + deviation * self._noise_source.normal(tensor)) / self._expected for tensor in total.values()]


def _loss_of_one(method: Method, step: Step, net: Net, at: At) -> Callable[[dict[str, Tensor], Tensor, Tensor], Any]:
    """The loss of a batch of one sample as a function of the parameters."""

    def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        outcome = getattr(method, step.loss)(net.using(Weights(params, {})), x[None], y[None], at)
        terms = outcome[0] if isinstance(outcome, tuple) else outcome
        return torch.stack(list(terms.values())).sum()

    return loss

"""DP-SGD: gradients of single samples, clipped, summed and noised.

Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar, Zhang. Deep Learning with Differential Privacy. CCS 2016. The
gradients of single samples come from `torch.func`, so that any loss that is a pure tensor function can be trained this
way; the accounting is that of opacus.
"""

from collections.abc import Callable
from contextlib import suppress
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
from protofed.models.passed import ImagesWanted
from protofed.records import Weights

LossOfOne = Callable[[dict[str, Tensor], Tensor, Tensor], Any]
"""Of the parameters, what the network is given for one sample, and its label."""

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
        deviation = self._noise * self._clip
        return [
            (tensor + deviation * self._noise_source.normal(tensor)) / self._expected
            for tensor in self._clipped_sum(method, step, net, x, y, at).values()
        ]

    def _clipped_sum(self, method: Method, step: Step, net: Net, x: Tensor, y: Tensor, at: At) -> dict[str, Tensor]:
        """By what is kept of frozen stages, if the loss never looks at the images themselves."""
        known = None if net.shortcut is None else net.shortcut.lookup(x)
        if net.shortcut is not None and known is not None:
            with suppress(ImagesWanted):
                return self._summed(_loss_behind(method, step, net, net.shortcut.prefix, x, at), step, net, known, y)
        return self._summed(_loss_of_one(method, step, net, at), step, net, x, y)

    def _summed(self, loss: LossOfOne, step: Step, net: Net, rows: Tensor, y: Tensor) -> dict[str, Tensor]:
        params = {name: param.detach() for name, param in net.params(step.trains).items()}
        total = {name: torch.zeros_like(param) for name, param in params.items()}
        gradient = vmap(grad(loss), in_dims=(None, 0, 0), randomness="different")
        for some, some_y in zip(torch.split(rows, _CHUNK), torch.split(y, _CHUNK), strict=True):
            if len(some_y) == 0:
                continue
            with torchs_own_kernels(net.model):
                each = gradient(params, some, some_y)
            squares = [tensor.flatten(1).double().pow(2).sum(1) for tensor in each.values()]
            norms = torch.stack(squares).sum(0).sqrt().clamp(min=1e-12)
            shrink = (self._clip / norms).clamp(max=1.0)
            for name, tensor in each.items():
                total[name] += torch.einsum("n,n...->...", shrink.to(tensor.dtype), tensor)
        return total


def _loss_of_one(method: Method, step: Step, net: Net, at: At) -> LossOfOne:
    """The loss of a batch of one image as a function of the parameters."""

    def loss(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return _total(method, step, net.using(Weights(params, {})), x[None], y[None], at)

    return loss


def _loss_behind(method: Method, step: Step, net: Net, prefix: int, like: Tensor, at: At) -> LossOfOne:
    """The same of what came out of the first stages for that image."""

    def loss(params: dict[str, Tensor], h: Tensor, y: Tensor) -> Tensor:
        at_params = net.using(Weights(params, {}))
        return _total(method, step, at_params, at_params.entered(prefix, h[None], like), y[None], at)

    return loss


def _total(method: Method, step: Step, net: Net, x: Tensor, y: Tensor, at: At) -> Tensor:
    outcome = getattr(method, step.loss)(net, x, y, at)
    terms = outcome[0] if isinstance(outcome, tuple) else outcome
    return torch.stack(list(terms.values())).sum()

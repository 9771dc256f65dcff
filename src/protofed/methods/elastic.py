"""Elastic Aggregation: coordinates to which the output is sensitive move less, the others more.

Chen, Hu, Xia, Lu. Elastic Aggregation for Federated Optimization. CVPR 2023.
"""

from dataclasses import replace
from math import ceil
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from protofed.method import At, Fraction, NonNegative, Samples, knob
from protofed.methods.fedavg import ModelUpload, SharedModel, TrainedByCrossEntropy
from protofed.models.net import Net
from protofed.records import Each, Mean, Record, Weights
from protofed.registry import register
from protofed.verbs import cross_entropy, weighted_mean

Sensitivity = dict[str, Tensor]


class ElasticUpload(ModelUpload):
    """A client's model and sensitivity."""

    omega: Mean[Sensitivity]


class SeparateElasticUpload(ModelUpload):
    """The same with `maximum=clients`: a maximum over clients needs the sensitivities one by one."""

    omega: Each[Sensitivity]


@register("elastic")
class Elastic(TrainedByCrossEntropy[ElasticUpload | SeparateElasticUpload]):
    """FedAvg with the server's step rescaled by sensitivity, tensor by tensor or element by element."""

    paper = "Chen et al., Elastic Aggregation for Federated Optimization, CVPR 2023"
    sends_up = "weights, sensitivities, sample count"
    separable = False  # a sensitivity is neither a weight nor a class mean
    readings = (
        "Sensitivity: the paper defines it per scalar, public code uses one number per tensor, the mean of |g|; "
        "we use one per tensor (level).",
        "Sensitivity of what: of the output's norm in the paper, of the loss in public code; we use the norm (signal).",
        "Sensitivities are relative to the largest of all entries; public code uses the largest over clients "
        "(maximum).",
        "The samples used to measure sensitivity are also trained on.",
        "Running statistics are averaged, not rescaled.",
    )
    presets = {
        "paper": {"level": "element"},
    }

    tau: NonNegative = knob("the step lies between tau and 1 + tau times the mean change", default=0.5)
    mu: Fraction = knob("weight of the past in the running mean of sensitivities", default=0.95)
    sample: Annotated[float, Field(gt=0, le=1)] = knob(
        "fraction of a client's samples used to measure sensitivity", default=0.3
    )
    level: Literal["tensor", "element"] = knob("one sensitivity per tensor or per scalar", default="tensor")
    signal: Literal["output_norm", "ce"] = knob(
        "whose gradient: the output's squared norm or the loss", default="output_norm"
    )
    maximum: Literal["params", "clients"] = knob(
        "relative to the largest entry, or the largest over clients", default="params"
    )

    def server_state(self, net: Net, at: At) -> SharedModel:
        """The initial model."""
        return SharedModel(net.pick())

    def upload(self, net: Net, data: Samples, at: At) -> tuple[ElasticUpload | SeparateElasticUpload, Record]:
        """The trained model, and the sensitivity of the received one."""
        omega = self.sensitivity(net, data, at)
        weight = self.weight(at)
        weights = Mean(net.pick(), weight)
        if self.maximum == "params":
            return ElasticUpload(weights, Mean(omega, weight)), at.memory
        return SeparateElasticUpload(weights, Each(omega)), at.memory

    def sensitivity(self, net: Net, data: Samples, at: At) -> Sensitivity:
        """Omega_i, a running mean of |d signal / d theta| over batches of a sample of the data."""
        theta = {name: tensor.clone().requires_grad_() for name, tensor in at.start.params.items()}
        received = net.using(Weights(theta, at.start.stats))
        omega = {name: torch.zeros_like(tensor) for name, tensor in at.start.params.items()}
        x, y = (torch.cat(parts) for parts in zip(*data.batches(), strict=True))
        subset = torch.randperm(len(y), generator=at.rng("sensitivity"))[: ceil(self.sample * len(y))].to(y.device)
        for batch in torch.split(subset, at.plan.batch):
            with net.eval():
                F = received(x[batch])
            signal = F.pow(2).sum(1).mean() if self.signal == "output_norm" else cross_entropy(F, y[batch])
            gradients = torch.autograd.grad(signal, list(theta.values()), materialize_grads=True, allow_unused=True)
            for name, g in zip(theta, gradients, strict=True):
                omega[name] = self.mu * omega[name] + (1 - self.mu) * g.abs()
        return omega if self.level == "element" else {name: tensor.mean() for name, tensor in omega.items()}

    def aggregate(self, server: SharedModel, total: ElasticUpload | SeparateElasticUpload, at: At) -> SharedModel:
        """theta^t + zeta (mean theta_i - theta^t)."""
        zeta = self.zeta(*self.mean_and_maximum(total, at))
        mean = total.weights
        theta = {name: old + zeta[name] * (mean.params[name] - old) for name, old in server.weights.params.items()}
        return SharedModel(Weights(theta, mean.stats))

    def mean_and_maximum(self, total: ElasticUpload | SeparateElasticUpload, at: At) -> tuple[Sensitivity, Sensitivity]:
        """Omega over the clients, and max Omega: the largest entry of the mean, or the largest over clients."""
        if isinstance(total, ElasticUpload):
            largest = torch.stack([tensor.max() for tensor in total.omega.values()]).max()
            return total.omega, dict.fromkeys(total.omega, largest)
        each = list(total.omega.values())
        maximum = {name: torch.stack([omega[name] for omega in each]).amax(0) for name in each[0]}
        weights = {client: self.weight(replace(at, client=client)) for client in total.omega}
        return weighted_mean(total.omega, weights), maximum

    def zeta(self, omega: Sensitivity, maximum: Sensitivity) -> Sensitivity:
        """1 + tau - Omega / max Omega; 1 where nothing is sensitive."""
        return {
            name: torch.where(maximum[name] > 0, 1 + self.tau - tensor / maximum[name].clamp(min=1e-30), 1.0)
            for name, tensor in omega.items()
        }

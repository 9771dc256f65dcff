"""MOON: a client's features are drawn to the global model's and away from its own previous model's.

Li, He, Song. Model-Contrastive Federated Learning. CVPR 2021.
"""

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from protofed.method import At, NonNegative, Positive, Samples, Terms, Whole, knob
from protofed.methods.fedavg import FedAvg, ModelUpload
from protofed.models import Split, with_projection
from protofed.models.net import Net
from protofed.records import Record, Weights
from protofed.registry import register
from protofed.verbs import cross_entropy


class _MoonMemory(Record):
    """The client's models of earlier rounds, newest first, and which of them exist."""

    previous: dict[str, Weights]
    seen: Tensor  # [buffer] booleans


@register("moon")
class Moon(FedAvg):
    """FedAvg with a contrastive loss between the server's model and the client's own past models."""

    paper = "Li et al., Model-Contrastive Federated Learning, CVPR 2021"
    readings = (
        "A client's first round has no contrast; FPL's repository contrasts with an unrelated random model.",
        "Both reference models run in evaluation mode; in FPL's repository their running statistics change.",
        "The paper projects features to 256 dimensions; the comparisons here do not (projection, preset authors).",
    )
    presets = {
        "authors": {"projection": "256"},
        "cifar100": {"projection": "256", "mu": 1.0},
    }

    mu: NonNegative = knob("weight of the contrast", default=5.0)
    temperature: Positive = knob("temperature of the contrast, T", default=0.5)
    projection: Literal["none", "256"] = knob(
        "contrast the features, or a projection of them to 256 dimensions", default="none"
    )
    buffer: Whole = knob("number of the client's previous models to contrast with", default=1)

    def build(self, base: Split, at: At) -> Split:
        """The model the user chose, with a projection where it is asked for."""
        return base if self.projection == "none" else with_projection(base, int(self.projection))

    def client_state(self, net: Net, at: At) -> _MoonMemory:
        """No previous model yet."""
        return _MoonMemory({str(j): net.pick() for j in range(self.buffer)}, torch.zeros(self.buffer, dtype=torch.bool))

    def loss(self, net: Net, x: Tensor, y: Tensor, at: At) -> Terms:
        """Cross-entropy and the contrast."""
        zc = net.features(x)
        with torch.no_grad(), net.eval():
            zg = net.using(at.start).features(x)
            zp = torch.stack([net.using(weights).features(x) for weights in at.memory.previous.values()])
        return {
            "ce": cross_entropy(net.head(zc), y),
            "contrast": self.mu * self.contrast(zc, zg, zp, at.memory.seen),
        }

    def contrast(self, zc: Tensor, zg: Tensor, zp: Tensor, seen: Tensor) -> Tensor:
        """-log softmax of the similarity with the global model, against `seen` previous ones; zp is [j, n, d]."""
        similarity = functional.cosine_similarity(zc, torch.cat([zg[None], zp]), dim=2) / self.temperature  # [1 + j, n]
        there = torch.cat([torch.ones_like(seen[:1]), seen]).to(zc.device)
        return -similarity.masked_fill(~there[:, None], -torch.inf).log_softmax(0)[0].mean()

    def upload(self, net: Net, data: Samples, at: At) -> tuple[ModelUpload, _MoonMemory]:
        """The trained model, which becomes the newest of the previous ones."""
        upload, _ = super().upload(net, data, at)
        models = [net.pick(), *at.memory.previous.values()][: self.buffer]
        seen = torch.cat([torch.ones_like(at.memory.seen[:1]), at.memory.seen])[: self.buffer]
        return upload, _MoonMemory({str(j): weights for j, weights in enumerate(models)}, seen)

"""COPA: one feature extractor that must please the classifiers of all domains, which predict together.

Wu, Gong. Collaborative Optimization and Aggregation for Decentralized Domain Generalization and Adaptation. ICCV 2021.
"""

from copy import deepcopy
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from protofed.method import At, Method, NonNegative, Samples, Terms, knob
from protofed.models import Split, everything, features, head
from protofed.models.net import Net
from protofed.records import Each, Mean, Record, Weights
from protofed.registry import register
from protofed.verbs import cross_entropy, joined, weighted_mean


class CopaServer(Record):
    """Server state and broadcast: the extractor phi and the head psi_j of every client."""

    weights: Weights
    heads: dict[str, Weights]


class _CopaUpload(Record):
    """A client's extractor, averaged, and its head, which is not."""

    weights: Mean[Weights]
    head: Each[Weights]


@register("copa")
class Copa(Method[_CopaUpload]):
    """The extractor is averaged and heads are shared: features must suit other clients' heads, and all heads vote."""

    paper = (
        "Wu and Gong, Collaborative Optimization and Aggregation for Decentralized Domain Generalization and "
        "Adaptation, ICCV 2021"
    )
    sends_up = "weights of the extractor and of the client's head, sample count"
    sends_down = "weights of the extractor, the heads of all clients"
    separable = True
    readings = (
        "Only the domain generalisation branch, without pseudo-labels.",
        "Batch-instance normalisation and strong augmentation are off by default (hybrid_norm, data.augment).",
        "The paper does not say whether probabilities or scores are averaged; we average probabilities (ensemble).",
        "MarsFL averages the heads under a second name; here they are collected. Only the saved model, which has "
        "room for one head, holds their mean: with a linear head that is exactly ensemble=logits.",
    )
    not_vectorised = "its loss leaves out the client's own head, which it finds by name"
    shares = features
    loads = everything  # a client's own head comes back to it among the others
    predicts_alike = True  # all heads vote

    foreign_weight: NonNegative = knob("weight of the loss of each other client's head", default=1.0)
    ensemble: Literal["softmax", "logits"] = knob("average the heads' probabilities or their scores", default="softmax")
    hybrid_norm: bool = knob("mix batch and instance normalisation with a learnt gate per channel", default=False)

    def build(self, base: Split, at: At) -> Split:
        """The model the user chose, with gated normalisation where it is asked for."""
        return _with_hybrid_norm(base) if self.hybrid_norm else base

    def server_state(self, net: Net, at: At) -> CopaServer:
        """The initial model; every head is the same."""
        return CopaServer(net.pick(features), {client: net.pick(head) for client in at.clients})

    def weights_for(self, client: str, down: CopaServer) -> Weights:
        """The extractor and the client's own head; a newcomer's is not among them."""
        own = down.heads.get(client)
        return down.weights if own is None else joined(down.weights, own)

    def loss(self, net: Net, x: Tensor, y: Tensor, at: At) -> Terms:
        """The own head's cross-entropy and that of each foreign head, whose gradient reaches the extractor only."""
        h = net.features(x)
        foreign = [
            cross_entropy(net.using(psi_j).head(h), y) for client, psi_j in at.down.heads.items() if client != at.client
        ]
        return {
            "ce": cross_entropy(net.head(h), y),
            "foreign": self.foreign_weight * sum(foreign, h.new_zeros(())),
        }

    def upload(self, net: Net, data: Samples, at: At) -> tuple[_CopaUpload, Record]:
        """The trained extractor and head."""
        return _CopaUpload(Mean(net.pick(features), self.weight(at)), Each(net.pick(head))), at.memory

    def aggregate(self, server: CopaServer, total: _CopaUpload, at: At) -> CopaServer:
        """The mean extractor; the heads are replaced one by one."""
        return CopaServer(total.weights, {**server.heads, **total.head})

    def predict(self, net: Net, x: Tensor, at: At) -> Tensor:
        """The mean over all heads."""
        h = net.features(x)
        z = torch.stack([net.using(psi_j).head(h) for psi_j in at.down.heads.values()])  # [N, n, C]
        return z.softmax(2).mean(0) if self.ensemble == "softmax" else z.mean(0).softmax(1)

    def global_weights(self, server: CopaServer) -> Weights:
        """The extractor with the mean head."""
        psi = weighted_mean(server.heads, dict.fromkeys(server.heads, 1.0))
        return joined(server.weights, psi)


class HybridNorm(nn.BatchNorm2d):
    """rho x batch normalisation + (1 - rho) x instance normalisation, with one scale and shift for both."""

    def __init__(self, like: nn.BatchNorm2d) -> None:
        super().__init__(like.num_features, like.eps, like.momentum)
        self.load_state_dict(like.state_dict())
        self.gate = nn.Parameter(torch.zeros(like.num_features))
        """Before the sigmoid, so that rho stays in [0, 1] and never loses its gradient."""
        self.to(like.weight)

    def forward(self, x: Tensor) -> Tensor:
        """The mix; a map of one pixel has no instance statistics and is normalised by the batch alone."""
        batch = super().forward(x)
        if x.shape[2:].numel() == 1:
            return batch
        instance = functional.instance_norm(x, weight=self.weight, bias=self.bias, eps=self.eps)
        rho = self.gate.sigmoid()[:, None, None]
        return rho * batch + (1 - rho) * instance


def _with_hybrid_norm(base: Split) -> Split:
    """A copy in which every two-dimensional batch normalisation is a gated one."""
    model = deepcopy(base)
    for path, module in list(model.named_modules()):
        if isinstance(module, nn.BatchNorm2d):
            model.set_submodule(path, HybridNorm(module))
    return model

"""FedAdapterProto: adapters and part prototypes on a frozen backbone, and the same without adapters.

Mensah, Djoumessi, Berens. Prototype-Guided and Lightweight Adapters for Inherent Interpretation and Generalisation in
Federated Learning. 2025.
"""

from math import ceil
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from protofed.method import At, NonNegative, Samples, Terms, U, Whole, knob
from protofed.methods.fedadapter import AveragesShared, FrozenBackbone, FrozenBackboneServer, WithAdapters, adapters
from protofed.methods.fedavg import ModelUpload, SharedModel
from protofed.models import Group, Split, part
from protofed.models.net import Net
from protofed.models.protopnet import prototype_layer, prototypes_of, with_prototypes
from protofed.records import Mean, Record, Weights
from protofed.registry import register
from protofed.verbs import cross_entropy, joined, one_hot


class _AdapterProtoUpload(Record):
    """alpha_i and phi_i, which may be weighted differently."""

    alpha: Mean[Weights]
    phi: Mean[Weights]


class _TrainsPartPrototypes(FrozenBackbone[U]):
    """The prototype layer's hyper-parameters and loss."""

    trained = prototype_layer

    per_class: Whole = knob("number of prototypes per class", default=5)
    prototype_dim: Whole = knob("channels of a prototype", default=512)
    prototype_size: Whole = knob("side length of a prototype, in positions of the feature map", default=1)
    similarity: Literal["linear", "log"] = knob("similarity -d, or log((d + 1) / (d + 0.0001))", default="linear")
    lambda_clst: NonNegative = knob(
        "weight of the distance to the nearest prototype of the sample's class", default=0.8
    )
    lambda_sep: NonNegative = knob("weight of the distance to the nearest prototype of another class", default=0.08)
    l1: NonNegative = knob("weight of the last layer's connections from prototypes to other classes", default=1e-4)
    mu2: NonNegative = knob("strength of the pull of the prototype layer towards the global one", default=0.0)

    start: Literal["patches", "uniform"] = knob(
        "start prototypes from class means of the clients' patches, sent once, or uniformly in [0, 1]",
        default="patches",
        before="uniform",
    )

    @property
    def starts_from_means(self) -> bool:
        """Where everybody takes over the layer from the server."""
        return self.start == "patches" and self.kind == "global"

    @property
    def phi(self) -> Group:
        """What travels of the prototype layer."""
        return prototype_layer

    def build(self, base: Split, at: At) -> Split:
        """The prototype layer instead of pooling and head."""
        return with_prototypes(
            base,
            per_class=self.per_class,
            dim=self.prototype_dim,
            size=self.prototype_size,
            similarity=self.similarity,
        )

    def loss(self, net: Net, x: Tensor, y: Tensor, at: At) -> Terms:
        """l_CE + l_proto + mu2/2 |phi - phi_g|^2."""
        d = net.features(x, "nearest")  # min over (h, w) of |z(h,w) - p_j|^2
        labels = prototypes_of(net.model).labels
        own = labels == y[:, None]
        others = 1 - one_hot(labels, at.classes, d).T  # from prototypes to the classes they are not of
        return {
            "ce": cross_entropy(net.head(d, "nearest"), y),
            "clst": self.lambda_clst * nearest(d, own),
            "sep": -self.lambda_sep * nearest(d, ~own),
            "l1": self.l1 * (net.params(part("last"))["last.weight"] * others).abs().sum(),  # gamma |W|_1
            "prox_phi": self.prox(net, self.phi, self.mu2, at),
        }


@register("fedprototypical")
class FedPrototypical(_TrainsPartPrototypes[ModelUpload], AveragesShared):
    """A part-prototype network on a frozen backbone: a decision adds up the similarities of patches to prototypes."""

    paper = (
        "Chen et al., This Looks Like That: Deep Learning for Interpretable Image Recognition, NeurIPS 2019 "
        "(federated as in FedAdapterProto)"
    )
    sends_up = "weights of the prototype layer, sample count; once class means of patches"
    sends_down = "weights of the prototype layer"
    readings: ClassVar[tuple[str, ...]] = (
        "C2: the paper loads the global weights, the released code only pulls towards them; we load them "
        "(load_global).",
        "C3: the released code trains the backbone, and lets its normalisation drift even when it does not; here "
        "the whole backbone is fixed (freeze, freeze_bn).",
        "C6: the last layer has no bias and starts at +1 for a prototype's own class, -0.5 for the others.",
        "Start: prototypes drawn from [0, 1] lie far from every patch, and on pretrained features nothing is "
        "learnt. So clients send class means of their most characteristic patches once before round 1; "
        "prototypes and add-on layers start from them, scaled so that the own class leads by 10 (start).",
        "C7: trained with Adam at a learning rate of 0.001 unless the user sets another; under SGD the last "
        "layer diverges.",
        "L1: written for phi, but meant for the weights from prototypes to other classes; we use the latter.",
        "Proximal term: the paper mentions none for this baseline; it is off (mu2).",
    )


@register("fedadapterproto")
class FedAdapterProto(WithAdapters[_AdapterProtoUpload], _TrainsPartPrototypes[_AdapterProtoUpload]):
    """Adapters and part prototypes, which explain decisions, are trained on a frozen backbone and averaged."""

    paper = (
        "Mensah, Djoumessi and Berens, Prototype-Guided and Lightweight Adapters for Inherent Interpretation and "
        "Generalisation in Federated Learning, 2025"
    )
    sends_up = "weights of the adapters and the prototype layer, their averaging weights; once class means of patches"
    sends_down = "weights of the adapters and the prototype layer"
    readings = (
        "C1: the paper divides the mean by N in addition to n_i/n, which shrinks all weights; we use n_i/n only "
        "(adapter_agg, weighting).",
        *FedPrototypical.readings[:-1],
        "phi: the paper sends the prototypes, the released code the whole layer; we send the whole layer (share).",
        "Regulariser: we use the paper's squared norm; the released code adds up unsquared norms.",
        "Initial weights: the released code starts adapters at random; here they start as the identity (adapter_init).",
        "C10: prototypes are not projected onto patches during training; a client may do so to inspect them.",
    )
    presets = {
        "authors": {
            "load_global": False,
            "freeze": False,
            "freeze_bn": False,
            "adapter_init": "kaiming",
            "adapter_agg": "steps_size",
            "weighting": "uniform",
            "start": "uniform",
        },
    }
    trained = adapters + prototype_layer

    mu1: NonNegative = knob("strength of the pull of the adapters towards the global ones", default=0.01)
    mu2: NonNegative = knob("strength of the pull of the prototype layer towards the global one", default=0.01)
    share: Literal["proto_layer", "prototypes_only"] = knob(
        "in addition to the adapters, send the whole prototype layer or only the prototypes", default="proto_layer"
    )
    adapter_agg: Literal["size", "mean", "steps", "steps_size"] = knob(
        "weight of a client's adapters: its samples, 1, its optimiser steps, or steps x samples", default="size"
    )

    @property
    def phi(self) -> Group:
        """The whole layer, or the prototypes alone, beside which the rest stays private."""
        return prototype_layer if self.share == "proto_layer" else part("prototypes")

    @property
    def shares(self) -> Group:
        """theta = (alpha, phi)."""
        return adapters + self.phi

    def build(self, base: Split, at: At) -> Split:
        """An adapter after each stage, then the prototype layer."""
        return super().build(self.adapted(base), at)

    def loss(self, net: Net, x: Tensor, y: Tensor, at: At) -> Terms:
        """l_CE + l_proto + l_adapter + l_prox."""
        return {
            **super().loss(net, x, y, at),
            "adapter": self.norm(net),
            "prox_alpha": self.prox(net, adapters, self.mu1, at),
        }

    def largest_weight(self, at: At) -> float:
        """Samples, or steps, or their product, whichever adapters are weighted by."""
        amount = at.plan.epochs[at.round]
        steps = max(amount if at.plan.unit == "steps" else amount * ceil(at.size / at.plan.batch), 1)
        claims = {"size": at.size, "mean": 1, "steps": steps, "steps_size": steps * at.size}
        return max(super().largest_weight(at), float(claims[self.adapter_agg]))

    def upload(self, net: Net, data: Samples, at: At) -> tuple[_AdapterProtoUpload, Record]:
        """alpha_i and phi_i."""
        # A client that could take no step counts as one: were there only such, the mean would have no weight at all.
        steps = max(at.taken, 1)
        weight = {"size": at.size, "mean": 1, "steps": steps, "steps_size": steps * at.size}[self.adapter_agg]
        return _AdapterProtoUpload(
            Mean(net.pick(adapters), weight), Mean(net.pick(self.phi), self.weight(at))
        ), at.memory

    def client_weights(self, server: FrozenBackboneServer, upload: Any, at: At) -> Weights:
        """The frozen backbone with alpha_i and phi_i."""
        return joined(upload.alpha.value, upload.phi.value, server.rest)

    def aggregate(self, server: FrozenBackboneServer, total: _AdapterProtoUpload, at: At) -> FrozenBackboneServer:
        """theta_g = sum (n_i / n) theta_i."""
        return FrozenBackboneServer(SharedModel(joined(total.alpha, total.phi)), server.rest)


def nearest(d: Tensor, mask: Tensor) -> Tensor:
    """Mean over the batch of the smallest distance among the chosen prototypes."""
    return torch.where(mask, d, torch.inf).amin(1).mean()

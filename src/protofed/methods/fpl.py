"""FPL: features are drawn to clusters of the clients' prototypes, and to one unbiased prototype per class.

Huang, Ye, Shi, Li, Du. Rethinking Federated Learning with Domain Shift: A Prototype View. CVPR 2023.
"""

from typing import Any, Literal

import torch
from torch import Tensor

from protofed.method import At, Method, Notes, Positive, Samples, Terms, knob
from protofed.models.net import Net
from protofed.records import ClassTable, Each, Mean, PrototypeSet, Record, Weights
from protofed.registry import register
from protofed.verbs import (
    class_clusters,
    class_means,
    cluster_means,
    cosine,
    cross_entropy,
    pull,
    set_contrast,
    stack_tables,
)


class Global(Record):
    """Server state and broadcast: the model and the cluster prototypes C[k]."""

    weights: Weights
    C: PrototypeSet


class Upload(Record):
    """A client's model and class means; clustering needs the means one by one."""

    weights: Mean[Weights]
    P: Each[ClassTable]


@register("fpl")
class FPL(Method):
    """A global model against domain shift: clients' prototypes are clustered class by class, so that no domain is
    averaged away, and features are contrasted with the clusters and pulled to their mean."""

    paper = "Huang et al., Rethinking Federated Learning with Domain Shift: A Prototype View, CVPR 2023"
    sends_up = "weights, sample count, prototypes of the classes held, their counts"
    sends_down = "weights, cluster prototypes and their classes"
    separable = True
    readings = (
        "UPCR: the paper sums over coordinates, the released code takes their mean; the mean (upcr_reduction).",
        "A class nobody sent: the released code forgets its clusters; they are kept (stale_protos).",
        "Prototypes: the released code collects them during the last epoch; in a clean pass here (proto_pass).",
    )
    presets = {
        "authors": {"proto_pass": "last_epoch", "stale_protos": "drop"},
    }

    tau: Positive = knob("temperature of the contrast with the cluster prototypes", default=0.02)
    upcr_reduction: Literal["mean", "sum"] = knob(
        "squared distance to the unbiased prototype, per coordinate", default="mean"
    )

    def server_state(self, net: Net, at: At) -> Global:
        """The initial model, no prototype yet."""
        return Global(net.pick(), net.empty_set())

    def loss(self, net: Net, x: Tensor, y: Tensor, at: At) -> tuple[Terms, Notes]:
        """L = CE + L_CPCL + L_UPCR."""
        h = net.features(x)
        return {
            "ce": cross_entropy(net.head(h), y),
            "cpcl": self.contrast(h, at.down.C, y),
            "upcr": self.regularisation(h, at.down.C, y),
        }, {"h": h, "y": y}

    def contrast(self, h: Tensor, C: PrototypeSet, y: Tensor) -> Tensor:
        """L_CPCL: the own class's clusters against all."""
        return set_contrast(cosine(h, C.rows) / self.tau, C, y)

    def regularisation(self, h: Tensor, C: PrototypeSet, y: Tensor) -> Tensor:
        """L_UPCR: the squared distance to U[y]."""
        squared = pull(h, cluster_means(C), y)
        return squared if self.upcr_reduction == "mean" else squared * h.shape[1]

    def upload(self, net: Net, data: Samples, at: At) -> tuple[Upload, Record]:
        """The model and the mean feature of each class."""
        seen = self.observations(net, data, at)
        P = class_means(seen["h"], seen["y"], at.classes)
        return Upload(Mean(net.pick(), self.weight(at)), Each(P)), at.memory

    def aggregate(self, server: Global, total: Any, at: At) -> Global:
        """Averaged weights; C[k], FINCH's clusters of the clients' prototypes."""
        rows, count = stack_tables(total.P.values())  # [M, C, d], [M, C]
        sent = count > 0
        labels = torch.arange(at.classes, device=rows.device).expand_as(count)
        return Global(total.weights, self.refreshed(class_clusters(rows[sent], labels[sent], at.classes), server.C))

    def global_prototypes(self, server: Global) -> ClassTable:
        """The unbiased prototypes U."""
        return cluster_means(server.C)

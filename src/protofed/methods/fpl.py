"""FPL: features are drawn to clusters of the clients' prototypes, and to one unbiased prototype per class.

Huang, Ye, Shi, Li, Du. Rethinking Federated Learning with Domain Shift: A Prototype View. CVPR 2023.
"""

from typing import Literal

import torch
from torch import Tensor

from protofed.method import At, Method, Notes, Positive, Samples, Terms, U, knob
from protofed.methods.fedavg import ModelUpload, SharedModel
from protofed.models.net import Net
from protofed.records import ClassTable, Each, Mean, PrototypeSet, Record
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


class ModelAndClusters(SharedModel):
    """Server state and broadcast: the model and the cluster prototypes C[k]."""

    C: PrototypeSet


class SeparatePrototypeUpload(ModelUpload):
    """A client's model and class means, for a server that needs the means one by one."""

    P: Each[ClassTable]


STALE_CLUSTERS = "A class nobody sent: the released code forgets its clusters; we keep them (stale_protos)."
"""A reading that all of them share."""


class ClustersPrototypes(Method[U]):
    """What the methods with several prototypes per class have in common: the server clusters what clients send."""

    def server_state(self, net: Net, at: At) -> ModelAndClusters:
        """The initial model, no prototype yet."""
        return ModelAndClusters(net.pick(), net.empty_set())

    def global_prototypes(self, server: ModelAndClusters) -> ClassTable:
        """The mean of the clusters of each class."""
        return cluster_means(server.C)


@register("fpl")
class FPL(ClustersPrototypes[SeparatePrototypeUpload]):
    """A global model under domain shift: clients' prototypes are clustered class by class, so that no domain is
    averaged away, and features are contrasted with the clusters and pulled towards their mean."""

    paper = "Huang et al., Rethinking Federated Learning with Domain Shift: A Prototype View, CVPR 2023"
    sends_up = "weights, sample count, prototypes of the classes held, their counts"
    sends_down = "weights, cluster prototypes and their classes"
    separable = True
    readings = (
        "UPCR: the paper sums over coordinates, the released code averages over them; we average (upcr_reduction).",
        STALE_CLUSTERS,
        "Prototypes: the released code collects them during the last epoch; we use a clean pass afterwards "
        "(proto_pass).",
    )
    presets = {
        "authors": {"proto_pass": "last_epoch", "stale_protos": "drop"},
    }

    tau: Positive = knob("temperature of the contrast with the cluster prototypes", default=0.02)
    upcr_reduction: Literal["mean", "sum"] = knob(
        "squared distance to the unbiased prototype, per coordinate", default="mean"
    )

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
        """L_UPCR: the squared distance to the unbiased prototype U[y]."""
        squared = pull(h, cluster_means(C), y)
        return squared if self.upcr_reduction == "mean" else squared * h.shape[1]

    def upload(self, net: Net, data: Samples, at: At) -> tuple[SeparatePrototypeUpload, Record]:
        """The model and the mean feature of each class."""
        observed = self.observations(net, data, at)
        P = class_means(observed["h"], observed["y"], at.classes)
        return SeparatePrototypeUpload(Mean(net.pick(), self.weight(at)), Each(P)), at.memory

    def aggregate(self, server: ModelAndClusters, total: SeparatePrototypeUpload, at: At) -> ModelAndClusters:
        """Averaged weights; C[k], FINCH's clusters of the clients' prototypes."""
        rows, count = stack_tables(total.P.values())  # [M, C, d], [M, C]
        sent = count > 0
        labels = torch.arange(at.classes, device=rows.device).expand_as(count)
        C = class_clusters(rows[sent], labels[sent], at.classes)
        return ModelAndClusters(total.weights, self.refreshed(C, server.C))

"""FedPLVM: clusters of clusters, first inside each client and then over clients, and a contrast that spares outliers.

Wang, Chen, Zhang, Liu, Zhu. Taming Cross-Domain Representation Variance in Federated Prototype Learning with
Heterogeneous Data Domains. NeurIPS 2024.
"""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from protofed.method import At, NonNegative, Notes, Positive, Samples, Terms, knob
from protofed.methods.fedavg import ModelUpload
from protofed.methods.fpl import STALE_CLUSTERS, ClustersPrototypes, ModelAndClusters
from protofed.models.net import Net
from protofed.records import Each, Mean, PrototypeSet, Record
from protofed.registry import register
from protofed.verbs import class_clusters, cluster_means, cosine, cross_entropy, set_contrast

Exponent = Annotated[float, Field(gt=0, le=1)]


class FedPLVMUpload(ModelUpload):
    """A client's model and the cluster centres of its features, as many per class as FINCH finds."""

    C: Each[PrototypeSet]


@register("fedplvm")
class FedPLVM(ClustersPrototypes[FedPLVMUpload]):
    """A global model under domain shift: a client with more varied features sends more prototypes, and the server
    clusters all of them again."""

    paper = (
        "Wang et al., Taming Cross-Domain Representation Variance in Federated Prototype Learning with Heterogeneous "
        "Data Domains, NeurIPS 2024"
    )
    sends_up = "weights, sample count, cluster centres of each class held"
    sends_down = "weights, global cluster prototypes and their classes"
    readings = (
        "lambda: the released code calls 100 the weight of the cross-entropy, yet multiplies the prototype terms "
        "by it; we do the same (lam).",
        "cos^alpha needs a positive cosine and its slope at 0 is unbounded; the cosine is kept above a floor "
        "(cos_floor).",
        "Weights: the released code uses the plain mean if labels are IID; we weight by samples (weighting).",
        STALE_CLUSTERS,
    )
    presets = {
        "authors": {"weighting": "uniform", "stale_protos": "drop"},
    }

    alpha: Exponent = knob("power of the cosine in the contrast; 1 is the plain cosine", default=0.25)
    tau: Positive = knob("temperature of the contrast with the global clusters", default=0.07)
    lam: NonNegative = knob("weight of both prototype terms", default=100.0)
    cos_floor: Positive = knob("smallest cosine that is raised to the power alpha", default=1e-6)

    def loss(self, net: Net, x: Tensor, y: Tensor, at: At) -> tuple[Terms, Notes]:
        """L = CE + lambda (L_alpha + L_corr)."""
        h = net.features(x)
        return {
            "ce": cross_entropy(net.head(h), y),
            "alpha": self.lam * self.contrast(h, at.down.C, y),
            "corr": self.lam * correction(h, at.down.C, y),
        }, {"h": h, "y": y}

    def contrast(self, h: Tensor, C: PrototypeSet, y: Tensor) -> Tensor:
        """L_alpha, with s(h, c) = cos(h, c)^alpha."""
        s = cosine(h, C.rows).clamp(self.cos_floor, 1.0).pow(self.alpha)
        return set_contrast(s / self.tau, C, y)

    def upload(self, net: Net, data: Samples, at: At) -> tuple[FedPLVMUpload, Record]:
        """The model and the clusters of the features of each class."""
        observed = self.observations(net, data, at)
        C = class_clusters(observed["h"], observed["y"], at.classes)
        return FedPLVMUpload(Mean(net.pick(), self.weight(at)), Each(C)), at.memory

    def aggregate(self, server: ModelAndClusters, total: FedPLVMUpload, at: At) -> ModelAndClusters:
        """Averaged weights; C[k], FINCH's clusters of all clients' centres of class k."""
        rows = torch.cat([C.rows for C in total.C.values()])
        labels = torch.cat([C.labels for C in total.C.values()])
        return ModelAndClusters(total.weights, self.refreshed(class_clusters(rows, labels, at.classes), server.C))


def correction(h: Tensor, C: PrototypeSet, y: Tensor) -> Tensor:
    """L_corr = 2 mean (cos(h, A[y]) - 1)^2; it gives back the pull that alpha < 1 takes away."""
    A = cluster_means(C)
    gap = cosine(h, A.rows).gather(1, y[:, None])[:, 0] - 1
    return 2 * torch.where(A.held[y], gap, 0.0).pow(2).mean()

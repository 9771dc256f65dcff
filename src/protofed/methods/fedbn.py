"""FedBN: normalisation stays with the client, everything else is averaged.

Li, Jiang, Zhang, Kamp, Dou. FedBN: Federated Learning on Non-IID Features via Local Batch Normalization. ICLR 2021.
"""

from typing import Literal

from protofed.method import At, Samples, knob
from protofed.methods.fedavg import ModelUpload, SharedModel, TrainedByCrossEntropy
from protofed.models import Group, everything, normalisation
from protofed.models.net import Net
from protofed.records import Mean, Record, Weights
from protofed.registry import register
from protofed.verbs import joined, named_as


class _FedBNServer(Record):
    """The shared part, and the clients' mean normalisation where it is collected."""

    shared: SharedModel
    norms: Weights


@register("fedbn")
class FedBN(TrainedByCrossEntropy[ModelUpload]):
    """Each client's normalisation layers, including their running statistics, adapt to its own domain."""

    paper = "Li et al., FedBN: Federated Learning on Non-IID Features via Local Batch Normalization, ICLR 2021"
    shares = everything - normalisation
    sends_up = "weights without normalisation, sample count; with global_bn=mean also the normalisation"
    sends_down = "weights without normalisation"
    separable = True
    readings = (
        "Normalisation layers are found by type; matching names that contain 'bn' would miss those in the shortcuts.",
        "A model for unseen domains needs the mean of the clients' normalisation, which the method does not "
        "send. With global_bn=mean it is sent up and counted, but no client ever loads it; with none there is no "
        "global model.",
        "The authors' code weights clients equally (weighting, preset authors).",
    )
    presets = {
        "authors": {"weighting": "uniform"},
    }

    global_bn: Literal["mean", "none"] = knob("also collect the mean normalisation, for a global model", default="none")

    @property
    def uploads(self) -> Group:
        """What the server averages."""
        return everything if self.global_bn == "mean" else self.shares

    def server_state(self, net: Net, at: At) -> _FedBNServer:
        """The initial model."""
        return _FedBNServer(SharedModel(net.pick(self.shares)), net.pick(self.uploads - self.shares))

    def broadcast(self, server: _FedBNServer, at: At) -> SharedModel:
        """The shared part."""
        return server.shared

    def upload(self, net: Net, data: Samples, at: At) -> tuple[ModelUpload, Record]:
        """The trained model without its normalisation."""
        return ModelUpload(Mean(net.pick(self.uploads), self.weight(at))), at.memory

    def aggregate(self, server: _FedBNServer, total: ModelUpload, at: At) -> _FedBNServer:
        """The weighted mean."""
        shared, norms = (named_as(like, total.weights) for like in (server.shared.weights, server.norms))
        return _FedBNServer(SharedModel(shared), norms)

    def global_weights(self, server: _FedBNServer) -> Weights | None:
        """The shared part with the mean normalisation, where that was collected."""
        if self.global_bn == "none":
            return None
        return joined(server.shared.weights, server.norms)

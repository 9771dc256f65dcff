"""FedAvg: the weighted mean of the clients' models.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas. Communication-Efficient Learning of Deep Networks from Decentralized
Data. AISTATS 2017.
"""

from torch import Tensor

from protofed.method import At, Method, Samples, Terms, U
from protofed.models.net import Net
from protofed.records import Mean, Record, Weights
from protofed.registry import register
from protofed.verbs import cross_entropy


class SharedModel(Record):
    """Server state and broadcast: the global model, or the part of it that is shared."""

    weights: Weights


class ModelUpload(Record):
    """A client's model, or the part of it that is shared, to be averaged."""

    weights: Mean[Weights]


class ServerWithModel(Record):
    """State of a server that keeps more than the model it sends; what else it keeps follows in subclasses."""

    model: SharedModel


class TrainedByCrossEntropy(Method[U]):
    """What FedAvg has in common with its relatives: the global model is trained by cross-entropy, and little else."""

    sends_down = "weights"

    def loss(self, net: Net, x: Tensor, y: Tensor, at: At) -> Terms:
        """Cross-entropy."""
        return {"ce": cross_entropy(net(x), y)}


class KeepsServerState(TrainedByCrossEntropy[U]):
    """The same, where the server keeps more than it sends, in a `ServerWithModel`."""

    def broadcast(self, server: ServerWithModel, at: At) -> SharedModel:
        """The model."""
        return server.model

    def global_weights(self, server: ServerWithModel) -> Weights:
        """The model."""
        return server.model.weights


@register("fedavg")
class FedAvg(TrainedByCrossEntropy[ModelUpload]):
    """Every client trains the global model on its own data; the server averages the results."""

    paper = "McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017"
    sends_up = "weights, sample count"
    separable = True

    def server_state(self, net: Net, at: At) -> SharedModel:
        """The initial model."""
        return SharedModel(net.pick())

    def upload(self, net: Net, data: Samples, at: At) -> tuple[ModelUpload, Record]:
        """The trained model."""
        return ModelUpload(Mean(net.pick(), self.weight(at))), at.memory

    def aggregate(self, server: SharedModel, total: ModelUpload, at: At) -> SharedModel:
        """The weighted mean."""
        return SharedModel(total.weights)

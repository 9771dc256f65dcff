"""FedAvg: the weighted mean of the clients' models.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas. Communication-Efficient Learning of Deep Networks from Decentralized
Data. AISTATS 2017.
"""

from typing import Any

from torch import Tensor

from protofed.method import At, Method, Samples, Terms
from protofed.models.net import Net
from protofed.records import Mean, Record, Weights
from protofed.registry import register
from protofed.verbs import cross_entropy


class Model(Record):
    """Server state and broadcast: the global model."""

    weights: Weights


class Upload(Record):
    """A client's model, averaged by sample count."""

    weights: Mean[Weights]


@register("fedavg")
class FedAvg(Method):
    """Every client trains the global model on its own data; the server averages the results."""

    paper = "McMahan et al., Communication-Efficient Learning of Deep Networks from Decentralized Data, AISTATS 2017"
    sends_up = "weights, sample count"
    sends_down = "weights"
    separable = True

    def server_state(self, net: Net, at: At) -> Model:
        """The initial model."""
        return Model(net.pick())

    def loss(self, net: Net, x: Tensor, y: Tensor, at: At) -> Terms:
        """Cross-entropy."""
        return {"ce": cross_entropy(net(x), y)}

    def upload(self, net: Net, data: Samples, at: At) -> tuple[Upload, Record]:
        """The trained model."""
        return Upload(Mean(net.pick(), self.weight(at))), at.memory

    def aggregate(self, server: Model, total: Any, at: At) -> Model:
        """The weighted mean."""
        return Model(total.weights)

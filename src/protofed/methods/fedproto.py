"""FedProto: clients agree on class prototypes, in its personal form and with averaged models.

Tan, Long, Liu, Zhou, Lu, Jiang, Zhang. FedProto: Federated Prototype Learning across Heterogeneous Clients. AAAI 2022.
The form with averaged models is the one in the tables of FPL (CVPR 2023) and I2PFL.
"""

from typing import Literal

from torch import Tensor

from protofed.method import At, Method, NonNegative, Notes, Samples, Terms, U, knob
from protofed.methods.fedavg import ModelUpload, SharedModel
from protofed.models import nothing
from protofed.models.net import Net
from protofed.records import ClassTable, Mean, Record
from protofed.registry import register
from protofed.verbs import class_means, cross_entropy, head_or_nearest, pull


class GlobalPrototypes(Record):
    """Server state and broadcast of personal models: the global prototypes G."""

    G: ClassTable


class ModelAndPrototypes(SharedModel):
    """Server state and broadcast of averaged models: the model and the global prototypes G."""

    G: ClassTable


class PrototypeUpload(Record):
    """The class means of one client."""

    P: Mean[ClassTable]


class ModelAndPrototypeUpload(ModelUpload):
    """The model and the class means of one client."""

    P: Mean[ClassTable]


Inference = Literal["head", "nearest"]
"""What predicts: the head of the network, or the nearest global prototype."""


class ExchangesPrototypes(Method[PrototypeUpload]):
    """Clients keep their models and exchange prototypes alone."""

    sends_down = "global prototypes"
    shares = nothing

    def server_state(self, net: Net, at: At) -> GlobalPrototypes:
        """No prototype yet."""
        return GlobalPrototypes(net.empty_table())

    def aggregate(self, server: GlobalPrototypes, total: PrototypeUpload, at: At) -> GlobalPrototypes:
        """The mean over the clients that own the class."""
        return GlobalPrototypes(self.refreshed(total.P, server.G))


class _PrototypeAlignment(Method[U]):
    """What both forms have in common: the local objective and the local prototypes."""

    paper = "Tan et al., FedProto: Federated Prototype Learning across Heterogeneous Clients, AAAI 2022"
    readings = (
        "Aggregation: the printed weights sum to 1 / (number of owners); we take the plain mean over owners "
        "(proto_weighting).",
        "Alignment: the paper compares class means, the released code single samples; we compare samples "
        "(align_reduction).",
        "Prediction: the paper uses the nearest prototype, the tables of other papers the head; we use the head "
        "(inference).",
    )
    separable = True
    presets = {"cifar10": {"lam": 0.1}}

    lam: NonNegative = knob("weight of the alignment with the global prototypes", default=1.0)
    align_reduction: Literal["mse", "sq_l2"] = knob(
        "mean over coordinates, or squared distance per sample", default="mse"
    )
    proto_weighting: Literal["uniform", "count"] = knob(
        "owners of a class count equally or by samples", default="uniform"
    )
    inference: Inference = knob("predict with the head or by the nearest global prototype", default="head")

    def loss(self, net: Net, x: Tensor, y: Tensor, at: At) -> tuple[Terms, Notes]:
        """Cross-entropy and the distance of each sample to its class's global prototype."""
        h = net.features(x)
        return {
            "ce": cross_entropy(net.head(h), y),
            "align": self.lam * pull(h, at.down.G, y, self.align_reduction),  # L_R
        }, {"h": h, "y": y}

    def local_prototypes(self, net: Net, data: Samples, at: At) -> Mean[ClassTable]:
        """P_i[k], the mean feature of each class."""
        observed = self.observations(net, data, at)
        P = class_means(observed["h"], observed["y"], at.classes)
        return Mean(P, P.count if self.proto_weighting == "count" else 1.0)

    @property
    def predicts_alike(self) -> bool:
        """The nearest prototype is sought among the client's own classes."""
        return self.inference == "head"

    def predict(self, net: Net, x: Tensor, at: At) -> Tensor:
        """By the local head, or by the nearest prototype among the client's own classes."""
        return head_or_nearest(net, x, self.inference, at.down.G, at.held)


@register("fedproto")
class FedProto(_PrototypeAlignment[PrototypeUpload], ExchangesPrototypes):
    """Clients keep their own models and exchange only class means, towards which features are pulled."""

    sends_up = "prototypes of the classes held, their counts"

    def upload(self, net: Net, data: Samples, at: At) -> tuple[PrototypeUpload, Record]:
        """The local prototypes."""
        return PrototypeUpload(self.local_prototypes(net, data, at)), at.memory


@register("fedproto_avg")
class FedProtoAveraged(_PrototypeAlignment[ModelAndPrototypeUpload]):
    """FedProto's alignment for one global model, whose weights are averaged as in FedAvg."""

    sends_up = "weights, sample count, prototypes of the classes held, their counts"
    sends_down = "weights, global prototypes"

    def server_state(self, net: Net, at: At) -> ModelAndPrototypes:
        """The initial model, no prototype yet."""
        return ModelAndPrototypes(net.pick(), net.empty_table())

    def upload(self, net: Net, data: Samples, at: At) -> tuple[ModelAndPrototypeUpload, Record]:
        """The trained model and its class means."""
        return ModelAndPrototypeUpload(
            Mean(net.pick(), self.weight(at)), self.local_prototypes(net, data, at)
        ), at.memory

    def aggregate(self, server: ModelAndPrototypes, total: ModelAndPrototypeUpload, at: At) -> ModelAndPrototypes:
        """Weights by samples, prototypes over their owners."""
        return ModelAndPrototypes(total.weights, self.refreshed(total.P, server.G))

"""FedProx: FedAvg whose clients are held near the model they received.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith. Federated Optimization in Heterogeneous Networks. MLSys 2020.
"""

from torch import Tensor

from protofed.method import At, NonNegative, Terms, knob
from protofed.methods.fedavg import FedAvg
from protofed.models.net import Net
from protofed.registry import register
from protofed.verbs import proximal


@register("fedprox")
class FedProx(FedAvg):
    """FedAvg with a penalty on the distance to the broadcast weights; running statistics are exempt."""

    paper = "Li et al., Federated Optimization in Heterogeneous Networks, MLSys 2020"
    readings = (
        "The penalty is the squared norm, on every batch and in every round; FedBN's scripts use the unsquared "
        "norm or skip the penalty.",
        "FPL's repository multiplies mu by 0.01: its mu=0.01 is 0.0001 here (mu, preset rethinkfl).",
    )
    presets = {
        "rethinkfl": {"mu": 1e-4},
    }

    mu: NonNegative = knob("weight of the distance to the broadcast weights", default=0.01)

    def loss(self, net: Net, x: Tensor, y: Tensor, at: At) -> Terms:
        """Cross-entropy and (mu / 2) |theta - theta^t|^2."""
        return {**super().loss(net, x, y, at), "proximal": proximal(net.params(), at.start.params, self.mu)}

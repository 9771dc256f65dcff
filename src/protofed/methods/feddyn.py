"""FedDyn: a regulariser that moves with each client, so that local and global optima agree in the limit.

Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama. Federated Learning Based on Dynamic Regularization. ICLR 2021.
"""

from typing import Any, Literal

from torch import Tensor

from protofed.method import At, Positive, Samples, Step, Terms, knob
from protofed.methods.fedavg import KeepsServerState, ModelUpload, ServerWithModel, SharedModel
from protofed.models.net import Net
from protofed.records import Mean, Record, Weights
from protofed.registry import register
from protofed.verbs import cross_entropy, inner_product, proximal, zeros_like


class _FedDynServer(ServerWithModel):
    """The model that is sent, the mean of the clients' models it is made of, and the correction h."""

    mean: Weights
    h: dict[str, Tensor]


class _FedDynMemory(Record):
    """The client's gradient so far, lambda_i."""

    lam: dict[str, Tensor]


@register("feddyn")
class FedDyn(KeepsServerState[ModelUpload]):
    """Clients remember the gradient at which they stopped; the server corrects the mean by the accumulated drift."""

    paper = "Acar et al., Federated Learning Based on Dynamic Regularization, ICLR 2021"
    sends_up = "weights"
    separable = True
    readings = (
        "The means are unweighted; a client's size enters through alpha_i = alpha / (N n_i / n), as in the "
        "authors' code, unless weighting=uniform.",
        "The paper's headline results score the mean of the clients' models; we score the server's model (eval_model).",
        "FPL's repository lets no gradient through the regulariser and lacks h, so its FedDyn is FedAvg; ours is not.",
        "Running statistics are averaged, outside lambda and h.",
    )

    alpha: Positive = knob("strength of the regulariser", default=0.01)
    clip: Positive = knob("largest norm of a local gradient", default=10.0)
    eval_model: Literal["server", "mean_clients"] = knob("the global model that is scored and saved", default="server")

    @property
    def steps(self) -> tuple[Step, ...]:
        """One step, its gradient clipped."""
        return (Step(clip=self.clip),)

    def alpha_of(self, at: At) -> float:
        """alpha_i: the larger a client, the freer it moves."""
        if self.weighting == "uniform":
            return self.alpha
        return self.alpha * sum(at.clients.values()) / (len(at.clients) * at.size)

    def server_state(self, net: Net, at: At) -> _FedDynServer:
        """The initial model, h = 0."""
        return _FedDynServer(SharedModel(net.pick()), net.pick(), zeros_like(net.params()))

    def client_state(self, net: Net, at: At) -> _FedDynMemory:
        """lambda_i = 0."""
        return _FedDynMemory(zeros_like(net.params()))

    def loss(self, net: Net, x: Tensor, y: Tensor, at: At) -> Terms:
        """CE - <lambda_i, theta> + (alpha_i / 2) |theta - theta^t|^2."""
        return {
            "ce": cross_entropy(net(x), y),
            "linear": -inner_product(net.params(), at.memory.lam),
            "proximal": proximal(net.params(), at.start.params, self.alpha_of(at)),
        }

    def upload(self, net: Net, data: Samples, at: At) -> tuple[ModelUpload, _FedDynMemory]:
        """The trained model; lambda_i <- lambda_i - alpha_i (theta_i - theta^t)."""
        theta_i, alpha = net.pick(), self.alpha_of(at)
        lam = {
            name: old - alpha * (theta_i.params[name] - at.start.params[name]) for name, old in at.memory.lam.items()
        }
        return ModelUpload(Mean(theta_i, 1.0)), _FedDynMemory(lam)

    def aggregate(self, server: _FedDynServer, total: ModelUpload, at: At) -> _FedDynServer:
        """h <- h - (alpha / N) sum (theta_i - theta^t), theta = mean theta_i - h / alpha."""
        theta, mean = server.model.weights.params, total.weights.params
        share = len(at.participants) / len(at.clients)  # |S_t| / N
        h = {name: old - self.alpha * share * (mean[name] - theta[name]) for name, old in server.h.items()}
        corrected = {name: tensor - h[name] / self.alpha for name, tensor in mean.items()}
        return _FedDynServer(SharedModel(Weights(corrected, total.weights.stats)), total.weights, h)

    def global_weights(self, server: Any) -> Weights:
        """The server's model, or the mean of the clients'."""
        mean: Weights = server.mean
        return mean if self.eval_model == "mean_clients" else super().global_weights(server)

"""SCAFFOLD: control variates take the clients' drift out of local training.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh. SCAFFOLD: Stochastic Controlled Averaging for Federated Learning.
ICML 2020.
"""

import logging
from typing import Any, Literal

import torch
from torch import Tensor

from protofed.method import At, Method, Plan, Positive, Samples, Terms, knob
from protofed.methods.fedavg import SharedModel
from protofed.models.net import Net
from protofed.records import Mean, Record, Weights
from protofed.registry import register
from protofed.verbs import cross_entropy, inner_product, zeros_like

log = logging.getLogger("protofed")


class _ScaffoldServer(SharedModel):
    """Server state and broadcast: the model and the server's control variate c."""

    c: Weights


class _ScaffoldUpload(Record):
    """The changes dy of the model (running statistics as they are) and dc of the control variate."""

    changes = frozenset({"dy", "dc"})

    dy: Mean[Weights]
    dc: Mean[Weights]


class _ScaffoldMemory(Record):
    """The client's control variate c_i."""

    c: Weights


@register("scaffold")
class Scaffold(Method[_ScaffoldUpload]):
    """Each local gradient is corrected by the difference between the average direction of all clients and the
    client's own."""

    paper = "Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated Learning, ICML 2020"
    sends_up = "change of the weights, change of the control variate"
    sends_down = "weights, control variate"
    separable = True
    readings = (
        "Control variates follow option II. The theory has no momentum; here the corrected gradient enters it, "
        "and the change is divided by the path of a unit gradient, which is m x lr without momentum.",
        "The theory weights clients equally (weighting).",
        "Running statistics have no gradient: they are averaged and have no control variate.",
    )

    server_lr: Positive = knob("the server's step along the mean change, eta_g", default=1.0)
    weighting: Literal["samples", "uniform"] = knob(
        "weight of a client in the mean change of the weights", default="uniform"
    )

    def plan(self, plan: Plan) -> Plan:
        """As asked, with a warning where the control variates lose their meaning."""
        if plan.optimizer == "adam":
            log.warning(
                "scaffold: Adam's path over lr x steps is not a mean gradient; its control variates mean little"
            )
        return plan

    def server_state(self, net: Net, at: At) -> _ScaffoldServer:
        """The initial model, c = 0."""
        return _ScaffoldServer(net.pick(), Weights(zeros_like(net.params()), {}))

    def client_state(self, net: Net, at: At) -> _ScaffoldMemory:
        """c_i = 0."""
        return _ScaffoldMemory(Weights(zeros_like(net.params()), {}))

    def loss(self, net: Net, x: Tensor, y: Tensor, at: At) -> Terms:
        """Cross-entropy, and a linear term whose gradient is the correction c - c_i."""
        c, c_i = at.down.c.params, at.memory.c.params
        return {
            "ce": cross_entropy(net(x), y),
            "correction": inner_product(net.params(), {name: c[name] - c_i[name] for name in c}),
        }

    def upload(self, net: Net, data: Samples, at: At) -> tuple[_ScaffoldUpload, _ScaffoldMemory]:
        """dy and dc; a client that took no step learnt nothing about its gradient."""
        y = net.pick()
        dy = {name: tensor - at.start.params[name] for name, tensor in y.params.items()}
        path = at.taken * at.lr if at.reach is None else at.reach  # m eta
        c, c_i = at.down.c.params, at.memory.c.params
        dc = {name: -c[name] - dy[name] / path if at.taken else torch.zeros_like(c[name]) for name in c}  # option II
        memory = _ScaffoldMemory(Weights({name: c_i[name] + dc[name] for name in c}, {}))
        return _ScaffoldUpload(Mean(Weights(dy, y.stats), self.weight(at)), Mean(Weights(dc, {}), 1.0)), memory

    def client_weights(self, server: _ScaffoldServer, upload: Any, at: At) -> Weights:
        """y = theta + dy."""
        dy = upload.dy.value
        theta = server.weights.params
        return Weights({name: theta[name] + change for name, change in dy.params.items()}, dy.stats)

    def aggregate(self, server: _ScaffoldServer, total: _ScaffoldUpload, at: At) -> _ScaffoldServer:
        """One step along the mean change; c stays the mean of the c_i of all clients."""
        dy, dc = total.dy.params, total.dc.params
        theta = {name: tensor + self.server_lr * dy[name] for name, tensor in server.weights.params.items()}
        share = len(at.participants) / len(at.clients)  # |S_t| / N
        c = {name: tensor + share * dc[name] for name, tensor in server.c.params.items()}
        return _ScaffoldServer(Weights(theta, total.dy.stats), Weights(c, {}))

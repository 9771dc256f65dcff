"""FedNova: clients' changes are divided by their effective number of steps before they are averaged.

Wang, Liu, Liang, Joshi, Poor. Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization.
NeurIPS 2020.
"""

import logging
from typing import Any

import torch
from torch import Tensor

from protofed.method import At, Fraction, NonNegative, Plan, Samples, Terms, knob
from protofed.methods.fedavg import KeepsServerState, ServerWithModel, SharedModel
from protofed.models.net import Net
from protofed.records import Mean, Record, Weights
from protofed.registry import register
from protofed.verbs import cross_entropy, proximal, zeros_like

log = logging.getLogger("protofed")


class _FedNovaServer(ServerWithModel):
    """The model, and the server's momentum."""

    momentum: dict[str, Tensor]


class _FedNovaUpload(Record):
    """The normalised change d_i (running statistics as they are) and a term of tau_eff, both weighted by n_i."""

    changes = frozenset({"d"})

    d: Mean[Weights]
    steps: Mean[Tensor]
    """The term of tau_eff, see `tau_eff_term`; the divisor of d_i, which may be another number, does not travel."""


@register("fednova")
class FedNova(KeepsServerState[_FedNovaUpload]):
    """Updates are normalised by the number of local steps, so clients with more steps no longer dominate the
    average."""

    paper = "Wang et al., Tackling the Objective Inconsistency Problem in Federated Optimization, NeurIPS 2020"
    sends_up = "normalised change of the weights, effective number of steps, sample count"
    separable = True
    readings = (
        "tau_i counts optimiser steps; counting epochs, as one benchmark does, turns the method into FedAvg.",
        "With a proximal term the reference code rescales by the plain number of steps (mu).",
        "Running statistics are averaged; the formula does not apply to them.",
    )

    server_momentum: Fraction = knob("server momentum, gmf", default=0.0)
    mu: NonNegative = knob("weight of a proximal term in local training", default=0.0)

    def plan(self, plan: Plan) -> Plan:
        """As asked, with a warning where there is no such thing as a_i."""
        if plan.optimizer == "adam":
            log.warning("fednova: under Adam the effective number of steps is assumed to be the number of steps")
        return plan

    def server_state(self, net: Net, at: At) -> _FedNovaServer:
        """The initial model at rest."""
        return _FedNovaServer(SharedModel(net.pick()), zeros_like(net.params()))

    def loss(self, net: Net, x: Tensor, y: Tensor, at: At) -> Terms:
        """Cross-entropy, and the proximal term where it is asked for."""
        terms = {"ce": cross_entropy(net(x), y)}
        return {**terms, "proximal": proximal(net.params(), at.start.params, self.mu)} if self.mu else terms

    def upload(self, net: Net, data: Samples, at: At) -> tuple[_FedNovaUpload, Record]:
        """d_i = (theta^t - theta_i) / a_i, which is nothing where no step was taken."""
        theta_i, a = net.pick(), self.effective_steps(at.taken, at) or 1.0
        d = {name: (at.start.params[name] - tensor) / a for name, tensor in theta_i.params.items()}
        term = torch.tensor(self.tau_eff_term(at.taken, at), dtype=torch.float64)
        weight = self.weight(at)
        return _FedNovaUpload(Mean(Weights(d, theta_i.stats), weight), Mean(term, weight)), at.memory

    def effective_steps(self, steps: int, at: At) -> float:
        """a_i: how many steps of length lr a constant unit gradient would have gone."""
        if at.plan.optimizer == "adam":
            return steps
        if self.persist_optimizer and not self.mu and at.reach is not None:
            return at.reach / at.lr  # momentum that was kept goes on pushing
        return _counted_steps(steps, at.plan.momentum, at.lr * self.mu)

    def tau_eff_term(self, steps: int, at: At) -> float:
        """What a client adds to tau_eff: a_i, or with a proximal term the plain number of steps, tau_i."""
        return steps if self.mu else self.effective_steps(steps, at)

    def divisor(self, term: float, at: At) -> float:
        """a_i, by which d_i was divided, for a client with this term of tau_eff."""
        return self.effective_steps(round(term), at) if self.mu else term

    def client_weights(self, server: _FedNovaServer, upload: Any, at: At) -> Weights:
        """theta_i = theta - a_i d_i."""
        d, a = upload.d.value, self.divisor(float(upload.steps.value), at)
        theta = server.model.weights.params
        return Weights({name: theta[name] - a * change for name, change in d.params.items()}, d.stats)

    def aggregate(self, server: _FedNovaServer, total: _FedNovaUpload, at: At) -> _FedNovaServer:
        """theta - tau_eff sum p_i d_i, through the server's momentum."""
        tau_eff = float(total.steps)
        momentum = {  # buf <- gmf buf + change / eta
            name: self.server_momentum * old + tau_eff / at.lr * total.d.params[name]
            for name, old in server.momentum.items()
        }
        theta = {name: tensor - at.lr * momentum[name] for name, tensor in server.model.weights.params.items()}
        return _FedNovaServer(SharedModel(Weights(theta, total.d.stats)), momentum)


def _counted_steps(steps: int, rho: float, e: float) -> float:
    """a_i with momentum rho and a proximal term of strength e = lr x mu, which holds back."""
    a = stride = 0.0
    for _ in range(steps):
        stride = rho * stride + 1 - e * a
        a += stride
    return a

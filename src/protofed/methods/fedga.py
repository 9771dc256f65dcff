"""FedGA: clients that the average hurts get more weight in the next one.

Zhang, Xu, Yao, Wang. Federated Domain Generalization with Generalization Adjustment. CVPR 2023.
"""

from typing import Literal

import torch
from torch import Tensor

from protofed.method import At, Fraction, Samples, knob
from protofed.methods.fedavg import KeepsServerState, ServerWithModel, SharedModel
from protofed.models.net import Net
from protofed.records import Each, Record, Weights
from protofed.registry import register
from protofed.verbs import cross_entropy, weighted_mean


class _FedGAUpload(Record):
    """A client's model, and the risk on its validation samples of the model it received and of the one it trained."""

    weights: Each[Weights]
    received: Each[Tensor]
    trained: Each[Tensor]


class _FedGAServer(ServerWithModel):
    """The model and, for every client: its weight a_i, and the risk its own model had, where it trained last round."""

    a: Tensor  # [N]
    before: Tensor  # [N]
    trained: Tensor  # [N] booleans


@register("fedga")
class FedGA(KeepsServerState[_FedGAUpload]):
    """Clients are weighted by how much worse the averaged model does on their data than their own model."""

    paper = "Zhang et al., Federated Domain Generalization with Generalization Adjustment, CVPR 2023"
    sends_up = "weights, two validation figures"
    readings = (
        "The clients that receive the averaged model in the next round measure it there, before anything is "
        "averaged: this gives the same weights as a second exchange. The weights depend on all gaps, so models "
        "arrive one by one.",
        "The paper centres the gaps by their mean, the released code does not; we do not (center).",
        "The paper measures the gap in the loss, the released script in the accuracy; we use the loss (metric, "
        "preset authors).",
        "A client that sat out the last round has no gap and keeps its weight.",
        "A client without validation samples measures on its training samples.",
    )
    presets = {
        "authors": {"metric": "accuracy"},
    }
    validation_share = 0.2

    step: Fraction = knob(
        "largest initial change of a weight, as a fraction of 1/N; falls linearly over the rounds", default=0.2
    )
    metric: Literal["loss", "accuracy"] = knob("what the gap is measured in", default="loss")
    center: bool = knob("subtract the mean gap first", default=False)

    def server_state(self, net: Net, at: At) -> _FedGAServer:
        """The initial model, equal weights, no gap."""
        N = len(at.clients)
        zeros = torch.zeros(N, dtype=torch.float64)
        return _FedGAServer(SharedModel(net.pick()), zeros + 1 / N, zeros, torch.zeros(N, dtype=torch.bool))

    def upload(self, net: Net, data: Samples, at: At) -> tuple[_FedGAUpload, Record]:
        """The trained model; what was received is last round's average, whose "after" is measured only now."""
        validation = data if data.validation is None else data.validation
        received, trained = self.risk(net.using(at.start), validation), self.risk(net, validation)
        return _FedGAUpload(Each(net.pick()), Each(received), Each(trained)), at.memory

    @torch.no_grad()
    def risk(self, net: Net, data: Samples) -> Tensor:
        """Mean loss, or part of samples classified wrongly."""
        with net.eval():
            outputs = [(net(x), y) for x, y in data.batches()]
        z, y = torch.cat([z for z, _ in outputs]).double(), torch.cat([y for _, y in outputs])
        return cross_entropy(z, y) if self.metric == "loss" else (z.argmax(1) != y).double().mean()

    def aggregate(self, server: _FedGAServer, total: _FedGAUpload, at: At) -> _FedGAServer:
        """Last round's gaps adjust the weights, with which this round's models are averaged."""
        participates = torch.tensor([client in total.weights for client in at.clients])
        after, before = _by_client(total.received, at), _by_client(total.trained, at)
        a = self.adjusted(server.a, after - server.before, participates & server.trained, at)
        shares = dict(zip(at.clients, a.tolist(), strict=True))
        if not any(shares[client] for client in total.weights):
            shares = dict.fromkeys(shares, 1.0)
        return _FedGAServer(SharedModel(weighted_mean(total.weights, shares)), a, before, participates)

    @property
    def depends_on_rounds(self) -> str:
        """s_t."""
        return "the step of the weights falls over all rounds"

    def adjusted(self, a: Tensor, gap: Tensor, known: Tensor, at: At) -> Tensor:
        """a_i <- clip(a_i + s G_i / max |G|, 0, 1), renormalised, for the gaps of the round before this one."""
        t, N = at.round - 1, len(a)
        s = (self.step - (t - 1) * self.step / at.rounds) / N
        if self.center:
            gap = gap - (gap * known).sum() / known.sum().clamp(min=1)
        G = gap * known
        largest = G.abs().max()
        raised = (a + s * G / largest).clamp(0, 1)
        return raised / raised.sum() if largest > 0 and raised.sum() > 0 else a


def _by_client(values: dict[str, Tensor], at: At) -> Tensor:
    """One number per client of the federation, 0 for those that sent none."""
    return torch.stack([values.get(client, torch.zeros((), dtype=torch.float64)) for client in at.clients])

"""FedCOF: covariances for free, from the spread of the sites' class means.

Magistri, Goswami, et al. Covariances for Free: Exploiting Mean Distributions for Training-Free Federated Learning.
2025.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from protofed.closed_form.one_pass import OnePass, OnePassServer
from protofed.closed_form.sums import ClassSums, doubled
from protofed.method import At, NonNegative, Samples, SumSensitivity, Whole, knob
from protofed.methods.fed3r import ridge
from protofed.models.net import Net
from protofed.records import ClassTable, Each, Record, Weights, map_tensors
from protofed.registry import register
from protofed.verbs import exact_class_means, stack_tables


class FedCOFServer(OnePassServer):
    """What every site has sent, and the class sums that follow."""

    sent: dict[str, ClassTable]


class ClassMeansUpload(Record):
    """One site's class means and their counts, which the server sees by themselves."""

    sums: Each[ClassTable]


@register("fedcof")
class FedCOF(OnePass[ClassMeansUpload]):
    """One exchange: sites send only class means, whose spread over sites estimates the covariance for a ridge head."""

    paper = "Magistri et al., Covariances for Free: Exploiting Mean Distributions for Training-Free FL, 2025"
    readings = (
        "Features are scaled to length 1.",
        "Shrinkage: the paper adds gamma to the diagonal of each covariance; with features of length 1, gamma is "
        "in units of the mean variance (gamma).",
        "Few sites: the mean of a single site shows no spread, so the images of a class may be sent as several "
        "means (parts).",
    )
    sends_up = "class means and counts (of each of `parts` parts), once"

    gamma: NonNegative = knob("shrinkage, in units of the mean variance", default=1.0)
    lam: NonNegative = knob("ridge: added to the diagonal", default=0.01)
    parts: Whole = knob("number of means that a site sends per class, over equally many images each", default=1)

    @property
    def separable(self) -> bool:
        """One image more deals all others to other parts."""
        return self.parts == 1

    def sum_sensitivity(self, unit: Literal["sample", "client"], bound: float, at: At) -> Mapping[str, SumSensitivity]:
        """Nothing adds up: a guard treats the means as those of any method."""
        super().sum_sensitivity(unit, bound, at)
        return {}

    def no_statistics(self, net: Net, at: At) -> ClassSums:
        """Of nobody."""
        return ClassSums(ClassTable.empty(at.classes * self.parts, at.dim, net.empty_table().rows))

    def statistics(self, net: Net, data: Samples, at: At) -> ClassSums:
        """m_kc; the images of a class are dealt to its parts in turn, in an order drawn for this site."""
        h, y = self.rows(net, data, at)
        turn = torch.empty_like(y)
        order = torch.randperm(len(y), generator=at.rng("parts")).to(y.device)
        for k in range(at.classes):
            mine = order[y[order] == k]
            turn[mine] = torch.arange(len(mine), device=y.device) % self.parts
        return ClassSums(exact_class_means(h, turn * at.classes + y, at.classes * self.parts))

    def server_state(self, net: Net, at: At) -> FedCOFServer:
        """Nothing sent yet."""
        base, none = super().server_state(net, at), self.no_statistics(net, at).sums
        total = doubled(ClassSums(net.empty_table()))
        return FedCOFServer(base.shared, base.rest, total, dict.fromkeys(at.clients, none))

    def packed(self, sent: ClassSums, net: Net, at: At) -> ClassMeansUpload:
        """As they are."""
        return ClassMeansUpload(Each(sent.sums))

    def aggregate(self, server: FedCOFServer, total: ClassMeansUpload, at: At) -> FedCOFServer:
        """The head from everybody's means."""
        return self._from({**server.sent, **total.sums}, server, at)

    def forget(self, server: FedCOFServer, memory: ClassSums, at: At) -> FedCOFServer:
        """The head from the others' means."""
        nothing = map_tensors(memory.sums, torch.zeros_like)
        return self._from({**server.sent, str(at.client): nothing}, server, at)

    def include(self, server: FedCOFServer, memory: ClassSums, at: At) -> FedCOFServer:
        """The head from the others' means and its own."""
        return self._from({**server.sent, str(at.client): memory.sums}, server, at)

    def client_weights(self, server: FedCOFServer, upload: Any, at: At) -> Weights:
        """From the means of one site alone."""
        nobody = {client: map_tensors(table, torch.zeros_like) for client, table in server.sent.items()}
        return super().client_weights(replace(server, sent=nobody), upload, at)

    def _from(self, sent: dict[str, ClassTable], server: FedCOFServer, at: At) -> FedCOFServer:
        m, n = _means(sent, at)
        total = ClassSums(ClassTable((m * n[..., None]).sum(0), n.sum(0)))
        return self.with_head(replace(server, total=total, sent=sent), at)

    def closed_form(self, server: FedCOFServer, at: At) -> tuple[Tensor, Tensor]:
        """(sum (n_c - 1) Sigma_c + lam I)^-1 S', columns scaled to norm 1."""
        m, n = _means(server.sent, at)
        d, freedom = deviations(m, n), (n.sum(0) - 1).clamp(min=0)
        mean_variance = d.pow(2).sum() / (at.dim * (n > 0).any(0).sum().clamp(min=1))
        rows = (d * freedom.sqrt()[:, None]).flatten(0, 1)
        shrinkage = self.gamma * mean_variance * freedom.sum() * torch.eye(at.dim, dtype=m.dtype)
        scatter = rows.T @ rows + shrinkage
        W = functional.normalize(ridge(scatter, server.total.sums.rows, self.lam), dim=1)
        return W, W.new_zeros(len(W))


def _means(sent: Mapping[str, ClassTable], at: At) -> tuple[Tensor, Tensor]:
    """Means [K, C, D] and counts [K, C] in float64; every part of a site is a site of its own here."""
    rows, count = stack_tables(sent[client] for client in at.clients)
    return rows.double().view(-1, at.classes, at.dim), count.double().view(-1, at.classes)


def deviations(m: Tensor, n: Tensor) -> Tensor:
    """d_kc = sqrt(n_kc / (K_c - 1)) (m_kc - m_c), [K, C, D]: Sigma_c is the sum of d_kc d_kc' over sites.

    Zero where one site has the class.
    """
    centre = (m * n[..., None]).sum(0) / n.sum(0).clamp(min=1)[:, None]
    others = ((n > 0).sum(0) - 1).clamp(min=1)
    return (m - centre) * (n / others).sqrt()[..., None]

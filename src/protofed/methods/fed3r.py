"""Fed3R: ridge regression on frozen features, whose sufficient statistics add up over sites.

Fanì, Camoriano, Caputo, Ciccone. Accelerating Heterogeneous Federated Learning with Closed-Form Classifiers. ICML 2024.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from protofed.method import At, NonNegative, Samples, U, knob
from protofed.methods.fedncm import ClassSums, FineTuned, OnePass, OnePassServer, added_up
from protofed.models import head
from protofed.models.net import Net
from protofed.records import ClassTable, Mean, Record, Sum, Weights
from protofed.registry import register
from protofed.verbs import exact_class_means, second_moment, unpack_symmetric


class Moments(ClassSums):
    """Class sums, and G, the sum of h h' over all images; one row of D(D+1)/2 numbers, for it is symmetric."""

    gram: ClassTable


class MomentsServer(OnePassServer):
    """The head, the rest of the model, and both sums."""

    total: Moments


class MomentsUpload(Record):
    """One site's class means and second moment, to be added up."""

    sums: Sum[ClassTable]
    gram: Sum[ClassTable]


class MomentsAndHeadUpload(MomentsUpload):
    """The same, and a head that was trained on."""

    weights: Mean[Weights]


class SecondMoments(OnePass[U]):
    """One-pass methods whose sites also send the second moment of their features."""

    def no_statistics(self, net: Net, at: At) -> Any:
        """Of nobody."""
        table = net.empty_table()
        return Moments(table, ClassTable.empty(1, at.dim * (at.dim + 1) // 2, table.rows))

    def statistics(self, net: Net, data: Samples, at: At) -> Any:
        """n_c, m_c and G / n."""
        h, y = self.rows(net, data, at)
        return Moments(exact_class_means(h, y, at.classes), second_moment(h))

    def packed(self, sent: Any, net: Net, at: At) -> Any:
        """Both add up."""
        return MomentsUpload(added_up(sent.sums), added_up(sent.gram))


def ridge(G: Tensor, S: Tensor, lam: float) -> Tensor:
    """W with (G + lam I) W' = S', [C, D]."""
    regular = G + lam * torch.eye(len(G), dtype=G.dtype, device=G.device)
    W: Tensor = torch.linalg.solve(regular, S.T).T
    return W


@register("fed3r")
class Fed3R(SecondMoments[MomentsUpload], FineTuned[MomentsUpload]):
    """One exchange: sites send class sums and second moments, and the head is the ridge regression of all images."""

    paper = "Fanì et al., Accelerating Heterogeneous Federated Learning with Closed-Form Classifiers, ICML 2024"
    sends_up = "class means and counts, second moment, once; with finetune also weights of the head, sample count"
    readings = (
        "Features: here of length 1, so that lam means the same for every backbone.",
        "Random features: the paper's variant with random Fourier features is left out.",
        "Fine-tuning: the paper also trains the backbone; here the head alone (finetune), from the computed one.",
    )

    lam: NonNegative = knob("ridge: added to the diagonal of the second moment", default=0.01)

    def packed(self, sent: Moments, net: Net, at: At) -> MomentsUpload:
        """With fine-tuning also the head."""
        if not self.finetune:
            return MomentsUpload(added_up(sent.sums), added_up(sent.gram))
        own = Mean(net.pick(head), self.weight(at))
        return MomentsAndHeadUpload(added_up(sent.sums), added_up(sent.gram), own)

    def closed_form(self, server: MomentsServer, at: At) -> tuple[Tensor, Tensor]:
        """(G + lam I)^-1 S', columns scaled to norm 1."""
        G = unpack_symmetric(server.total.gram.rows[0], at.dim)
        W = functional.normalize(ridge(G, server.total.sums.rows, self.lam), dim=1)
        return W, W.new_zeros(len(W))

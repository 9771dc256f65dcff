"""FedCGS: the Gaussian classifier with one covariance for all classes, from statistics that add up over sites.

Guan, Zhou, Gu. Capture Global Feature Statistics for One-Shot Federated Learning. AAAI 2025.
"""

import torch
from torch import Tensor

from protofed.closed_form.moments import MomentsServer, MomentsUpload, SecondMoments
from protofed.closed_form.sums import means_of
from protofed.method import At, NonNegative, knob
from protofed.registry import register
from protofed.verbs import unpack_symmetric


@register("fedcgs")
class FedCGS(SecondMoments[MomentsUpload]):
    """One exchange: sites send counts, class sums and second moments; the head is the pooled Gaussian classifier."""

    paper = "Guan et al., Capture Global Feature Statistics for One-Shot Federated Learning, AAAI 2025"
    sends_up = "class means and counts, second moment, once"
    readings = (
        "Features are scaled to length 1, so that gamma means the same for every backbone.",
        "Personal variant: the paper also trains each site's own features towards the statistics; left out.",
    )

    gamma: NonNegative = knob("added to the diagonal of the covariance", default=0.01)

    def closed_form(self, server: MomentsServer, at: At) -> tuple[Tensor, Tensor]:
        """m_c' Sigma^-1 h - m_c' Sigma^-1 m_c / 2 + log(n_c / N)."""
        means = means_of(server.total.sums)
        m, n = means.rows, means.count
        Sigma = pooled_covariance(unpack_symmetric(server.total.gram.rows[0], at.dim), m, n)
        regular = Sigma + self.gamma * torch.eye(at.dim, dtype=m.dtype)
        W = _solved(regular, m, self.gamma)
        prior = (n / n.sum().clamp(min=1)).clamp(min=1e-12).log()
        return W, prior - (W * m).sum(1) / 2


def _solved(regular: Tensor, m: Tensor, least: float) -> Tensor:
    """m Sigma^-1; noise may leave Sigma with directions of negative variance, of which none is then taken."""
    if not torch.linalg.cholesky_ex(regular).info:
        W: Tensor = torch.linalg.solve(regular, m.T).T
        return W
    variance, directions = torch.linalg.eigh(regular)
    solution: Tensor = (m @ directions / variance.clamp(min=max(least, 1e-12))) @ directions.T
    return solution


def pooled_covariance(G: Tensor, m: Tensor, n: Tensor) -> Tensor:
    """(G - sum n_c m_c m_c') / (N - C), over the classes that anybody has."""
    within = G - (m * n[:, None]).T @ m
    return within / (n.sum() - (n > 0).sum()).clamp(min=1)

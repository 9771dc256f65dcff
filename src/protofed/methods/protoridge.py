"""ProtoRidge: a centred ridge head from class sums and second moments, sent once and added up.

New here. The head is of Fed3R's family, centred and scaled so that neither the size of a class nor that of a site or
domain decides; sites choose its regularisation and temperature on heads made without them.
"""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from protofed.closed_form.tuning import TunedBySites
from protofed.method import At, knob
from protofed.models import Split
from protofed.models.unit_length import with_unit_features
from protofed.registry import register


@register("protoridge")
class ProtoRidge(TunedBySites):
    """One exchange: class sums and second moments add up to a centred ridge head in which classes and sites balance."""

    paper = "None: new here, after Fed3R and FedCGS"
    sends_up = "class means and counts, second moment (or a sketch, or none), once; with tune one number per candidate"
    sends_down = "weights of the head; with tune or rho also the sums of all sites"

    project: Annotated[int, Field(ge=0)] = knob(
        "dimensions to which features are brought by a random matrix known to all; 0: as they are", default=0
    )

    @property
    def depends_on_rounds(self) -> str:
        """Who needs the sums."""
        return "the last exchange is not followed by sums for the next"

    def build(self, base: Split, at: At) -> Split:
        """h = R phi(x) / |R phi(x)|, R a random matrix of the run's seed or the identity."""
        return with_unit_features(base, self.project or None, at.rng("projection"))

    def head_of(self, N: Tensor, S: Tensor, G: Tensor | None, lam: float) -> tuple[Tensor, Tensor]:
        """W = (Gc + lam tr(Gc)/D I)^-1 (S - N_c mu')' diag(N_c)^-1/2, b = -mu' W; without G (m_c - mu) / |m_c - mu|."""
        mu = S.sum(0) / N.sum().clamp(min=1e-300)
        centred = S - N[:, None] * mu
        if G is None:
            W = functional.normalize(centred, dim=1, eps=1e-300)
        else:
            Gc = G - N.sum() * torch.outer(mu, mu)
            W = solved(Gc, lam, centred) / torch.where(N > 0, N, 1.0).sqrt()[:, None]
        return W, -W @ mu


def solved(Gc: Tensor, lam: float, rows: Tensor) -> Tensor:
    """rows (Gc + lam tr(Gc)/D I)^-1; noise or a robust rule may leave Gc with directions of negative variance, of which
    none is then taken."""
    ridge = (lam * Gc.trace() / len(Gc)).clamp(min=1e-12)
    factor, failed = torch.linalg.cholesky_ex(Gc + ridge * torch.eye(len(Gc), dtype=Gc.dtype, device=Gc.device))
    if not failed:
        return torch.cholesky_solve(rows.T, factor).mT
    variance, directions = torch.linalg.eigh(Gc)
    solution: Tensor = (rows @ directions / (variance.clamp(min=0) + ridge)) @ directions.T
    return solution

"""ProtoRidge: a centred ridge head from class sums and second moments, sent once and added up.

New here. The head is of Fed3R's family, centred and scaled so that neither the size of a class nor that of a site or
domain decides; sites choose its regularisation and temperature on heads made without them.
"""

from math import log2
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

_FEWEST = 64
"""Dimensions to which noise may bring features at least."""


@register("protoridge")
class ProtoRidge(TunedBySites):
    """One exchange: class sums and second moments add up to a centred ridge head with balanced classes and sites."""

    paper = "None: new here, after Fed3R and FedCGS"
    sends_up = "class means and counts, second moment (or a sketch, or none), once; with tune one number per candidate"
    sends_down = "weights of the head; with tune or rho also the sums of all sites"

    project: Annotated[int, Field(ge=0)] | None = knob(
        "dimensions to which a random matrix known to all reduces the features; 0: no reduction; unset: no "
        "reduction, or under a guard's noise as many as keep the noise below the signal",
        default=None,
    )

    @property
    def depends_on_rounds(self) -> str:
        """Who needs the sums."""
        return "the last exchange is not followed by sums for the next"

    def build(self, base: Split, at: At) -> Split:
        """h = R phi(x) / |R phi(x)|, R a random matrix of the run's seed or the identity."""
        project = self._dimensions(base.dim, at) if self.project is None else self.project
        return with_unit_features(base, project or None, at.rng("projection"))

    def _dimensions(self, dim: int, at: At) -> int:
        """The largest power of 2 for which the noise of a class sum, of classes equally large, is no longer than that
        sum can be; 0: all there are."""
        if not at.noise:
            return 0
        longest = at.noised / at.classes
        most = longest**2 / self.noise_variance(at)
        return 0 if most >= dim else min(dim, max(_FEWEST, 2 ** int(log2(max(most, 1.0)))))

    def head_of(self, N: Tensor, S: Tensor, G: Tensor | None, lam: float, noise: float = 0.0) -> tuple[Tensor, Tensor]:
        """W = (Gc + lam tr(Gc)/D I)^-1 (S - N_c mu')' diag(N_c)^-1/2, b = -mu' W; without G (m_c - mu) / |m_c - mu|.

        Noise of a class sum is in mu, too, so without G their product has a mean that is not 0, and is taken out of b.
        """
        mu = S.sum(0) / N.sum().clamp(min=1e-300)
        centred = S - N[:, None] * mu
        if G is None:
            W = functional.normalize(centred, dim=1, eps=1e-300)
        else:
            Gc = G - N.sum() * torch.outer(mu, mu)
            W = solved(Gc, lam, centred) / torch.where(N > 0, N, 1.0).sqrt()[:, None]
        b = -W @ mu
        if G is None and noise:
            b = b + noise * S.shape[1] * (1 - len(N) * N / N.sum()) / (N.sum() * centred.norm(dim=1))
        return W, b


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

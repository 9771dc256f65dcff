"""Fed3R: ridge regression on frozen features, whose sufficient statistics add up over sites.

Fanì, Camoriano, Caputo, Ciccone. Accelerating Heterogeneous Federated Learning with Closed-Form Classifiers. ICML 2024.
"""

import torch
from torch import Tensor
from torch.nn import functional

from protofed.closed_form.moments import Moments, MomentsServer, MomentsUpload, SecondMoments
from protofed.closed_form.one_pass import FineTuned
from protofed.closed_form.sums import added_up
from protofed.method import At, NonNegative, knob
from protofed.models import head
from protofed.models.net import Net
from protofed.records import Mean, Weights
from protofed.registry import register
from protofed.verbs import unpack_symmetric


class MomentsAndHeadUpload(MomentsUpload):
    """The same, and a head that was trained on."""

    weights: Mean[Weights]


def ridge(G: Tensor, S: Tensor, lam: float) -> Tensor:
    """W with (G + lam I) W' = S', [C, D]."""
    regular = G + lam * torch.eye(len(G), dtype=G.dtype, device=G.device)
    W: Tensor = torch.linalg.solve(regular, S.T).T
    return W


@register("fed3r")
class Fed3R(SecondMoments[MomentsUpload], FineTuned[MomentsUpload]):
    """One exchange: sites send class sums and second moments, and the head is the ridge regression over all images."""

    paper = "Fanì et al., Accelerating Heterogeneous Federated Learning with Closed-Form Classifiers, ICML 2024"
    sends_up = "class means and counts, second moment, once; with finetune also weights of the head, sample count"
    readings = (
        "Features are scaled to length 1, so that lam means the same for every backbone.",
        "The paper's variant with random Fourier features is left out.",
        "Fine-tuning: the paper also trains the backbone; here only the head is trained (finetune), starting "
        "from the computed one.",
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

"""FedNCM: the head is made of class means, in one exchange and without training.

Legate, Bernier, Caccia, Oyallon, Belilovsky. Guiding the Last Layer in Federated Learning with Pre-Trained Models.
NeurIPS 2023.
"""

from torch import Tensor
from torch.nn import functional

from protofed.closed_form.one_pass import FineTuned, OnePassServer
from protofed.closed_form.sums import ClassSums, ClassSumsUpload, added_up
from protofed.method import At
from protofed.models import head
from protofed.models.net import Net
from protofed.records import Mean, Weights
from protofed.registry import register


class ClassSumsAndHeadUpload(ClassSumsUpload):
    """The same, and a head that was trained on."""

    weights: Mean[Weights]


@register("fedncm")
class FedNCM(FineTuned[ClassSumsUpload]):
    """One exchange: sites send class sums, and the rows of the head are the directions of the class means."""

    paper = "Legate et al., Guiding the Last Layer in Federated Learning with Pre-Trained Models, NeurIPS 2023"
    sends_up = "class means and counts, once; with finetune also weights of the head, sample count"
    readings = (
        "Features: the paper uses them as the backbone outputs them; here they are scaled to length 1, so that "
        "images count equally.",
        "Fine-tuning: the paper also trains the backbone; here only the head is trained (finetune), starting "
        "from the computed one.",
    )

    def packed(self, sent: ClassSums, net: Net, at: At) -> ClassSumsUpload:
        """With fine-tuning also the head."""
        if not self.finetune:
            return ClassSumsUpload(added_up(sent.sums))
        return ClassSumsAndHeadUpload(added_up(sent.sums), Mean(net.pick(head), self.weight(at)))

    def closed_form(self, server: OnePassServer, at: At) -> tuple[Tensor, Tensor]:
        """m_c / |m_c|, m_c = s_c / n_c."""
        W = functional.normalize(server.total.sums.rows, dim=1)
        return W, W.new_zeros(len(W))

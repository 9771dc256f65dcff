"""FedProc: from a contrast with global class means in early rounds to cross-entropy in late ones.

Mu, Shen, Cheng, Geng, Fu, Zhang, Zhang. FedProc: Prototypical Contrastive Federated Learning on Non-IID Data. Future
Generation Computer Systems 2023.
"""

from typing import Literal

from torch import Tensor, nn
from torch.nn import functional

from protofed.method import At, Method, Notes, Samples, Terms, Whole, knob
from protofed.methods.fedproto import ModelAndPrototypes, ModelAndPrototypeUpload
from protofed.models import Split, with_projection
from protofed.models.net import Net
from protofed.records import Mean, Record
from protofed.registry import register
from protofed.verbs import class_means, cross_entropy, info_nce


class _UnitLength(nn.Module):
    """Scales each feature vector to length 1."""

    def forward(self, h: Tensor) -> Tensor:
        """The same directions at length 1."""
        return unit(h)


def unit(h: Tensor) -> Tensor:
    """h / |h|."""
    return functional.normalize(h, dim=1, eps=1e-8)


@register("fedproc")
class FedProc(Method[ModelAndPrototypeUpload]):
    """A global model that first learns where its classes lie, by contrast with the class means of all clients, and
    gradually shifts to classifying them."""

    paper = "Mu et al., FedProc: Prototypical Contrastive Federated Learning on Non-IID Data, FGCS 2023"
    sends_up = "weights, sample count, class means and counts"
    sends_down = "weights, global class means"
    separable = True
    readings = (
        "Round 0: there are no class means yet; we use pure cross-entropy, as in the authors' code, not a zero loss.",
        "Schedule: the paper ramps over all rounds, the released code over 100 (ramp_rounds).",
        "Projection: the paper has one, the comparisons in other papers do not; we use none (projection).",
        "A class never seen: the authors' code uses a zero vector; we leave it out of the contrast.",
    )
    presets = {
        "authors": {"projection": "256", "ramp_rounds": 100},
    }

    ramp_rounds: Whole | None = knob(
        "rounds until the loss is only cross-entropy; unset: all rounds of the run", default=None
    )
    projection: Literal["none", "256"] = knob(
        "contrast the model's own features, or a projection of length 256", default="none"
    )

    def build(self, base: Split, at: At) -> Split:
        """Backbone -> Linear -> ReLU -> Linear -> unit length -> classifier, where a projection is wanted."""
        return base if self.projection == "none" else with_projection(base, int(self.projection), _UnitLength())

    def server_state(self, net: Net, at: At) -> ModelAndPrototypes:
        """The initial model, no class mean yet."""
        return ModelAndPrototypes(net.pick(), net.empty_table())

    def ce_share(self, at: At) -> float:
        """a_t = min(1, t / T), and 1 in round 0, which has no class means."""
        return min(1.0, at.round / (self.ramp_rounds or at.rounds)) if at.round else 1.0

    @property
    def depends_on_rounds(self) -> str:
        """a_t, unless ramp_rounds says over how many rounds it rises."""
        return "" if self.ramp_rounds else "the share of the cross-entropy rises over all rounds (ramp_rounds)"

    def observe(self, net: Net, x: Tensor, y: Tensor) -> Notes:
        """The feature of unit length, of which class means are made."""
        return {"h": unit(net.features(x)), "y": y}

    def loss(self, net: Net, x: Tensor, y: Tensor, at: At) -> tuple[Terms, Notes]:
        """L_t = a_t CE + (1 - a_t) L_con."""
        a = self.ce_share(at)
        h = net.features(x)
        return {
            "ce": a * cross_entropy(net.head(h), y),
            "con": (1 - a) * info_nce(h, at.down.G, y, tau=1.0),  # the cosine normalises h and G[k]
        }, {"h": unit(h), "y": y}

    def upload(self, net: Net, data: Samples, at: At) -> tuple[ModelAndPrototypeUpload, Record]:
        """The model and its class means."""
        observed = self.observations(net, data, at)
        P = class_means(observed["h"], observed["y"], at.classes)
        return ModelAndPrototypeUpload(Mean(net.pick(), self.weight(at)), Mean(P, P.count)), at.memory

    def aggregate(self, server: ModelAndPrototypes, total: ModelAndPrototypeUpload, at: At) -> ModelAndPrototypes:
        """Averaged weights; the exact means over all samples of all clients."""
        return ModelAndPrototypes(total.weights, self.refreshed(total.P, server.G))

"""ConfFedProto: prototypes weighted by the model's confidence in the true label.

Telila, Yogenthiran. Adaptive Confidence-Based Prototype Aggregation for Federated Prototype Learning on Non-IID Data.
2025.
"""

from typing import Literal

from torch import Tensor

from protofed.method import At, NonNegative, Notes, Samples, Terms, knob
from protofed.methods.fedproto import ExchangesPrototypes, Inference, PrototypeUpload
from protofed.models.net import Net
from protofed.records import Mean, Record
from protofed.registry import register
from protofed.verbs import class_means, cross_entropy, head_or_nearest, pull


@register("conffedproto")
class ConfFedProto(ExchangesPrototypes):
    """Personal models that exchange class means, with each sample weighted by the model's confidence in its label."""

    paper = (
        "Telila and Yogenthiran, Adaptive Confidence-Based Prototype Aggregation for Federated Prototype Learning, 2025"
    )
    sends_up = "confidence-weighted prototypes of the classes held, their counts"
    readings = (
        "B1: Eq. 2 divides by the count, which shrinks prototypes by the mean confidence; we follow the equation "
        "(conf_normaliser).",
        "B2: the text aligns raw embeddings, the released code confidence-scaled ones; we align scaled ones "
        "(align_on).",
        "B3: the paper does not say whether the confidence is a constant; it is not, as in the released code "
        "(conf_detach).",
        "B4: the released code pulls classes without a prototype to zero; we leave them out (missing_target).",
        "B5: Eq. 5 divides by all clients; we divide by the owners of the class.",
        "B6: the released code ramps lambda with t/T, the paper does not; we keep it constant (lambda_ramp).",
        "B8: the released code collects prototypes during training, with dropout; we use a clean pass afterwards "
        "(proto_pass).",
        "The paper does not say what makes the prediction; the client's own head does (inference).",
        "When it splits by label, the released code also distributes the official test images; we keep them "
        "apart (data.merge_test, preset authors).",
    )
    presets = {
        "authors": {
            "missing_target": "zero",
            "lambda_ramp": "linear",
            "proto_pass": "last_epoch",
            "data.merge_test": True,
        },
    }

    lam: NonNegative = knob("weight of the alignment with the global prototypes", default=0.5)
    conf_normaliser: Literal["count", "confidence"] = knob(
        "divide by the number of samples (Eq. 2) or by their confidence", default="count"
    )
    align_on: Literal["scaled", "raw"] = knob("align confidence-scaled or raw embeddings", default="scaled")
    conf_detach: bool = knob("treat the confidence as a constant in the alignment", default=False)
    missing_target: Literal["skip", "zero"] = knob(
        "for a class without a global prototype: no loss, or the zero vector", default="skip"
    )
    lambda_ramp: Literal["none", "linear"] = knob(
        "constant weight, or weight x t/T as in the released code", default="none"
    )
    inference: Inference = knob("predict with the head or by the nearest global prototype", default="head")

    @property
    def separable(self) -> bool:
        """A mean that is divided by confidences is no plain mean."""
        return self.conf_normaliser == "count"

    @property
    def depends_on_rounds(self) -> str:
        """lam, where it is ramped."""
        return "lam rises over all rounds (lambda_ramp=linear)" if self.lambda_ramp == "linear" else ""

    def observe(self, net: Net, x: Tensor, y: Tensor) -> Notes:
        """Features h, logits z and the confidence c in the true label."""
        h = net.features(x)
        z = net.head(h)
        return {"h": h, "z": z, "c": z.softmax(1).gather(1, y[:, None]), "y": y}  # c(x), [n, 1]

    def loss(self, net: Net, x: Tensor, y: Tensor, at: At) -> tuple[Terms, Notes]:
        """Cross-entropy and the distance to the global prototype."""
        observed = self.observe(net, x, y)
        c = observed["c"].detach() if self.conf_detach else observed["c"]
        e = c * observed["h"] if self.align_on == "scaled" else observed["h"]
        lam = self.lam * (at.round / at.rounds if self.lambda_ramp == "linear" else 1.0)
        return {
            "ce": cross_entropy(observed["z"], y),
            "align": lam * pull(e, at.down.G, y, missing=self.missing_target),  # Eq. 3, 4
        }, observed

    def upload(self, net: Net, data: Samples, at: At) -> tuple[PrototypeUpload, Record]:
        """Confidence-weighted class means."""
        observed = self.observations(net, data, at)
        h, c, y = observed["h"], observed["c"], observed["y"]
        if self.conf_normaliser == "count":
            P = class_means(c * h, y, at.classes)  # Eq. 2
        else:
            P = class_means(h, y, at.classes, weight=c[:, 0])
        return PrototypeUpload(Mean(P, 1.0)), at.memory  # Eq. 5: the plain mean over the owners of each class

    def predict(self, net: Net, x: Tensor, at: At) -> Tensor:
        """By the local head, or by the nearest prototype among the client's own classes."""
        return head_or_nearest(net, x, self.inference, at.down.G, at.held)

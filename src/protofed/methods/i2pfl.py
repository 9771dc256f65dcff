"""I2PFL: MixUp-augmented prototypes inside a client, distance-reweighted generalized prototypes on the server.

Le, Tun, Qiao, Nguyen, Kim, Hong. Mitigating Domain Shift in Federated Learning via Intra- and Inter-Domain Prototypes.
2025.
"""

from typing import Literal

import torch
from torch import Tensor

from protofed.method import At, Fraction, Method, NonNegative, Notes, Positive, Samples, Step, Terms, knob
from protofed.methods.fedproto import ModelAndPrototypes
from protofed.methods.fpl import SeparatePrototypeUpload
from protofed.models.net import Net
from protofed.records import ClassTable, Each, Mean, Record
from protofed.registry import register
from protofed.verbs import beta_draw, class_means, cross_entropy, ema, finch_centres, info_nce, pull, stack_tables


@register("i2pfl")
class I2PFL(Method[SeparatePrototypeUpload]):
    """A global model under domain shift: prototypes far from the mean of all domains count more, and features are
    pulled towards MixUp-augmented prototypes of their own domain."""

    paper = "Le et al., Mitigating Domain Shift in Federated Learning via Intra- and Inter-Domain Prototypes, 2025"
    sends_up = "weights, sample count, prototypes of the classes held, their counts"
    sends_down = "weights, generalized prototypes"
    readings = (
        "A1: Eq. 5 puts .99 on the new prototypes, the prose on the past ones; we follow the equation (ema_weight_on).",
        "A3: Eq. 9 has no batch mean; we use the mean squared error (apa_reduction).",
        "A4: the paper does not say whether the augmented prototype is a constant; here it is (apa_detach).",
        "A7: half of the mixed features are nearer to the other class; we follow the paper (mixup_fold).",
        "A5: the paper does not say whether the MixUp coefficient is drawn per batch or per sample; we draw it "
        "per sample (mixup_scope).",
        "A6: the paper does not say how the partner of another class is chosen; we draw it uniformly from the "
        "batch, and a sample without a partner is not mixed (mixup_partner).",
        "A8: Eq. 8 averages over all images of a client, Algorithm 1 over a batch; we average over the batch.",
        "A11: Eq. 3 divides by all clients; we divide by the owners of the class.",
        "Eq. 4: the squared distance reverses a majority of domains instead of balancing it; we follow the "
        "equation (reweight_power).",
        "Stability: the contrast multiplies gradients by 1 / tau, and the alignment grows with the square of the "
        "features, so without batch normalisation a single large step can end all learning. The paper's networks "
        "have batch normalisation, and it clips nothing; here the gradient norm is clipped to 5 (clip), except "
        "in the paper's presets.",
        "The paper does not say what makes the prediction; the head does.",
    )
    presets = {
        "digits": {"tau": 0.07, "alpha": 0.4, "lambda_intra": 10.0, "clip": 0.0},
        "office_caltech10": {"tau": 0.02, "alpha": 0.4, "lambda_intra": 10.0, "clip": 0.0},
        "pacs": {"tau": 0.04, "alpha": 0.2, "lambda_intra": 2.0, "clip": 0.0},
    }

    tau: Positive = knob("temperature of the contrast with the generalized prototypes", default=0.07)
    alpha: Positive = knob("MixUp coefficients are drawn from Beta(alpha, alpha)", default=0.4)
    lambda_intra: NonNegative = knob("weight of the alignment with augmented prototypes", default=10.0)
    lambda_inter: NonNegative = knob("weight of the contrast with generalized prototypes", default=1.0)
    ema: bool = knob("smooth the generalized prototypes over rounds", default=True)
    ema_beta: Fraction = knob("the EMA's beta", default=0.99)
    ema_weight_on: Literal["new", "past"] = knob(
        "whether beta multiplies the new or the past prototypes", default="new"
    )
    reweight_power: Positive = knob("power of the distance in Eq. 4; 1 balances two domains exactly", default=2.0)
    global_proto: Literal["reweight", "mean", "finch"] = knob(
        "how clients' prototypes are combined (Table 5)", default="reweight"
    )
    apa_source: Literal["feature_mixup", "input_mixup", "none"] = knob(
        "what augmented prototypes are made of (Table 6)", default="feature_mixup"
    )
    apa_reduction: Literal["mse_mean", "class_sum", "class_mean"] = knob("how Eq. 9 is reduced", default="mse_mean")
    apa_detach: bool = knob("treat augmented prototypes as constants", default=True)
    mixup_scope: Literal["sample", "batch"] = knob("one MixUp coefficient per sample or per batch", default="sample")
    mixup_partner: Literal["different", "any", "same"] = knob(
        "class of the sample that is mixed in", default="different"
    )
    mixup_fold: bool = knob("use max(gamma, 1 - gamma), so that the sample itself dominates", default=False)

    clip: NonNegative = knob("largest gradient norm of a step; 0: no clipping", default=5.0, before=0.0)

    @property
    def steps(self) -> tuple[Step, ...]:
        """One step on everything, of bounded length."""
        return (Step(clip=self.clip or None),)

    def server_state(self, net: Net, at: At) -> ModelAndPrototypes:
        """The initial model, no prototype yet."""
        return ModelAndPrototypes(net.pick(), net.empty_table())

    def draw(self, y: Tensor, at: At, rng: torch.Generator) -> dict[str, Tensor]:
        """gamma ~ Beta(alpha, alpha), and a lottery from which each sample takes its partner."""
        n = len(y)
        gamma = beta_draw(self.alpha, n if self.mixup_scope == "sample" else 1, rng).expand(n)
        return {
            "gamma": torch.maximum(gamma, 1 - gamma) if self.mixup_fold else gamma,
            "pick": torch.rand(n, n, generator=rng),
        }

    def loss(self, net: Net, x: Tensor, y: Tensor, at: At) -> tuple[Terms, Notes]:
        """Eq. 10."""
        h = net.features(x)
        return {
            "ce": cross_entropy(net.head(h), y),
            "intra": self.lambda_intra * self.alignment(h, self.mixed(net, x, h, y, at), y, at),  # Eq. 9
            "inter": self.lambda_inter * info_nce(h, at.down.G, y, self.tau),  # Eq. 6
        }, {"h": h, "y": y}

    def mixed(self, net: Net, x: Tensor, h: Tensor, y: Tensor, at: At) -> Tensor:
        """h~, each feature mixed with that of its partner."""
        if self.apa_source == "none":
            return h
        same = y[:, None] == y
        other = ~torch.eye(len(y), dtype=torch.bool, device=y.device)
        allowed = {"different": ~same, "any": other, "same": same & other}[self.mixup_partner]
        j = torch.where(allowed, at.draw["pick"].to(h.device), -1.0).argmax(1)
        alone = ~allowed.any(1)  # nobody to mix with: gamma = 1
        gamma = torch.where(alone, 1.0, at.draw["gamma"].to(h)).to(h.dtype)
        if self.apa_source == "feature_mixup":
            g = gamma[:, None]
            return g * h + (1 - g) * h[j]  # Eq. 7
        g = gamma[:, None, None, None]
        with net.quiet():
            return net.features(g * x + (1 - g) * x[j])

    def alignment(self, h: Tensor, mixed: Tensor, y: Tensor, at: At) -> Tensor:
        """L_APA, the distance between features and the augmented prototypes of their class."""
        p = class_means(mixed, y, at.classes)  # Eq. 8
        if self.apa_detach:
            p = ClassTable(p.rows.detach(), p.count)
        if self.apa_reduction == "mse_mean":
            return pull(h, p, y)
        if self.apa_reduction == "class_sum":
            distance = (h - p.rows[y]).pow(2).sum(1, keepdim=True)
            return class_means(distance, y, at.classes).rows.sum()
        return (class_means(h, y, at.classes).rows - p.rows).pow(2).sum()

    def upload(self, net: Net, data: Samples, at: At) -> tuple[SeparatePrototypeUpload, Record]:
        """The model and the mean feature of each class."""
        observed = self.observations(net, data, at)
        P = class_means(observed["h"], observed["y"], at.classes)  # Eq. 2
        return SeparatePrototypeUpload(Mean(net.pick(), self.weight(at)), Each(P)), at.memory  # one by one, for Eq. 4

    def aggregate(self, server: ModelAndPrototypes, total: SeparatePrototypeUpload, at: At) -> ModelAndPrototypes:
        """Averaged weights; generalized prototypes, smoothed over rounds."""
        G = self.generalized(list(total.P.values()))
        if self.ema:
            G = ema(G, server.G, self.ema_beta if self.ema_weight_on == "new" else 1 - self.ema_beta)  # Eq. 5
        return ModelAndPrototypes(total.weights, self.refreshed(G, server.G))

    def generalized(self, tables: list[ClassTable]) -> ClassTable:
        """g[k] from the prototypes of the clients that hold class k."""
        p, count = stack_tables(tables)  # [M, C, d], [M, C]
        has = (count > 0).to(torch.float64)
        holders = has.sum(0).clamp(min=1)
        exact = p.to(torch.float64)
        mu = exact.sum(0) / holders[:, None]  # Eq. 3
        if self.global_proto == "mean":
            g = mu
        elif self.global_proto == "finch":
            g = torch.stack(
                [finch_centres(exact[has[:, k] > 0, k]).mean(0) if has[:, k].any() else mu[k] for k in range(len(mu))]
            )
        else:
            d = (exact - mu).pow(2).sum(2).pow(self.reweight_power / 2) * has  # [M, C]
            w = torch.where(d.sum(0) > 0, d / d.sum(0).clamp(min=1e-300), has / holders)
            g = torch.einsum("mc,mcd->cd", w, exact)  # Eq. 4
        return ClassTable(g.to(p.dtype), count.sum(0))

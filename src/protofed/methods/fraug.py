"""FRAug: a shared generator and a private transformer make features of the client's own kind, to train the head on.

Chen, Frikha, Krompass, Gu, Tresp. FRAug: Tackling Federated Learning with Non-IID Features via Representation
Augmentation. ICCV 2023.
"""

from dataclasses import replace
from math import exp
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from protofed.method import At, Fraction, Method, NonNegative, Plan, Positive, Samples, Step, Terms, Whole, knob
from protofed.methods.fedavg import ModelUpload, SharedModel
from protofed.models import Group, Split, everything, part, running_statistics
from protofed.models.net import Net
from protofed.records import ClassTable, Mean, Record, Weights
from protofed.registry import register
from protofed.verbs import class_means, cross_entropy, ema, gaussian_mmd, joined, named_as, one_hot

Distance = Literal["mmd", "l2"]

_OWN_STATISTICS = running_statistics - part("generator", "transformer", "class_means")
"""Those of the task model."""


class _FRAugServer(Record):
    """What is broadcast, and the clients' mean running statistics where they are collected."""

    shared: SharedModel
    stats: Weights
    complete: bool
    """Whether the task model can be used as the server has it."""


class Generator(nn.Module):
    """Gen(z, y): features of no particular domain."""

    def __init__(self, noise: int, classes: int, dim: int) -> None:
        super().__init__()
        self.classes = classes
        self.layers = nn.Sequential(
            *(nn.Linear(noise + classes, dim), nn.BatchNorm1d(dim), nn.ReLU()),
            *(nn.Linear(dim, dim), nn.BatchNorm1d(dim), nn.ReLU()),
        )

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        """Features of classes y from noise z."""
        return self.layers(torch.cat([z, one_hot(y, self.classes, z)], 1))  # type: ignore[no-any-return]


class _Transformer(nn.Module):
    """Tr(u, r, y): the client's real features r, moved in a direction that generated features u suggest."""

    def __init__(self, noise: int, classes: int, dim: int) -> None:
        super().__init__()
        self.classes = classes
        self.layers = nn.Sequential(
            *(nn.Linear(dim + classes, noise), nn.BatchNorm1d(noise), nn.ReLU()),
            *(nn.Linear(noise, dim), nn.BatchNorm1d(dim)),
        )

    def forward(self, u: Tensor, r: Tensor, y: Tensor) -> Tensor:
        """r + MLP(u, y)."""
        return r + self.layers(torch.cat([u, one_hot(y, self.classes, u)], 1))  # type: ignore[no-any-return]


class ClassMeans(nn.Module):
    """m[k], the client's mean features: in training mode they follow the batches as running statistics do."""

    m: Tensor

    def __init__(self, classes: int, dim: int, rho: float) -> None:
        super().__init__()
        self.rho = rho
        self.register_buffer("m", torch.zeros(classes, dim))

    def forward(self, h: Tensor, y: Tensor) -> Tensor:
        """m after m[k] <- (1 - rho) m[k] + rho x mean of h, for the classes in the batch."""
        if self.training:
            past = ClassTable(self.m, torch.ones_like(self.m[:, 0]))
            moved = ema(class_means(h.detach(), y, len(self.m)), past, self.rho)
            self.m.copy_(moved.or_else(past).rows)
        return self.m


@register("fraug")
class FRAug(Method[ModelUpload]):
    """Partly personal models for clients whose images differ: the head also learns from generated features that a
    private transformer has fitted to the client's domain."""

    paper = (
        "Chen et al., FRAug: Tackling Federated Learning with Non-IID Features via Representation Augmentation, "
        "ICCV 2023"
    )
    sends_up = (
        "weights without running statistics, generator, sample count; with global_bn=mean also the running statistics"
    )
    sends_down = "weights without running statistics, generator"
    readings = (
        "The released code calls mini-batches epochs; here epochs are epochs (local_unit).",
        "The mean of a class the client has never seen is the zero vector, as in the released code.",
        "A global model needs the mean of the clients' running statistics, which the method does not send. With "
        "global_bn=mean they are sent up, but no client ever loads them; with none there is no global model.",
        "The generator's running statistics are sent with it, as in the released code for Digits and PACS.",
        "Optimisers are reset in every round, as everywhere here; the released code keeps them (preset authors).",
    )
    presets = {
        "authors": {"local_unit": "steps", "persist_optimizer": True},
        "digits": {
            "gamma": 0.002,
            "lambda_generator": 1.0,
            "interpolate": False,
            "generator_distance": "l2",
            "transformer_distance": "mmd",
        },
    }

    rho: Fraction = knob("how fast the class means follow the batches", default=0.3)
    gamma: NonNegative = knob("how slowly generated features gain weight: r_t = exp(gamma (t - T))", default=0.01)
    lr_generator: Positive = knob("learning rate of the generator", default=0.05)
    lr_transformer: Positive = knob("learning rate of the transformer", default=0.05)
    lambda_generator: NonNegative = knob("weight of the generator's distance from real features", default=10.0)
    lambda_transformer: NonNegative = knob("weight of the transformer's closeness to real features", default=1.0)
    noise_dim: Whole | None = knob("dimension of the noise z; unset: half the feature dimension", default=None)
    local_unit: Literal["epochs", "steps"] = knob(
        "whether the run's local epochs are epochs or mini-batches", default="epochs"
    )
    interpolate: bool = knob("mix generated features with real ones in the ratio r_t to 1 - r_t", default=True)
    generator_distance: Distance = knob(
        "from the batch's features, or squared error from the class mean", default="mmd"
    )
    transformer_distance: Distance = knob(
        "squared error to, or discrepancy from, the transformed features", default="l2"
    )

    global_bn: Literal["mean", "none"] = knob(
        "also collect the mean running statistics, for a global model", default="none"
    )

    @property
    def shares(self) -> Group:
        """The task model without running statistics, and the whole generator; m is a running statistic too."""
        return everything - running_statistics - part("transformer") + part("generator")

    @property
    def uploads(self) -> Group:
        """What the server averages."""
        return self.shares + _OWN_STATISTICS if self.global_bn == "mean" else self.shares

    @property
    def steps(self) -> tuple[Step, ...]:
        """Task model, generator, transformer, in this order."""
        return (
            Step("loss", everything - part("generator", "transformer")),
            Step("generator_loss", part("generator"), lr=self.lr_generator),
            Step("transformer_loss", part("transformer"), lr=self.lr_transformer),
        )

    def plan(self, plan: Plan) -> Plan:
        """The user's, in the unit chosen."""
        return replace(plan, unit=self.local_unit)

    def build(self, base: Split, at: At) -> Split:
        """The model with generator, transformer and class means beside it."""
        noise = self.noise(base.dim)
        base.attach("generator", Generator(noise, base.classes, base.dim))
        base.attach("transformer", _Transformer(noise, base.classes, base.dim))
        base.attach("class_means", ClassMeans(base.classes, base.dim, self.rho))
        return base

    def noise(self, dim: int) -> int:
        """d_z."""
        return self.noise_dim or max(1, dim // 2)

    def server_state(self, net: Net, at: At) -> _FRAugServer:
        """The initial task model and generator."""
        complete = self.global_bn == "mean" or not net.names(_OWN_STATISTICS)
        return _FRAugServer(SharedModel(net.pick(self.shares)), net.pick(self.uploads - self.shares), complete)

    def broadcast(self, server: _FRAugServer, at: At) -> SharedModel:
        """What is shared."""
        return server.shared

    def schedule(self, at: At) -> tuple[float, float]:
        """r_t = exp(gamma (t - T)), and w_t = min(0.5, r_t)."""
        r = exp(self.gamma * (at.round - at.rounds))
        return r, min(0.5, r)

    @property
    def depends_on_rounds(self) -> str:
        """r_t."""
        return "the weight of generated features rises towards the last round"

    def ce_share(self, at: At) -> float:
        """1 - w_t."""
        return 1 - self.schedule(at)[1]

    def draw(self, y: Tensor, at: At, rng: torch.Generator) -> Tensor:
        """Noise z, uniform in [0, 1], for each time that a step generates features."""
        return torch.rand(5, len(y), self.noise(at.dim), generator=rng)

    def loss(self, net: Net, x: Tensor, y: Tensor, at: At) -> Terms:
        """Task step: real features, and generated ones as constants, so that these train the head only."""
        r, w = self.schedule(at)
        h = net.features(x)
        m = net.call("class_means", h, y)
        generated = []
        with torch.no_grad(), net.eval():
            for z, (real, label) in zip(at.draw[:2].to(h), sources(h, y, m), strict=True):
                u = net.call("transformer", net.call("generator", z, label), real, label)
                generated.append((r * u + (1 - r) * real if self.interpolate else u, label))
        return {
            "ce": (1 - w) * cross_entropy(net.head(h), y),
            "made": w * _mean_of([cross_entropy(net.head(u), label) for u, label in generated]),
        }

    def generator_loss(self, net: Net, x: Tensor, y: Tensor, at: At) -> Terms:
        """Generator step: features the head recognises, as far from the real ones as can be."""
        h, m = constant_features(net, x, y)
        label = cyclic(y, at.classes)
        u = net.call("generator", at.draw[2].to(h), label)
        distance = gaussian_mmd(u, h) if self.generator_distance == "mmd" else mse_loss(u, m[label])
        return {
            "generator": cross_entropy(net.head(u), label),
            "generator_distance": -self.lambda_generator * distance,
        }

    def transformer_loss(self, net: Net, x: Tensor, y: Tensor, at: At) -> Terms:
        """Transformer step: features the head is unsure of, as close to the real ones as can be."""
        h, m = constant_features(net, x, y)
        apart = gaussian_mmd if self.transformer_distance == "mmd" else mse_loss
        entropies, distances = [], []
        for z, (real, label) in zip(at.draw[3:].to(h), sources(h, y, m), strict=True):
            with torch.no_grad(), net.eval():
                u = net.call("generator", z, label)
            moved = net.call("transformer", u, real, label)
            entropies.append(entropy(net.head(moved)))
            distances.append(apart(moved, real))
        return {
            "transformer_entropy": -_mean_of(entropies),
            "transformer_distance": self.lambda_transformer * _mean_of(distances),
        }

    def upload(self, net: Net, data: Samples, at: At) -> tuple[ModelUpload, Record]:
        """The trained model; transformer, class means and, as a rule, running statistics stay with the client."""
        return ModelUpload(Mean(net.pick(self.uploads), self.weight(at))), at.memory

    def aggregate(self, server: _FRAugServer, total: ModelUpload, at: At) -> _FRAugServer:
        """The weighted mean."""
        shared, stats = (named_as(like, total.weights) for like in (server.shared.weights, server.stats))
        return replace(server, shared=SharedModel(shared), stats=stats)

    def global_weights(self, server: _FRAugServer) -> Weights | None:
        """The task model, where it is complete."""
        return joined(server.shared.weights, server.stats) if server.complete else None


def cyclic(y: Tensor, classes: int) -> Tensor:
    """y' = 0, 1, ..., K - 1, 0, ...: as many balanced labels as the batch has samples."""
    return torch.arange(len(y), device=y.device) % classes


def sources(h: Tensor, y: Tensor, m: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """What features are generated from, (r', y'): A, class means with balanced labels; B, the batch itself."""
    label = cyclic(y, len(m))
    return (m[label], label), (h, y)


def constant_features(net: Net, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """The batch's features h and the class means m once more, as constants; no statistic moves."""
    with torch.no_grad(), net.quiet():
        h = net.features(x)
    with net.eval():
        return h, net.call("class_means", h, y)


def entropy(logits: Tensor) -> Tensor:
    """H(softmax(logits)), mean over the batch."""
    return -(logits.softmax(1) * logits.log_softmax(1)).sum(1).mean()


def _mean_of(values: list[Tensor]) -> Tensor:
    """Over the sources A and B."""
    return torch.stack(values).mean()

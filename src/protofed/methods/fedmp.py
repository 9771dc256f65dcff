"""FedMP: classifiers see other clients' embeddings, extractors are drawn to common prototypes; and its few-shot form.

Zhou, Liu, Zhou, Liu, Yang, Zhu, Luo. FedMP: Tackling Medical Feature Heterogeneity in Federated Learning from a
Manifold Perspective. 2025.
"""

import logging
from collections.abc import Iterable
from dataclasses import replace
from math import ceil, prod
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from protofed.errors import UserError
from protofed.method import At, FeatureTraffic, Fraction, Method, Notes, Plan, Samples, Terms, epochs_in, knob
from protofed.models import Split, model_names
from protofed.models.net import Net
from protofed.records import ClassTable, Each, Features, Mean, Record, Weights
from protofed.registry import register
from protofed.verbs import class_means, cosine, cross_entropy, ema, stack_tables

log = logging.getLogger("protofed")

BANK_BYTES = 512 * 2**20
"""Largest bank of embeddings on the server: one embedding of stage 1 of a ResNet-50 at 256 pixels takes 4 MB."""


class FedMPServer(Record):
    """The model, the latest embeddings of every client, their smoothed class centres, and the class prototypes."""

    weights: Weights
    bank: dict[str, Features]
    zbar: dict[str, ClassTable]
    p: ClassTable


class FedMPBroadcast(Record):
    """The model, the prototypes, and a sample U of other clients' embeddings."""

    weights: Weights
    p: ClassTable
    U: Features


class FedMPUpload(Record):
    """A client's model, and the embeddings of its last epoch, which the server hands on one by one."""

    weights: Mean[Weights]
    U: Each[Features]


@register("fedmp")
class FedMP(Method[FedMPUpload]):
    """A global model under feature skew: the part of the network after `stage` also learns from other clients'
    embeddings (SFMC), the part before it aligns features with global class prototypes (cPGMA)."""

    ce_term = "local"
    paper = "Zhou et al., FedMP: Tackling Medical Feature Heterogeneity in FL from a Manifold Perspective, 2025"
    sends_up = "weights, sample count, embeddings of single samples with their labels"
    sends_down = "weights, class prototypes, a sample of other clients' embeddings with their labels"
    readings: ClassVar[tuple[str, ...]] = (
        "D1: the loss of Eq. 8 is negative, and so is its weight in Eq. 1, which would push features away from "
        "the prototypes; we use the absolute weight (cpgma_weight).",
        "Eq. 1 always equals the local loss times a constant; the log shows each part before weighting.",
        "D2: without prototypes or embeddings, as in the first round, the two added terms are zero.",
        "D3: prototypes start from zero in the paper, from their first value here (proto_init). Eq. 7 divides by "
        "all clients; we divide by the owners of the class.",
        "D4: Eq. 6 is written for a batch; we apply it once per round to the mean of a client's embeddings of "
        "the class.",
        "D5: the paper does not say how many embeddings are sent (upload_per_client, download_per_client).",
        "D6: the paper does not say how many enter a step; we use one batch, in a separate pass (sfmc_bn).",
        "D7: a client's embeddings date from its last upload, which replaces earlier ones.",
    )
    presets = {
        "authors": {"persist_optimizer": True},
        "as_printed": {"cpgma_weight": "literal", "proto_init": "zero"},
    }

    stage: Annotated[int, Field(ge=1, le=4)] = knob(
        "stage after which embeddings are taken; 4: the model's features", default=4
    )
    sfmc: bool = knob(
        "train the classifier on other clients' embeddings (stochastic feature manifold completion)", default=True
    )
    cpgma: bool = knob(
        "turn features towards the class prototypes (class-prototype guided manifold alignment)", default=True
    )
    cpgma_weight: Literal["abs", "one_minus_cos", "literal"] = knob(
        "weight of the alignment: its absolute value, the number of classes minus the cosines, or the printed sign",
        default="abs",
    )
    mu_client: Fraction = knob("weight of the new values in a client's class centres", default=0.5)
    mu_server: Fraction = knob("weight of the new values in the class prototypes", default=0.7)
    proto_init: Literal["first", "zero"] = knob(
        "centres and prototypes start from their first value or from zero", default="first"
    )
    upload_per_client: Annotated[int, Field(ge=1)] = knob(
        "maximum number of embeddings a client sends per round", default=512
    )
    download_per_client: Annotated[int, Field(ge=0)] = knob(
        "maximum number of other clients' embeddings a client receives", default=128
    )
    sfmc_bn: Literal["separate", "shared"] = knob(
        "others' embeddings pass through the classifier separately, or in one batch with the client's own",
        default="separate",
    )
    proto_pass: Literal["extra_eval", "last_epoch"] = knob(
        "embeddings as seen during the last epoch, or from a clean pass after training", default="last_epoch"
    )

    @property
    def cut(self) -> str | None:
        """The stage of the model that ends the extractor F; None: where the model itself cuts."""
        return None if self.stage == 4 else f"layer{self.stage}"

    def build(self, base: Split, at: At) -> Split:
        """The same model, once it is known to have the stage and the bank to hold its embeddings."""
        if self.cut not in (None, *base.stage_names):
            having = ", ".join(name for name in model_names() if name.startswith(("efficientnet", "resnet")))
            raise UserError(
                f"stage={self.stage}: this model has no stage {self.cut}; use stage=4, or a model of {having}"
            )
        like = next(base.parameters()).new_empty(0, *base.feature_shape(at.image_shape, self.cut))
        if (room := self.room(like, at)) < self.upload_per_client:
            log.warning(
                "clients send at most %d embeddings instead of %d: the server's bank is limited to %d MB",
                *(room, self.upload_per_client, BANK_BYTES // 2**20),
            )
        return base

    def room(self, like: Tensor, at: At) -> int:
        """How many embeddings such as `like` one client may upload."""
        each = prod(like.shape[1:]) * like.element_size()
        return min(self.upload_per_client, max(1, BANK_BYTES // (each * len(at.clients))))

    def server_state(self, net: Net, at: At) -> FedMPServer:
        """The initial model; no embedding and no prototype yet."""
        like = next(iter(net.params().values())).detach()
        shape = net.model.feature_shape(at.image_shape, self.cut)
        none = Features(like.new_zeros(0, *shape), torch.zeros(0, dtype=torch.long, device=like.device), at.classes)
        empty = ClassTable.empty(at.classes, prod(shape), like)
        return FedMPServer(net.pick(), dict.fromkeys(at.clients, none), dict.fromkeys(at.clients, empty), empty)

    def broadcast(self, server: FedMPServer, at: At) -> FedMPBroadcast:
        """With embeddings drawn uniformly, without replacement, from the other clients' bank."""
        sizes = [len(U.labels) if self.sfmc and client != at.client else 0 for client, U in server.bank.items()]
        mask = torch.zeros(sum(sizes), dtype=torch.bool)
        mask[torch.randperm(len(mask), generator=at.rng("broadcast"))[: self.download_per_client]] = True
        parts = zip(server.bank.values(), torch.split(mask, sizes), strict=True)
        picked = [(U, part.nonzero()[:, 0]) for U, part in parts]
        rows = torch.cat([U.rows[pick] for U, pick in picked])
        labels = torch.cat([U.labels[pick] for U, pick in picked])
        return FedMPBroadcast(server.weights, server.p, Features(rows, labels, at.classes))

    def draw(self, y: Tensor, at: At, rng: torch.Generator) -> dict[str, Tensor]:
        """One batch of the received embeddings; and which of the client's own to keep for its upload.

        An epoch visits samples in random order, so the first few of every batch are a uniform sample: there is no need
        to hold more embeddings than will be sent.
        """
        received = torch.randperm(len(at.down.U.labels), generator=rng)[: at.plan.batch]
        if len(received) == 1 and self.drop_singleton_batch:
            received = received[:0]
        return {"received": received, "keep": torch.arange(len(y))[: ceil(self.quota(at) * len(y) / at.size)]}

    def quota(self, at: At) -> int:
        """How many embeddings this client sends this round."""
        return self.room(at.down.U.rows, at)

    def traffic(self, at: At) -> FeatureTraffic:
        """Embeddings go both ways; without SFMC clients receive none."""
        return FeatureTraffic(self.quota(at), self.download_per_client if self.sfmc else 0)

    def loss(self, net: Net, x: Tensor, y: Tensor, at: At) -> tuple[Terms, Notes]:
        """Eq. 1."""
        h = net.features(x, self.cut)  # F(x)
        received, keep = (at.draw[name].to(h.device) for name in ("received", "keep"))
        own, foreign = self.scores(net, h, at.down.U.rows[received])
        l_local = cross_entropy(own, y)
        terms = {"local": l_local}
        if self.sfmc:
            terms["sfmc"] = balanced(self.completion(foreign, at.down.U.labels[received]), l_local)
        if self.cpgma:
            terms["cpgma"] = balanced(self.alignment(h, y, at.down.p), l_local, self.cpgma_weight == "literal")
        return terms, {"u": h[keep], "y": y[keep]}

    def scores(self, net: Net, h: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """H of the client's own embeddings and of the received ones, if there are any."""
        if len(u) == 0 or not self.sfmc:
            own = net.head(h, self.cut)
            return own, own[:0]
        if self.sfmc_bn == "separate":
            return net.head(h, self.cut), net.head(u, self.cut)
        own, foreign = torch.split(net.head(torch.cat([h, u]), self.cut), [len(h), len(u)])
        return own, foreign

    def completion(self, scores: Tensor, y: Tensor) -> Tensor:
        """Eq. 5, as a mean: Eq. 1 removes any constant factor."""
        return cross_entropy(scores, y, reduction="sum") / max(len(y), 1)

    def alignment(self, h: Tensor, y: Tensor, p: ClassTable) -> Tensor:
        """Eq. 8: minus the mean cosine of each class with its prototype, summed over the classes of the batch."""
        own = cosine(h.flatten(1), p.rows).gather(1, y[:, None])
        mean = class_means(own, y, len(p.count))
        both = mean.held & p.held
        cosines = (mean.rows[:, 0] * both).sum()
        return both.sum() - cosines if self.cpgma_weight == "one_minus_cos" else -cosines

    def observe(self, net: Net, x: Tensor, y: Tensor) -> Notes:
        """The embeddings."""
        return {"u": net.features(x, self.cut), "y": y}

    def upload(self, net: Net, data: Samples, at: At) -> tuple[FedMPUpload, Record]:
        """The model, and embeddings drawn uniformly without replacement."""
        observed = self.observations(net, data, at)
        u, y = observed["u"], observed["y"]
        pick = torch.randperm(len(y), generator=at.rng("embeddings"))[: self.quota(at)].to(y.device)
        U = Features(u[pick], y[pick], at.classes)
        return FedMPUpload(Mean(net.pick(), self.weight(at)), Each(U)), at.memory

    def aggregate(self, server: FedMPServer, total: FedMPUpload, at: At) -> FedMPServer:
        """Averaged weights; the bank renewed; centres and prototypes smoothed over rounds."""
        sent = {client: class_means(U.rows.flatten(1), U.labels, at.classes) for client, U in total.U.items()}
        none = ClassTable.empty(at.classes, server.p.rows.shape[1], like=server.p.rows)
        zbar = {
            client: self.smoothed(sent.get(client, none), old, self.mu_client)  # Eq. 6
            for client, old in server.zbar.items()
        }
        p = owners_mean(zbar.values(), [at.clients[client] for client in zbar])
        return FedMPServer(
            total.weights,
            {**server.bank, **total.U},
            zbar,
            self.smoothed(p, server.p, self.mu_server),  # Eq. 7
        )

    def smoothed(self, new: ClassTable, old: ClassTable, mu: float) -> ClassTable:
        """mu x new + (1 - mu) x old; a class seen for the first time is mixed with nothing, or with zero."""
        past = old if self.proto_init == "first" else ClassTable(old.rows, torch.ones_like(old.count))
        return self.refreshed(ema(new, past, mu), old)


@register("fedmp_fewshot")
class FewShotFedMP(FedMP):
    """FedMP in three long stages of local training: two exchanges of models, embeddings and prototypes, then a last
    exchange of models, whose predictions are averaged."""

    sends_up = "weights, sample count, embeddings of single samples with their labels (none after the last stage)"
    readings = (
        *FedMP.readings,
        "Few-shot: after the first exchanges, models are averaged and loaded; after the last, their predictions "
        "are averaged.",
        "Few-shot: prototypes are computed without a history (mu_client and mu_server are 1).",
    )
    ensembles = True

    epochs: str = knob(
        "epochs of local training before each exchange, instead of the run's", default="30,60,60", name="plan"
    )
    ensemble_weights: Literal["uniform", "size"] = knob(
        "whether clients' models count equally or by samples in the final prediction", default="uniform"
    )
    mu_client: Fraction = knob("weight of the new values in a client's class centres", default=1.0)
    mu_server: Fraction = knob("weight of the new values in the class prototypes", default=1.0)

    def plan(self, plan: Plan) -> Plan:
        """The method's own stages."""
        return replace(plan, epochs=epochs_in(self.epochs))

    def member_weight(self, at: At) -> float:
        """Equal, or by samples."""
        return float(at.size) if self.ensemble_weights == "size" else 1.0

    @property
    def depends_on_rounds(self) -> str:
        """Its stages."""
        return "its last stage sends no embeddings"

    def quota(self, at: At) -> int:
        """Embeddings sent with the final models would not be used."""
        return 0 if at.round == at.rounds - 1 else super().quota(at)


def balanced(term: Tensor, l_local: Tensor, literal: bool = False) -> Tensor:
    """The gradient of term x sg(l_local / |term|) of Eq. 1, or of the printed term x sg(l_local / term).

    The value is that of the term itself, so that the log shows how it develops: the product has that of l_local.
    """
    ratio = l_local / (term.abs() + 1e-8)
    weighted = term * (ratio * term.sign() if literal else ratio).detach()
    return weighted + (term - weighted).detach()


def owners_mean(tables: Iterable[ClassTable], sizes: Iterable[int]) -> ClassTable:
    """The mean over the clients that own a class, weighted by their sizes M_i."""
    rows, count = stack_tables(tables)  # [N, C, d], [N, C]
    M = torch.tensor(list(sizes), dtype=torch.float64, device=rows.device)[:, None] * (count > 0)
    mean = torch.einsum("nc,ncd->cd", M, rows.double()) / M.sum(0).clamp(min=1)[:, None]
    return ClassTable(mean.to(rows.dtype), count.sum(0))

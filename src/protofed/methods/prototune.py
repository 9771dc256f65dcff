"""ProtoTune: ProtoRidge, then a few rounds in which the last stages learn to put images where the prototypes of every
domain are; kept only if sites gain by it that were not trained on.

New here. The head is always computed from statistics, never trained. The prototypes of all domains as targets are an
idea of FPL and I2PFL, alignment is FedMP's, adapters are FedAdapterProto's; that rounds are judged by sites left out of
them is new.
"""

from collections.abc import Mapping
from dataclasses import field, replace
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from protofed.closed_form.moments import Moments, MomentsUpload
from protofed.closed_form.rotation import Turn, fold_of, rotation
from protofed.closed_form.sums import added_up, doubled, means_of
from protofed.closed_form.tuning import RidgeDown, RidgeServer
from protofed.errors import UserError
from protofed.method import At, Fraction, NonNegative, Plan, Positive, Samples, Step, SumSensitivity, Terms, Whole, knob
from protofed.methods.i2pfl import I2PFL
from protofed.methods.protoridge import ProtoRidge
from protofed.models import Split, everything, head
from protofed.models.adapters import with_adapters
from protofed.models.net import Net
from protofed.models.unit_length import HEAD
from protofed.records import ClassTable, Nothing, Record, Sum, Weights
from protofed.registry import register
from protofed.verbs import NEVER, cosine, cross_entropy


class TrainedRow(ClassTable):
    """All trained numbers of a model in one row, which travels only where there was training."""

    rows: Tensor = field(metadata={"kind": "weights"})


class TuneDown(RidgeDown):
    """The model, the class means of every domain, and how many rounds of training sites like best."""

    kept: Tensor


class TuneServer(RidgeServer):
    """The same, the model as training found it, and how sites that stayed out scored: right answers and images after
    every round of training, [folds, rounds + 1, 2].
    """

    shared: TuneDown
    start: Weights
    scores: Tensor


class TuneUpload(MomentsUpload):
    """Statistics, trained stages or a score: whatever the exchange is for."""

    trained: Sum[TrainedRow]
    score: Sum[Tensor]


_MIXUP = I2PFL(apa_reduction="class_sum")
"""Features have length 1 here, so squared distances are not divided by their dimensions."""


@register("prototune")
class ProtoTune(ProtoRidge):
    """ProtoRidge with its last stages (--train) trained against all domains' prototypes, if left-out sites gain."""

    paper = "None: new here, after ProtoRidge, FPL and I2PFL"
    sends_up = "class means and counts, second moment; trained weights; numbers of correct answers on its own images"
    sends_down = "trained weights, head, class means of every domain"
    run_defaults = {"optimizer": "adam", "lr": 3e-4}
    trains_backbone = True
    trained_stages = "stages=2"
    shares = everything
    steps = (Step(trains=everything - head),)

    balance: Literal["none", "domain", "site"] = knob("images, domains or sites count equally", default="domain")
    refine: Whole = knob("maximum number of training rounds", default=3)
    folds: Whole = knob(
        "groups of sites that are left out in turn and score; 1: none is left out, all rounds count", default=3
    )
    target: Literal["prototypes", "head", "both", "alignment"] = knob(
        "what the stages are trained against: prototypes of all domains, the computed head, both, or the own class's "
        "prototypes alone, without contrast (FedMP)",
        default="prototypes",
    )
    tau: Positive = knob("temperature of prototypes and head", default=0.1)
    mixup: NonNegative = knob("weight of the pull towards MixUp prototypes of the site's own images (I2PFL)", default=0)
    server_lr: Fraction = knob("how far the stages move towards the mean of what sites have trained", default=1.0)
    adapters: Annotated[int, Field(ge=0, le=4)] = knob(
        "adapters behind this many of the last stages (FedAdapterProto); with --train head nothing else is trained",
        default=0,
    )
    reduction: Whole = knob("ratio of a stage's channels to its adapter's channels", default=4)

    def build(self, base: Split, at: At) -> Split:
        """With stages to train, and nothing that ProtoRidge does after its one exchange."""
        if self.gram == "sketch" or self.tune != "none" or self.rho:
            raise UserError(
                "prototune needs statistics that add up (gram=full or none), and supports neither tune nor rho"
            )
        if self.adapters:
            base = with_adapters(base, reduction=self.reduction, kernel=1, init="zero_up", last=self.adapters)
        model = super().build(base, at)
        if not (everything - head).names(model):
            raise UserError("prototune trains stages before the head; use --train last, or stages=N")
        return model

    def plan(self, plan: Plan) -> Plan:
        """Statistics and training in turn: without each fold of sites, then with all."""
        epochs = {"statistics": 0, "training": plan.epochs[0], "scores": 0}
        return replace(plan, epochs=tuple(epochs[turn.part] for turn in self._turns))

    @property
    def separable(self) -> bool:
        """Stages are trained on prototypes in which every image has a part."""
        return False

    def sum_sensitivity(self, unit: Literal["sample", "client"], bound: float, at: At) -> Mapping[str, SumSensitivity]:
        """Training is not covered."""
        raise UserError("guard: noise covers the sums of protoridge, but not training; use protoridge")

    # At a site

    def sits_out(self, at: At) -> bool:
        """Its fold is to score what the others train; or sites liked a model best that is trained already."""
        turn = self._turn(at)
        if turn.fold is None:
            return turn.trained >= int(at.down.kept)
        return self._judges(at)

    def draw(self, y: Tensor, at: At, rng: torch.Generator) -> dict[str, Tensor]:
        """What MixUp needs."""
        return _MIXUP.draw(y, at, rng) if self.mixup else {}

    def loss(self, net: Net, x: Tensor, y: Tensor, at: At) -> Terms:
        """-log softmax of cos(h, p) / tau at the prototypes p of the own class, in the mean over all domains' ones; or
        the cross-entropy of the head, its rows scaled to the length 1 / tau; or both; or 1 - cos(h, p) alone.
        """
        h, terms = net.features(x), {}
        if self.target in ("prototypes", "both"):
            terms["prototypes"] = contrast(h, at.down.sums, y, at.classes, self.tau)
        if self.target in ("head", "both"):
            W, b = _linear(net)
            terms["ce"] = cross_entropy((h @ W.T + b) / (self.tau * W.norm(dim=1).mean()), y)
        if self.target == "alignment":
            terms["alignment"] = own_class(1 - cosine(h, at.down.sums.rows), at.down.sums, y, at.classes).mean()
        if self.mixup:
            terms["mixup"] = self.mixup * _MIXUP.alignment(h, _MIXUP.mixed(net, x, h, y, at), y, at)
        return terms

    def upload(self, net: Net, data: Samples, at: At) -> tuple[TuneUpload, Record]:
        """What the exchange is for."""
        turn, judges = self._turn(at), self._judges(at)
        # After the last round that counts nothing changes, so there is nothing to tell.
        over = turn.fold is None and turn.trained > int(at.down.kept)
        tells = turn.part == "statistics" and not judges and not over
        sent = self.statistics(net, data, at) if tells else self.no_statistics(net, at)
        scores = judges and turn.part != "statistics"
        trained = turn.part == "training" and not self.sits_out(at)
        row = flattened(net.pick(everything - head), float(at.size) if trained else 0.0)
        upload = TuneUpload(
            added_up(sent.sums),
            added_up(sent.gram),
            Sum(row, row.count.double()),
            Sum(self._score(net, data, at) if scores else torch.zeros(2), 1.0),
        )
        return upload, at.memory

    def client_state(self, net: Net, at: At) -> Record:
        """Nothing: what was trained cannot be taken back."""
        return Nothing()

    def _score(self, net: Net, data: Samples, at: At) -> Tensor:
        """Right answers, and images."""
        h, y = self.rows(net, data, at)
        W, b = _linear(net)
        return torch.stack([((h @ W.T + b).argmax(1) == y).sum(), torch.tensor(len(y))]).float()

    # At the server

    def server_state(self, net: Net, at: At) -> TuneServer:
        """The initial model, a head of zeros, nothing added up yet."""
        nobody = self.no_moments(net, at)
        chosen = torch.tensor([self.lam, 1.0], dtype=torch.float64)
        kept = torch.tensor(self.refine)
        down = TuneDown(net.pick(), nobody.sums, ClassTable.empty(0, 1, nobody.gram.rows), chosen, kept)
        return TuneServer(
            down,
            Weights({}, {}),
            doubled(nobody),
            net.pick(everything - head),
            torch.zeros(self.folds, self.refine + 1, 2, dtype=torch.float64),
        )

    def aggregate(self, server: Any, total: Any, at: At) -> Any:
        """A head and prototypes from statistics, the mean of what was trained, or the choice that scores make."""
        turn, n = self._turn(at), float(total.trained.count.sum())
        if total.sums.count.any():
            server = self.with_head(replace(server, total=Moments(total.sums, total.gram)), at)
            means = means_of(server.total.sums)
            like = server.shared.sums.rows
            prototypes = ClassTable(means.rows.to(like), means.count.to(like))
            server = replace(server, shared=replace(server.shared, sums=prototypes))
        if n:
            mean, old = total.trained.rows[0] / n, flattened(self._stages(server), n).rows[0]
            moved = torch.lerp(old.to(mean), mean, self.server_lr)
            server = self._with_stages(server, restored(moved, server.start))
        if turn.fold is not None and turn.part != "statistics":
            scores = server.scores.clone()
            scores[turn.fold, turn.trained] = total.score
            server = replace(server, scores=scores)
        if turn.part == "scores":
            kept = torch.tensor(most_liked(server.scores))
            server = self._with_stages(replace(server, shared=replace(server.shared, kept=kept)), server.start)
        return server

    def forget(self, server: Any, memory: Any, at: At) -> Any:
        """What stages have learnt from a site cannot be taken out of them."""
        raise UserError(
            "its stages were trained, and what they learnt from a site stays in them; run again without the site"
        )

    def _stages(self, server: TuneServer) -> Weights:
        weights, start = server.shared.weights, server.start
        return Weights(
            {name: weights.params[name] for name in start.params}, {name: weights.stats[name] for name in start.stats}
        )

    def _with_stages(self, server: TuneServer, stages: Weights) -> TuneServer:
        weights = server.shared.weights
        merged = Weights({**weights.params, **stages.params}, {**weights.stats, **stages.stats})
        return replace(server, shared=replace(server.shared, weights=merged))

    # Whose turn it is

    @property
    def _turns(self) -> tuple[Turn, ...]:
        return rotation(self.folds if self.folds > 1 else 0, self.refine)

    def _turn(self, at: At) -> Turn:
        return self._turns[min(at.round, len(self._turns) - 1)]

    def _judges(self, at: At) -> bool:
        fold = self._turn(at).fold
        return fold is not None and at.client is not None and fold_of(at.client, self.folds, at) == fold


def contrast(h: Tensor, prototypes: ClassTable, y: Tensor, classes: int, tau: float) -> Tensor:
    """-log softmax of cos(h, p) / tau, in the mean over the prototypes p of the own class.

    The table has the rows of one domain after the other, `classes` each.
    """
    logits = (cosine(h, prototypes.rows) / tau).masked_fill(~prototypes.held, NEVER)
    return -own_class(logits.log_softmax(1), prototypes, y, classes).mean()


def own_class(values: Tensor, prototypes: ClassTable, y: Tensor, classes: int) -> Tensor:
    """Values [n, m] in the mean over the prototypes of each sample's own class, [n]; 0 where it has none."""
    held = prototypes.held
    own = held & (torch.arange(len(held), device=y.device) % classes == y[:, None])
    return (values * own).sum(1) / own.sum(1).clamp(min=1)


def _linear(net: Net) -> tuple[Tensor, Tensor]:
    """W and b of the head, as they are."""
    params = net.pick(head).params
    return params[f"{HEAD}.weight"].detach(), params[f"{HEAD}.bias"].detach()


def most_liked(scores: Tensor) -> int:
    """After how many rounds of training the folds that stayed out are right most often, in their mean; of
    equals the fewest. Folds in which nobody scored do not count.
    """
    scored = scores[scores[:, 0, 1] > 0]
    return int((scored[..., 0] / scored[..., 1].clamp(min=1)).mean(0).argmax()) if len(scored) else 0


def flattened(weights: Weights, count: float) -> TrainedRow:
    """All tensors of a model in one row, held where `count` is not 0."""
    row = torch.cat([tensor.detach().flatten() for tensor in weights.tensors().values()])
    return TrainedRow(row[None], row.new_tensor([count]))


def restored(row: Tensor, like: Weights) -> Weights:
    """The model of a row."""
    sizes = [tensor.numel() for tensor in like.tensors().values()]
    named = zip(like.tensors().items(), torch.split(row, sizes), strict=True)
    tensors = {name: part.view_as(tensor).to(tensor) for (name, tensor), part in named}
    return Weights({name: tensors[name] for name in like.params}, {name: tensors[name] for name in like.stats})

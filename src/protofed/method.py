"""What a method is. Read this first.

A method is a frozen dataclass: its fields are the paper's hyper-parameters, its hooks are pure functions. It owns no
state and never sees a loader, an optimiser, a device, a logger or test data. One object, `at`, holds all that a
hook may look at.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import cos, pi
from typing import Annotated, Any, ClassVar, Generic, Literal, Protocol, dataclass_transform

import torch
from pydantic import Field
from torch import Tensor
from typing_extensions import TypeVar

from protofed.errors import UserError
from protofed.models import Group, ImageShape, Split, everything, nothing
from protofed.models.net import Net
from protofed.records import ClassTable, Nothing, PrototypeSet, Record, Weights
from protofed.seeding import generator

Positive = Annotated[float, Field(gt=0)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Whole = Annotated[int, Field(ge=1)]

P = TypeVar("P", ClassTable, PrototypeSet)

U = TypeVar("U", bound=Record, default=Any)
"""The record that a method's clients upload."""

Terms = dict[str, Tensor]
"""The terms of a loss by name, already weighted: their sum is minimised, each is logged."""

Notes = dict[str, Tensor]
"""Per-sample values that a loss asks to keep, first dimension = batch."""


def _unguarded(notes: Notes) -> Notes:
    return notes


def knob(description: str, *, default: Any, name: str | None = None, before: Any = None) -> Any:
    """A hyper-parameter with a description and the paper's default.

    `name` is the user's name for it, if the field cannot have that name because a hook does. `before` is the value for
    runs that are older than this knob, if it is not the default.
    """
    named = {"name": name} if name else {}
    return field(default=default, metadata={"description": description, "before": before, **named})


def epochs_in(text: str) -> tuple[int, ...]:
    """The local epochs of every round, from text such as 30,60,60."""
    try:
        epochs = tuple(int(part) for part in text.split(","))
    except ValueError:
        epochs = ()
    if not epochs or min(epochs) < 1:
        raise UserError(f"plan={text} is not valid; give the epochs of each round, for example 30,60,60")
    return epochs


@dataclass(frozen=True)
class Plan:
    """How long and how a client trains: the local epochs of every round, and the optimiser."""

    epochs: tuple[int, ...]
    """0: an exchange without local training."""
    unit: Literal["epochs", "steps"] = "epochs"
    """What `epochs` counts: passes over the data, or batches."""
    batch: int = 32
    optimizer: Literal["sgd", "adam"] = "sgd"
    lr: float = 0.01
    momentum: float = 0.9
    weight_decay: float = 1e-5
    schedule: str = "none"
    """none | cosine | cosine=N"""

    @property
    def rounds(self) -> int:
        """Number of exchanges."""
        return len(self.epochs)

    def lr_at(self, round: int) -> float:
        """The learning rate of a round; the cosine falls from `lr` to 0 over the whole run, or over N rounds."""
        if self.schedule == "none":
            return self.lr
        _, _, rounds = self.schedule.partition("=")
        return self.lr * 0.5 * (1 + cos(pi * round / int(rounds or self.rounds)))


@dataclass(frozen=True)
class FeatureTraffic:
    """The features of single samples in a client's messages of one round, at most."""

    up: int = 0
    """Its own, in what it uploads."""
    down: int = 0
    """Those of other clients, uploaded in the round before, in what it receives."""


@dataclass(frozen=True)
class SumSensitivity:
    """What one unit (a sample, or all of a client's) can change of a `Sum` of a class table, and how a guard's noise is
    divided between its parts: shares of rho, in zero-concentrated differential privacy."""

    scale: float | Tensor = 1.0
    """The change of the rows divided by this, a number or one for each column, has norm 1 at most."""
    rows: float = 0.9
    """Share of the rows; all shares of an upload add up to 1."""
    count: float = 0.1
    """Share of the counts, which change by norm 1 at most; 0: they are not sent."""
    possible: Callable[[Tensor], Tensor] | None = None
    """The nearest rows that sums without noise can have."""


@dataclass(frozen=True)
class Step:
    """One optimiser step per batch: which loss it follows and what it trains."""

    loss: str = "loss"
    trains: Group = everything
    lr: float | None = None
    """None: the run's own, as with momentum."""
    momentum: float | None = None
    clip: float | None = None
    """Largest norm of the gradient."""


class Samples(Protocol):
    """A client's training samples, clean (not augmented) and in order."""

    y: Tensor

    @property
    def validation(self) -> "Samples | None":
        """The part of the client's own training data that is held out from training, if the run has one."""

    def batches(self, size: int = ...) -> Iterator[tuple[Tensor, Tensor]]:
        """Images and labels, batch by batch."""


@dataclass(frozen=True)
class At:
    """The context of a hook: the constants of the run, the round, the client, and what it received and remembers.

    Every hook gets the same object, filled in as far as applies. Rounds count from 0 as in the papers.
    """

    plan: Plan
    classes: int
    dim: int
    clients: Mapping[str, int]
    """Training samples of every client of the federation, also of those that sit this round out."""
    domains: Mapping[str, str] = field(default_factory=dict)
    """The domain of every client."""
    image_shape: ImageShape = (1, 1, 1)
    seed: int = 0
    round: int = 0
    participants: tuple[str, ...] = ()
    """In `aggregate`: the clients whose uploads arrived, in canonical order."""
    client: str | None = None
    down: Any = None
    """The message received this round."""
    memory: Any = None
    """What this client remembers from its last round."""
    start: Weights = field(default_factory=lambda: Weights({}, {}))
    """The model as the round began, after the broadcast was loaded."""
    held: Tensor = field(default_factory=lambda: torch.zeros(0))
    """Samples of each class this client holds, [C]."""
    draw: Any = None
    """This step's chance, as `draw` made it."""
    notes: Notes = field(default_factory=dict)
    """What the loss asked to keep, over the whole last epoch."""
    taken: int = 0
    """In `upload`: optimiser steps done."""
    reach: float | None = None
    """In `upload`: how far a unit gradient would have moved a weight (lr x a_i); None under Adam."""
    guarded: Callable[[Notes], Notes] = _unguarded
    """In `upload`: per-sample values as the run's guard lets the upload see them (clipped, sub-sampled)."""
    noise: float = 0.0
    """Deviation of a guard's noise on a `Sum` over clients, in units of what one sample or client changes, if it were
    the only number; more by the square root of its share where it has but a share of the budget (`SumSensitivity`)."""
    noised: float = 0.0
    """How many samples, or clients where they are the unit, such a sum is of, as they count in it."""

    @property
    def rounds(self) -> int:
        """Number of rounds of the run."""
        return self.plan.rounds

    @property
    def size(self) -> int:
        """Training samples of this client."""
        return self.clients[self.client] if self.client is not None else 0

    @property
    def lr(self) -> float:
        """This round's learning rate."""
        return self.plan.lr_at(self.round)

    def rng(self, purpose: str) -> torch.Generator:
        """A generator for one purpose in this client and round."""
        return generator(self.seed, purpose, self.round, self.client)


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(knob,))
@dataclass(frozen=True, kw_only=True)
class Method(Generic[U]):
    """Base of all methods; subclasses become frozen dataclasses automatically.

    A subclass gives `loss`, `upload` and `aggregate`, and whatever else differs from the defaults here. It names the
    record its clients upload, as in `class FedAvg(Method[ModelUpload])`, so that a type checker knows what `aggregate`
    may read.
    """

    paper: ClassVar[str] = ""
    """Authors, title, venue."""
    sends_up: ClassVar[str] = "nothing"
    sends_down: ClassVar[str] = "nothing"
    readings: ClassVar[tuple[str, ...]] = ()
    """Where the paper is silent or contradicts itself, and what is done here."""
    presets: ClassVar[Mapping[str, Mapping[str, object]]] = {}
    """Named sets of hyper-parameters, such as a paper's values for one data set.

    A key `data.NAME` is a setting of the data that holds where images are dealt out by label.
    """

    run_defaults: ClassVar[Mapping[str, Any]] = {}
    """Options of a run that it wants where the user names none: batch, optimizer, lr, momentum, weight_decay, schedule.
    """
    pools_data: ClassVar[bool] = False
    """One client holds everybody's data and nothing travels (the upper bound)."""
    trained_stages: ClassVar[str] = "head"
    """What --train is on a pretrained network where the user does not say."""
    trains_backbone: ClassVar[bool] = True
    """Whether --train decides what is trained; otherwise the method has a rule of its own."""
    validation_share: ClassVar[float] = 0.0
    """Part of each client's training data kept for validation unless the user says otherwise."""
    ce_term: ClassVar[str] = "ce"
    """The term of the loss that is the cross-entropy on the client's own images, which all methods have in common."""
    ensembles: ClassVar[bool] = False
    """The last exchange is not averaged: the clients' models predict together."""
    not_vectorised: ClassVar[str] = ""
    """Why its loss cannot be computed for many clients at once (engine vmap); empty where it can."""

    weighting: Literal["samples", "uniform"] = knob("weight of a client in averages of weights", default="samples")
    proto_pass: Literal["extra_eval", "last_epoch"] = knob(
        "compute local prototypes in a clean pass after training, or from features seen during the last epoch",
        default="extra_eval",
    )
    stale_protos: Literal["keep", "drop"] = knob(
        "what happens to a prototype that nobody sent this round", default="keep"
    )
    persist_optimizer: bool = knob("keep momentum and moments between rounds instead of resetting them", default=False)
    drop_singleton_batch: bool = knob(
        "skip a trailing batch of one sample, which breaks batch normalisation", default=True
    )

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        dataclass(frozen=True, kw_only=True)(cls)

    # What travels and what is trained; a class attribute of the same name will do

    @property
    def shares(self) -> Group:
        """Which part of the model is sent, as `weights` in broadcast and upload; the rest is private to the client."""
        return everything

    @property
    def loads(self) -> Group:
        """Which part of the broadcast replaces the client's own weights when a round begins."""
        return self.shares

    @property
    def steps(self) -> tuple[Step, ...]:
        """The optimiser steps on each batch, in order."""
        return (Step(),)

    @property
    def freezes_statistics(self) -> bool:
        """Whether normalisation that no step trains keeps its running statistics during training."""
        return True

    @property
    def starts_from_means(self) -> bool:
        """Whether clients send their class means once before round 1, as the start of the server's model."""
        return False

    @property
    def separable(self) -> bool:
        """Whether one sample's contribution can be bounded, which a guard needs for any guarantee.

        The loss is a mean over samples, each by itself; the upload knows the samples only through the trained weights
        and through plain class means of `observations` (or of vectors no longer than those).
        """
        return False

    def sum_sensitivity(self, unit: Literal["sample", "client"], bound: float, at: At) -> Mapping[str, SumSensitivity]:
        """Of every `Sum` of class tables in the upload, where no row of `observations` is longer than `bound`.

        For a client the guard scales all it sends by one factor, such that no part exceeds its norm. Raises UserError
        where a setting leaves it unbounded.
        """
        return {}

    @property
    def cut(self) -> str | None:
        """The stage after which exchanged features and prototypes are taken; None: where the model itself cuts."""
        return None

    def traffic(self, at: At) -> FeatureTraffic:
        """How many features of single samples are sent in a round; `at.down` is an example of what clients receive."""
        return FeatureTraffic()

    def cautions(self, each: Sequence[At], classes: Sequence[str]) -> list[str]:
        """Warnings for the user before the first round; one `at` for each client, with what it holds."""
        return []

    # What is built before the first round

    def plan(self, plan: Plan) -> Plan:
        """The plan this method follows if the user asks for `plan`."""
        return plan

    def build(self, base: Split, at: At) -> Split:
        """The model to train, made from the one the user chose."""
        return base

    def server_state(self, net: Net, at: At) -> Record:
        """The server's state before the first round; its structure never changes."""
        return Nothing()

    def client_state(self, net: Net, at: At) -> Record:
        """A client's memory before its first round."""
        return Nothing()

    # One round, in the order it happens

    def broadcast(self, server: Any, at: At) -> Record:
        """What is sent to `at.client` (None: to a newcomer)."""
        return server  # type: ignore[no-any-return]

    def weights_for(self, client: str, down: Any) -> Weights:
        """The weights in a broadcast that are meant for this client; those of `loads` replace its own."""
        weights: Weights = down.weights
        return weights

    def sits_out(self, at: At) -> bool:
        """Whether a client does not train in a round in which others do; it still sends what `upload` returns."""
        return False

    def draw(self, y: Tensor, at: At, rng: torch.Generator) -> Any:
        """All the randomness of one batch, handed to `loss` as `at.draw`."""
        return None

    def loss(self, net: Net, x: Tensor, y: Tensor, at: At) -> Terms | tuple[Terms, Notes]:
        """The terms whose sum is minimised, and optionally per-sample notes to keep from the last epoch."""
        raise TypeError(f"{type(self).__name__} must define loss(net, x, y, at)")

    def upload(self, net: Net, data: Samples, at: At) -> tuple[U | Nothing, Record]:
        """What the client sends (a record of `Mean` and `Each` fields), and what it will remember.

        Weights are new values of the broadcast's field of that name, or else of its `weights`; fields that are changes
        instead are listed in the record's `changes`.
        """
        return Nothing(), at.memory

    def aggregate(self, server: Any, total: U, at: At) -> Record:
        """The server's next state; `total` is an upload with its Means averaged and its Eaches as {client: value}."""
        return server  # type: ignore[no-any-return]

    def forget(self, server: Any, memory: Any, at: At) -> Record:
        """The server's state as if `at.client`, whose memory this is, had never sent anything; the others remain as
        `at.participants`.
        """
        raise UserError("its state is not a sum over clients, so no client's share can be subtracted")

    def include(self, server: Any, memory: Any, at: At) -> Record:
        """The server's state as if `at.client`, whose memory this is, had sent its part with the others; all of them
        are `at.participants`.
        """
        raise UserError("its state is not a sum over clients, so nothing can be added")

    def memory_of(self, upload: Any, like: Any) -> Record:
        """The memory of a client that has sent this upload, a record such as `like`; for `forget` and `include` if
        the client's memory is elsewhere."""
        raise UserError("its state is not a sum over clients, so no client's share can be recovered from an upload")

    # What comes out

    def global_weights(self, server: Any) -> Weights | None:
        """The server's complete model, or None if every client keeps its own."""
        return server.weights if self.shares == everything else None

    def client_weights(self, server: Any, upload: Any, at: At) -> Weights:
        """One client's complete model, from its upload as it was sent; ensembles are made of these."""
        base, own = self.global_weights(server), upload.weights.value
        return own if base is None else Weights({**base.params, **own.params}, {**base.stats, **own.stats})

    def member_weight(self, at: At) -> float:
        """How much a client's model counts in an ensemble, relative to the others."""
        return 1.0

    def global_prototypes(self, server: Any) -> ClassTable | None:
        """The server's class prototypes, or None if the method has none."""
        return next((value for value in vars(server).values() if isinstance(value, ClassTable)), None)

    @property
    def depends_on_rounds(self) -> str:
        """What depends on the number of rounds, so that a run cannot be extended; empty: nothing.

        Whoever reads `at.rounds` says so here.
        """
        return ""

    def ce_share(self, at: At) -> float:
        """The weight of the cross-entropy term in a round's loss; the displayed loss is without it."""
        return 1.0

    def predict(self, net: Net, x: Tensor, at: At) -> Tensor:
        """Class probabilities of a batch."""
        return net(x).softmax(1)

    # Verbs that depend on the knobs every method has

    @property
    def kind(self) -> Literal["global", "personal", "both"]:
        """Whether clients use the server's model, each its own, or one that is partly shared.

        What is not loaded but never trained either is the same everywhere.
        """
        if self.loads == everything or all(step.trains == self.loads for step in self.steps):
            return "global"
        return "personal" if self.loads == nothing else "both"

    @property
    def predicts_alike(self) -> bool:
        """Whether clients with the same model and message predict the same, so that one is scored for all."""
        return type(self).predict is Method.predict

    @property
    def keeps_notes(self) -> bool:
        """Whether the trainer should keep the notes of the last epoch."""
        return self.proto_pass == "last_epoch"

    def weight(self, at: At) -> float:
        """This client's weight in an average of weights."""
        return float(at.size) if self.weighting == "samples" else 1.0

    def largest_weight(self, at: At) -> float:
        """The largest weight this client's upload can honestly have; a client that claims more is left out."""
        return max(self.weight(at), 1.0)

    def observe(self, net: Net, x: Tensor, y: Tensor) -> Notes:
        """What the method needs from every sample; prototypes are built from it."""
        return {"h": net.features(x), "y": y}

    def observations(self, net: Net, data: Samples, at: At) -> Notes:
        """`observe` over the client's training set: in one clean pass, or as the last epoch saw it."""
        if self.keeps_notes and at.notes:
            return at.guarded(at.notes)
        with torch.no_grad(), net.eval():
            observed = [self.observe(net, x, y) for x, y in data.batches()]
        return at.guarded({key: torch.cat([notes[key] for notes in observed]) for key in observed[0]})

    def refreshed(self, new: P, old: P) -> P:
        """This round's prototypes; those that nobody sent are kept from before or dropped."""
        return new.or_else(old) if self.stale_protos == "keep" else new

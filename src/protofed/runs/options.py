"""The options of a run: one definition for the command line, for Python and for run.json."""

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from protofed.clients import FROZEN
from protofed.data import ReadOptions
from protofed.engines import ENGINES
from protofed.errors import UserError, unknown_name
from protofed.method import Plan, epochs_in
from protofed.metrics import ACCURACY, CHOICES
from protofed.models import LAYOUTS
from protofed.models.freezing import TRAIN
from protofed.registry import find_method, load_plugin
from protofed.settings import settings_below

WholeNumber = Annotated[int, Field(ge=1)]

PLANNED = frozenset({"batch", "optimizer", "lr", "momentum", "weight_decay", "schedule"})
"""Options that a method may have a say in, by its `run_defaults`."""

_NAMES = {"engine": ENGINES, "layout": LAYOUTS, "frozen": FROZEN, "metric": CHOICES}
"""Options that take one of these names."""


class Options(BaseModel):
    """Everything that decides what a run does. Names are those of the command line."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    method: str = Field("i2pfl", description="a method's name, or file.py:Class")
    data: str = Field("digits", description="a data set's name, a folder of DOMAIN.npz or class folders, or a manifest")
    data_root: str | None = Field(None, description=("the folder that contains data sets by name (or PROTOFED_DATA)"))
    domains: str | None = Field(None, description="use only these domains, for example mnist,usps")
    labels: str | None = Field(
        None, description='regroup classes: "0=healthy,1-4=diseased", or a csv file with the columns label and class'
    )
    test_share: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None,
        description=(
            "fraction that sites without test images hold out for testing, by patient if known (default: 0.2)"
        ),
    )
    group_by: str | None = Field(
        None, description=("which images stay together in a split: folder | none | a regular expression for file names")
    )
    pages: str | None = Field(None, description="for files with several pages: all | first | 1,3-5 (default: all)")
    protocol: str | None = Field(
        None,
        description="domains | equal=N | one-per-domain | leave-out=DOMAIN | dirichlet=0.3,clients=10 | iid=5 | "
        "shards=2,clients=10",
    )
    clients: str | None = Field(None, description="clients per domain, for example mnist=6,usps=4")
    fraction: str | None = Field(
        None, description=("fraction of its domain that a client holds: X, or mnist=.1,usps=.01")
    )
    samples_per_client: str | None = Field(
        None, description=("number of samples that a client holds: N, or mnist=600,usps=72")
    )
    balanced: bool = Field(False, description="sample every class equally often in training")
    image_size: WholeNumber | None = Field(None, description="resize all images to this side length")
    model: str | None = Field(
        None,
        description=(
            "the network, or several that clients take in turn: lenet5,cnn; default: one that fits the images"
        ),
    )
    weights: str | None = Field(
        None,
        description=("imagenet | none | a file (.safetensors or .pth) to start from; default: imagenet if available"),
    )
    train: str | None = Field(
        None, description=" | ".join(TRAIN) + ": what to train; the rest is frozen, computed once and never sent"
    )
    views: WholeNumber | None = Field(
        None, description=("number of augmented views per image that frozen parts compute once")
    )
    head: Literal["random", "closed-form"] = Field(
        "random", description="closed-form: the head starts from the clients' class means, sent once before round 1"
    )
    rounds: WholeNumber = Field(10, description="number of exchanges")
    epochs: WholeNumber = Field(1, description="local epochs per round")
    plan: str | None = Field(
        None, description="local epochs of each round, for example 30,60,60; replaces the two above"
    )
    ensemble: bool = Field(
        False, description=("do not average the last exchange: the clients' models predict as an ensemble")
    )
    batch: WholeNumber = Field(32, description="batch size")
    participation: float = Field(1.0, gt=0, le=1, description="fraction of the clients that train in a round")
    optimizer: Literal["sgd", "adam"] = Field(
        "sgd", description=("local optimiser, unless the method has its own default")
    )
    lr: float = Field(0.01, gt=0, description="local learning rate, unless the method has its own default")
    momentum: float = Field(0.9, ge=0, lt=1, description="momentum of sgd")
    weight_decay: float = Field(1e-5, ge=0, description="weight decay")
    schedule: str = Field(
        "none",
        description="learning rate over the rounds: none | cosine | cosine=N, which would reach 0 after N rounds",
    )
    stop_when_flat: WholeNumber | None = Field(
        None,
        description=(
            "stop when validation accuracy (or, without validation, training loss) has not improved for N rounds"
        ),
    )
    validation: float | None = Field(
        None,
        ge=0,
        lt=1,
        description=(
            "fraction of its training images that each client holds out to judge rounds; the best round is kept"
        ),
    )
    preset: str | None = Field(None, description="a named set of the method's hyper-parameters")
    set: dict[str, str] = Field(
        default_factory=dict, description="KEY=VALUE, a hyper-parameter of the method, or model.KEY, or data.KEY"
    )
    guard: str | None = Field(
        None, description="clip and noise uploads, for example clip=1.0,noise=0.5 (see docs/guards.md)"
    )
    robust: str | None = Field(
        None, description="median | trimmed=0.2 | norm-bound=1 | krum=0.2: instead of the mean over clients"
    )
    max_share: float | None = Field(
        None, gt=0, lt=1, description="maximum weight of one client in a mean over clients, for example 0.3"
    )
    engine: str = Field("auto", description=" | ".join(ENGINES))
    workers: WholeNumber | None = Field(None, description="number of processes of the workers engine")
    device: str = Field("cpu", description="cpu | cuda")
    dtype: Literal["float32", "float64"] = Field("float32", description="precision")
    autocast: bool = Field(False, description="compute losses and predictions in bfloat16 where that is safe")
    layout: str = Field("auto", description=" | ".join(LAYOUTS) + ": memory layout of the kernels")
    frozen: str = Field(
        "auto", description=" | ".join(FROZEN) + ": whether untrained parts are computed once per sample"
    )
    metric: str = Field(
        ACCURACY, description=" | ".join(CHOICES) + ": the metric for validation, comparisons and headlines"
    )
    seed: int = Field(0, description="the seed of all random numbers")
    evaluate_every: WholeNumber = Field(1, description="evaluate after every N rounds, and after the last")
    evaluate_local: bool = Field(False, description="also score clients' models right after local training")
    keep_messages: bool = Field(False, description="keep every upload as it was sent, for protofed audit")
    snapshot_rounds: str | None = Field(
        None,
        description=(
            "keep the state of server and clients after these rounds, for example 0,5,20; 0: before the first"
        ),
    )
    project: bool = Field(
        False, description=("at the end, clients move their part prototypes onto their own images (nothing is sent)")
    )
    plugin: list[str] = Field(default_factory=list, description="a Python file that registers methods, models or data")

    @field_validator("data_root")
    @classmethod
    def _one_name_for_a_place(cls, value: str | None) -> str | None:
        """A run that goes on from another folder must find its data, and is the same run."""
        return None if value is None else str(Path(value).expanduser().resolve())

    @field_validator("labels")
    @classmethod
    def _one_name_for_a_file(cls, value: str | None) -> str | None:
        """A file of labels is found from other folders, too."""
        return str(Path(value).expanduser().resolve()) if value and Path(value).expanduser().is_file() else value

    @field_validator("snapshot_rounds")
    @classmethod
    def _rounds_listed(cls, value: str | None) -> str | None:
        if value is not None and not all(part.strip().isdecimal() for part in value.split(",")):
            raise ValueError("give the rounds after which to keep the state, for example 0,5,20")
        return value

    @field_validator("schedule")
    @classmethod
    def _known_schedule(cls, value: str) -> str:
        if not re.fullmatch(r"none|cosine(=[1-9]\d*)?", value):
            raise ValueError("use none, cosine, or cosine=N, for example cosine=200")
        return value

    @field_validator(
        "domains",
        "clients",
        "fraction",
        "samples_per_client",
        "plan",
        "guard",
        "pages",
        "snapshot_rounds",
        mode="before",
    )
    @classmethod
    def _as_text(cls, value: object) -> object:
        """Python callers may give {"mnist": 6}, [30, 60] or 0.2 where the command line has text."""
        if isinstance(value, Mapping):
            return ",".join(f"{key}={item}" for key, item in value.items())
        if isinstance(value, list | tuple):
            return ",".join(str(item) for item in value)
        return str(value) if isinstance(value, int | float) else value

    @field_validator("set", mode="before")
    @classmethod
    def _as_settings(cls, value: object) -> object:
        """KEY=VALUE texts, or a dictionary with values of any kind."""
        if isinstance(value, Mapping):
            return {key: str(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return dict(_key_and_value(str(item)) for item in value)
        return value

    @field_validator("plugin", mode="before")
    @classmethod
    def _as_list(cls, value: object) -> object:
        return [value] if isinstance(value, str) else value

    @field_validator(*_NAMES)
    @classmethod
    def _known_name(cls, value: str, info: ValidationInfo) -> str:
        name = str(info.field_name)
        if value not in _NAMES[name]:
            raise unknown_name(name, value, _NAMES[name])
        return value

    def settings_for(self, prefix: str) -> dict[str, str]:
        """The `--set` entries below `prefix.`, or without any prefix where it is empty."""
        return settings_below(prefix, self.set)

    def training_plan(self) -> Plan:
        """The epochs of every round and the optimiser."""
        return Plan(
            epochs=self._epochs(),
            batch=self.batch,
            optimizer=self.optimizer,
            lr=self.lr,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            schedule=self.schedule,
        )

    def reading(self) -> ReadOptions:
        """How image files are read."""
        own = self.settings_for("data")
        chosen = {"split_seed": int(own["split_seed"])} if "split_seed" in own else {}
        unreadable = {"unreadable": own["unreadable"]} if "unreadable" in own else {}
        return ReadOptions(self.test_share, self.group_by, self.pages, **chosen, **unreadable)  # type: ignore[arg-type]

    def snapshots(self) -> frozenset[int]:
        """The rounds after which a snapshot is kept."""
        return frozenset(int(part) for part in (self.snapshot_rounds or "").split(",") if part)

    def _epochs(self) -> tuple[int, ...]:
        return (self.epochs,) * self.rounds if self.plan is None else epochs_in(self.plan)


def make_options(given: Mapping[str, Any]) -> Options:
    """Options from what the user gave, completed by what the method wants where the user is silent.

    A mistake is a UserError that names the option.
    """
    for name in given:
        if name not in Options.model_fields:
            raise unknown_name("option", name, Options.model_fields)
    try:
        options = Options(**given)
        wanted = _wanted_by_method(options, given)
        return options.model_copy(update=wanted) if wanted else options
    except ValidationError as error:
        first = error.errors()[0]
        name = str(first["loc"][0])
        raise UserError(f"{name}={given[name]} is not valid: {_in_words(first)}") from None


def _wanted_by_method(options: Options, given: Mapping[str, Any]) -> dict[str, Any]:
    """What the method's `run_defaults` name and the user does not.

    A rate is made for an optimiser, so that it is not taken for another one. A method that does not exist is refused
    when it is made.
    """
    if given.keys() >= PLANNED:
        return {}
    with suppress(UserError):
        for plugin in options.plugin:
            load_plugin(plugin)
        wanted = find_method(options.method).run_defaults
        optimizer = wanted.get("optimizer", options.optimizer)
        fits = "optimizer" not in given or options.optimizer == optimizer
        return {name: value for name, value in wanted.items() if name not in given and (fits or name != "lr")}
    return {}


def _in_words(problem: Any) -> str:
    text = str(problem["msg"])
    return text[0].lower() + text[1:]


def _key_and_value(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (key and equals):
        raise UserError(f"--set takes KEY=VALUE, not {text!r}")
    return key.strip(), value.strip()

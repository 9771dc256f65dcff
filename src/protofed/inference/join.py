"""A newcomer: trained against what a finished federation would send it, until it is as good as the others.

Where the result is a sum over sites nothing is trained: its part is added (`addition`).
"""

import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from safetensors.torch import save

from protofed.clients import ClientSide, Evaluate, RunContext, Train, Trained, prepare
from protofed.errors import BadMessage, UserError
from protofed.inference.addition import AdditionResult, add_site
from protofed.method import Method
from protofed.models import Split, nothing
from protofed.models.net import Net
from protofed.records import Bytes, Message, decode
from protofed.runs.assembly import Assembly, assemble
from protofed.runs.network import network_of, restore_backbone
from protofed.runs.opened import OpenRun
from protofed.runs.options import Options, make_options
from protofed.system import one_thread, write_atomically

DEFAULT_ROUNDS = 20
_KEPT_DATA_SETTINGS = ("augment", "normalise", "validation")
_OF_THE_FEDERATION = (
    "data_root",
    "domains",
    "labels",
    "test_share",
    "group_by",
    "pages",
    "clients",
    "fraction",
    "samples_per_client",
    "plan",
    "snapshot_rounds",
)
"""Options of the run that say nothing about a newcomer."""


@dataclass(frozen=True)
class JoinRound:
    """How the newcomer did in one round."""

    round: int
    accuracy: float
    up: int
    down: int
    """Bytes of this round."""


@dataclass(frozen=True)
class JoinResult:
    """How a newcomer did: what it began with, the accuracy of those who took part, and its own rounds."""

    client: str
    start: str
    target: float
    rounds: tuple[JoinRound, ...]

    @property
    def reached(self) -> int | None:
        """The first round after which it was as good as the others."""
        return next((each.round for each in self.rounds if each.accuracy >= self.target), None)

    def as_dict(self) -> dict[str, Any]:
        """As join.json has it."""
        until = [each for each in self.rounds if self.reached is None or each.round <= self.reached]
        return {
            "client": self.client,
            "start": self.start,
            "target": self.target,
            "reached": self.reached,
            "bytes": {way: sum(getattr(each, way) for each in until) for way in ("up", "down")},
            "rounds": [asdict(each) for each in self.rounds],
        }


def join(
    run: str | Path,
    data: str,
    *,
    out: str | Path,
    rounds: int = DEFAULT_ROUNDS,
    model: str | None = None,
    weights: str | None = None,
    to_the_end: bool = False,
    tell: Callable[[JoinRound], None] | None = None,
    **own: Any,
) -> JoinResult | AdditionResult:
    """Train one more client, with its own images, against the broadcast of a complete run; stops when it is as good.

    Where the run's head was computed from sums over sites, the newcomer's are added instead, and `out` becomes the
    folder of a run in which it took part. Otherwise it begins with the global model where there is one; with `weights`,
    a backbone and a fresh head; with `model`, an architecture of its own, where nothing but prototypes is exchanged.
    With `to_the_end` it trains all rounds, so that newcomers can be compared after as many steps. `own` are further
    options, which go before those of the run.
    """
    folder = Path(out)
    if folder.exists():
        raise UserError(f"{folder} already exists; give another --out")
    host = OpenRun(run)
    with one_thread():
        options = _options(host, data, rounds, model, weights, own)
        assembly = assemble(options, folder / "clients")
        if weights is None and len(assembly.network.names) == 1:
            restore_backbone(assembly.network, assembly.context.models, host.run.path)
        _refuse_unfit(host, assembly)
        if type(host.method).include is not Method.include:
            return add_site(host, assembly, folder)
        target = _average_accuracy(host)
        context, message, start = _newcomer(host, assembly, fresh=weights is not None or model is not None)
        (folder / "clients").mkdir(parents=True)
        return _train(context, message, start, target, folder, to_the_end, tell)


def _average_accuracy(host: OpenRun) -> float:
    """The average accuracy of those who took part."""
    accuracy = host.run.summary["accuracy_final"]
    if accuracy is None:
        raise UserError(f"{host.run.path} diverged before a round was scored; there is nothing to join")
    view = accuracy["personal"] or accuracy["global"]
    return float(view["average"])


def _options(
    host: OpenRun, data: str, rounds: int, model: str | None, weights: str | None, own: dict[str, Any]
) -> Options:
    """The options of the run, on other data."""
    stored, config = host.run.options, host.config
    channels, height, width = config["data"]["image_shape"]
    if height != width:
        raise UserError(f"the run has images of {height}x{width}; a newcomer needs square ones")
    settings = {
        key: value
        for key, value in stored["set"].items()
        if not key.startswith("data.") or key.removeprefix("data.") in _KEPT_DATA_SETTINGS
    }
    network = network_of(config)
    names, own_network = network.names, model not in (None, network.names[0])
    options = {
        **stored,
        **dict.fromkeys(_OF_THE_FEDERATION),
        "data": data,
        "participation": 1.0,
        "rounds": rounds,
        "ensemble": False,
        "project": False,
        "keep_messages": False,
        "engine": "loop",
        "protocol": "one-per-domain",
        "image_size": height,
        # The others' architecture stays beside its own, so that features get the common length.
        "model": f"{model},{names[0]}" if own_network else names[0],
        "weights": weights if weights is not None or own_network else network.weights,
        "train": None if own_network else network.train,
        "views": None if own_network else stored.get("views"),
        **{name: value for name, value in own.items() if value is not None and name != "set"},
        "set": {**settings, "data.channels": str(channels), **make_options({"set": own.get("set") or {}}).set},
    }
    return make_options(options)


def _refuse_unfit(host: OpenRun, assembly: Assembly) -> None:
    """The newcomer is one client, with the classes of the others."""
    classes, context = tuple(host.config["data"]["classes"]), assembly.context
    if context.dataset.classes != classes:
        raise UserError(
            f"the newcomer has the classes {', '.join(context.dataset.classes)}, the run has {', '.join(classes)}; "
            "regroup them with --labels"
        )
    if len(context.partition.clients) != 1:
        names = ", ".join(context.dataset.domains)
        raise UserError(f"the data holds the domains {names}; a newcomer has one: pick it with --domains")
    if context.model.dim != host.config["model"]["dim"]:
        raise UserError(
            f"features of the newcomer's model have length {context.model.dim}, the prototypes of the run "
            f"{host.config['model']['dim']}; choose a model with features of that length, or one of the run's"
        )


def _newcomer(host: OpenRun, assembly: Assembly, fresh: bool) -> tuple[RunContext, Message, str]:
    """The newcomer's context, in which nothing replaces its own model any more, and what it is sent every round."""
    context, blob = assembly.context, host.broadcast()
    try:
        down: Any = decode(blob, assembly.prepared.templates.down, "broadcast")
    except BadMessage as problem:
        raise UserError(f"nobody can join this run: its broadcast does not fit a newcomer ({problem})") from None
    method = context.method
    model, start = context.models[0], "a fresh model" if assembly.weights is None else "the given weights"
    if not fresh and method.loads != nothing:
        model, start = _with_global_weights(model, context, down), "the global model"
    # It may have its own architecture only where weights are not averaged; the others' gave the feature length.
    alone = replace(context, models=(model,), method=_keeping_own_model(method))
    return alone, Message(blob, Bytes(other=len(blob))), start


def _with_global_weights(model: Split, context: RunContext, down: Any) -> Split:
    net, method = Net(deepcopy(model)), context.method
    (client,) = context.partition.clients
    net.load(method.weights_for(client, down), method.loads)
    return net.model


def _keeping_own_model(method: Method) -> Method:
    """The method of a client that goes on from its own model and ignores broadcast weights."""
    kept: type[Method] = type("Newcomer", (type(method),), {"loads": nothing, "__doc__": type(method).__doc__})
    return kept(**asdict(method))


def _train(
    context: RunContext,
    message: Message,
    start: str,
    target: float,
    folder: Path,
    to_the_end: bool,
    tell: Callable[[JoinRound], None] | None,
) -> JoinResult:
    (client,) = context.partition.clients
    context = replace(context, clients_folder=folder / "clients")
    side = ClientSide(prepare(context))
    rounds: list[JoinRound] = []
    for round in range(context.plan.rounds):
        trained = side.perform(Train(round, client), message)
        if not isinstance(trained, Trained):
            raise RuntimeError(f"the newcomer cannot train: {trained}")
        job = Evaluate("personal", round, client, context.partition.domain[client])
        weights, probabilities, right = side.examine(job, message)
        (folder / "clients" / f"{client}.round-{round}").replace(folder / "clients" / f"{client}.safetensors")
        accuracy = int((probabilities.argmax(1) == right).sum()) / max(len(right), 1)
        rounds.append(JoinRound(round + 1, accuracy, trained.size.total, message.size.total))
        write_atomically(folder / "model.safetensors", save(weights))
        if tell is not None:
            tell(rounds[-1])
        if accuracy >= target and not to_the_end:
            break
    result = JoinResult(client, start, target, tuple(rounds))
    write_atomically(folder / "join.json", json.dumps(result.as_dict(), indent=2).encode() + b"\n")
    return result

"""The one loader of run folders, for everything that uses a finished run.

`Run` reads what a run says about itself: configuration, rounds, summary, final model and prototypes. It also follows a
run that is going on. `CachedRun` reads each of these files once. `OpenRun` assembles the federation again and gives
everybody's model, state and messages as the last round, or a snapshot, left them. It needs nothing but the run folder:
not the training data, not the weights a backbone was started from. What needs images of the data set asks for them
(`with_data`).
"""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from protofed.clients import ClientState, ClientStore, Prepared, RunContext, Sources, Templates
from protofed.data.pixels import Pixels, pieces
from protofed.errors import BadMessage, UserError, unknown_name
from protofed.federation import RunFolder
from protofed.federation.best import BEST, BestRound
from protofed.federation.lock_holder import LockHolder
from protofed.federation.required import RUN_KEYS, SUMMARY_KEYS, require
from protofed.method import At, Method
from protofed.metrics import KeptPredictions
from protofed.models import Split, load_weights
from protofed.models.net import Net
from protofed.pages.drawing import Drawing
from protofed.pages.notebook import frame
from protofed.records import ClassTable, Features, Record, decode, decode_file
from protofed.runs.assembly import assemble, reassemble, reopened_options
from protofed.runs.display import What, draw_run, run_html, run_line, run_rows
from protofed.runs.older import unsaid_options, unsaid_settings
from protofed.runs.place import refuse_other_images

LAST = "last"
MODELS_OF = (LAST, BEST)
"""The rounds whose models a finished run has: the last, and the best where it was kept."""

GLOBAL = "global"
"""Instead of a client's name: the server's model."""

_PIXELS_AT_ONCE = 2**20
_CONFIG, _SUMMARY = "run.json", "summary.json"
_MODEL, _PROTOTYPES, _BROADCAST = "model.safetensors", "prototypes.safetensors", "broadcast.safetensors"


class Run:
    """One run folder: configuration, rounds, summary and model, read on demand, so that a run can be followed."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.folder = RunFolder(self.path)

    @property
    def config(self) -> dict[str, Any]:
        """run.json: everything resolved."""
        return self.folder.read_json(_CONFIG)

    @property
    def rounds(self) -> list[dict[str, Any]]:
        """The lines of rounds.jsonl."""
        return self.folder.rounds()

    @property
    def summary(self) -> dict[str, Any]:
        """summary.json, which exists once the run is complete."""
        self.refuse_unfinished()
        return self.folder.read_json(_SUMMARY)

    def predictions(self) -> KeptPredictions | None:
        """The last evaluation's predictions for every test image; None for a run that has not kept them."""
        return self.folder.predictions()

    @property
    def begun(self) -> bool:
        """Whether run.json is written."""
        return (self.path / _CONFIG).exists()

    @property
    def complete(self) -> bool:
        """Whether all rounds are done and the summary is written."""
        return (self.path / _SUMMARY).exists()

    def refuse_unfinished(self) -> None:
        """Raise unless the run is complete."""
        if not self.complete:
            raise UserError(f"the run in {self.path} is not complete; continue it with --resume")

    @cached_property
    def options(self) -> dict[str, Any]:
        """The options that repeat the run."""
        options = self.config.get("options")
        if not isinstance(options, dict):
            raise UserError(f"{self.path / _CONFIG} is damaged: it has no options")
        settings = {**unsaid_settings(self.config), **options.get("set", {})}
        return {**options, **unsaid_options(options), "set": settings}

    @property
    def seed(self) -> int:
        """The seed of all its random numbers."""
        return int(self.config["seed"])

    @property
    def planned_rounds(self) -> int:
        """The number of rounds of the complete run."""
        return len(self.config["plan"]["epochs"])

    def refuse_damaged(self) -> None:
        """Raise if run.json or summary.json lacks what readers expect; lines of rounds.jsonl are always checked."""
        require(self.config, RUN_KEYS, self.path / _CONFIG)
        if self.complete:
            require(self.summary, SUMMARY_KEYS, self.path / _SUMMARY)

    @property
    def lock_holder(self) -> LockHolder | None:
        """The process that is working on it now."""
        return LockHolder.of(self.path)

    def table(self) -> Any:
        """A row per round with all its figures; a DataFrame if pandas is installed, else a list of dicts."""
        return frame(run_rows(self))

    def plot(self, what: What = "accuracy") -> Drawing:
        """Curves over the rounds: `accuracy` of every domain or client, the `loss`, or the `bytes` sent so far."""
        return draw_run(self, what)

    def __repr__(self) -> str:
        return f"<Run in {str(self.path)!r}: {run_line(self)}>"

    def _repr_html_(self) -> str:
        return run_html(self)

    def model(self) -> Split:
        """The global model with its final weights."""
        path = self.path / _MODEL
        if not path.exists():
            raise _no_global_model(self.path)
        model = reassemble(self.config, self.path).context.model
        load_weights(model, path)
        return model.eval()

    def prototypes(self) -> dict[str, Any]:
        """The global prototypes: `rows` [classes, d] and `count` [classes]."""
        tensors = _read_prototypes(self.path)
        if tensors is None:
            raise UserError(f"{self.path} has no global prototypes: this method keeps none")
        return tensors


class CachedRun(Run):
    """A run folder of which each file is read once, when it is first asked for."""

    @cached_property
    def config(self) -> dict[str, Any]:
        """run.json."""
        return super().config

    @cached_property
    def rounds(self) -> list[dict[str, Any]]:
        """The finished rounds."""
        return super().rounds

    @cached_property
    def summary(self) -> dict[str, Any]:
        """summary.json."""
        return super().summary

    @property
    def evaluated(self) -> bool:
        """Whether there is an accuracy to show."""
        return any(record["accuracy"] is not None for record in self.rounds)


class OpenRun:
    """One finished run after its last or its best round, or one of its snapshots (`done`: after how many rounds)."""

    def __init__(
        self,
        path: str | Path,
        *,
        done: int | None = None,
        model_of: str = LAST,
        with_data: bool = False,
        data_root: str | Path | None = None,
    ) -> None:
        self.run = Run(path)
        self.config = self.run.config
        self.done: int = len(self.run.rounds)
        """After how many rounds."""
        self._place = self.run.path
        if done is not None:
            self._refuse_without_snapshot(done)
            self.done, self._place = done, self.run.folder.snapshot(done)
        elif model_of not in MODELS_OF:
            raise unknown_name("round whose models to use", model_of, MODELS_OF)
        else:
            self.run.refuse_unfinished()
        if model_of == BEST:
            self.done, self._place = self._best_round(), self.run.folder.best
        self._is_copy = self._place != self.run.path
        self.with_data = with_data
        """Whether its context has the images of the run."""
        self._data_root = data_root

    @property
    def classes(self) -> list[str]:
        """Names of the classes."""
        return list(self.config["data"]["classes"])

    @property
    def clients(self) -> list[str]:
        """In canonical order."""
        return list(self.config["partition"]["clients"])

    @property
    def domains(self) -> dict[str, str]:
        """The domain of each client."""
        return {client: entry["domain"] for client, entry in self.config["partition"]["clients"].items()}

    @property
    def method(self) -> Method:
        """With the run's hyper-parameters."""
        return self.context.method

    @cached_property
    def prepared(self) -> Prepared:
        """The federation as it was before its first round."""
        if self.with_data:
            options = reopened_options(self.config, self._data_root, finds_data=True)
            prepared = assemble(options, self.run.folder.clients).prepared
            refuse_other_images(prepared.context.dataset, self.config)
            return prepared
        return reassemble(self.config, self.run.path).prepared

    @property
    def context(self) -> RunContext:
        """Of the federation; its data are blank unless they were asked for."""
        return self.prepared.context

    @property
    def last_round(self) -> int:
        """The number, from 0, of the round that ended last."""
        return max(0, self.done - 1)

    @property
    def templates(self) -> Templates:
        """The structure of the run's records."""
        return self.prepared.templates

    @property
    def has_global(self) -> bool:
        """Whether the run has a global model."""
        return (self._place / _MODEL).exists()

    def model_of(self, client: str) -> tuple[Net, At]:
        """A client's model as its last training left it, or the server's (`global`), and where its hooks stand.

        One network serves all clients of an architecture, so the last one asked for is the one in memory.
        """
        if client == GLOBAL:
            net = self._net(0)
            if not self.has_global:
                raise _no_global_model(self.run.path)
            load_weights(net.model, self._place / _MODEL)
            return net, replace(self.context.at(self.last_round, None), down=self._down)
        state = self.state_of(client)
        net = self._net(self.context.architecture_of(client))
        net.load(state.model)
        return net, replace(self.context.at(self.last_round, client), down=self._down, memory=state.memory)

    def state_of(self, client: str) -> ClientState:
        """A client's state after its last training, or before its first."""
        return self.trained_state_of(client) or self.templates.clients[self.context.architecture_of(client)]

    def trained_state_of(self, client: str) -> ClientState | None:
        """A client's state after its last training; None where it never took part."""
        if client not in self.clients:
            raise unknown_name("client", client, [*self.clients, GLOBAL])
        like = self.templates.clients[self.context.architecture_of(client)]
        try:
            return self._store.read(client, self.last_round, like)
        except BadMessage as problem:
            raise UserError(f"{self.run.path} is damaged: {problem}") from None

    def server_state(self) -> Record:
        """The server's state after the last round."""
        if self._is_copy:
            return decode_file(self._place / "server.safetensors", self.templates.server, "checkpoint")
        return self.run.folder.last_server(self.templates.server)[1]

    def prototypes(self) -> ClassTable | None:
        """The server's class prototypes; None where the method has none."""
        tensors = _read_prototypes(self._place)
        return None if tensors is None else ClassTable(**tensors)

    def sources_of(self, client: str, like: Tensor) -> Sources | None:
        """The result of the client's projection, for part prototypes such as `like`; None where there was none."""
        none = torch.zeros(0, dtype=torch.int64)
        blank = torch.zeros(0, *self.context.dataset.image_shape, dtype=torch.uint8)
        return self._store.sources(client, Sources(like, none, none, none, blank))

    def broadcast(self) -> bytes:
        """The message that the server would send to all clients next, as it was written."""
        return (self._place / _BROADCAST).read_bytes()

    def received_by(self, client: str) -> Record:
        """What the server would send the client next."""
        return self.method.broadcast(self._server, replace(self.context.at(self.done, None), client=client))

    def last_upload_of(self, client: str) -> Record | None:
        """The client's newest kept message that can be read; a refused one never entered the model."""
        for blob in self.run.folder.kept_messages(client):
            try:
                return decode(blob, self.templates.upload, client, self.context.guard.quantise)
            except BadMessage:
                continue
        return None

    def features_sent(self) -> dict[str, Features]:
        """The features of single images that the server holds of every client; empty where clients send none."""
        banks = (value for value in vars(self._server).values() if isinstance(value, dict))
        return next((bank for bank in banks if all(isinstance(held, Features) for held in bank.values())), {})

    def normalised(self, pixels: Tensor) -> Tensor:
        """Images as the network sees them."""
        return self.context.dataset.normalise(pixels, self.context.dtype)

    @cached_property
    def _server(self) -> Record:
        return self.server_state()

    @cached_property
    def _store(self) -> ClientStore:
        return ClientStore(self._place / "clients")

    @cached_property
    def _down(self) -> Record:
        return decode_file(self._place / _BROADCAST, self.templates.down, "server")

    @cached_property
    def _nets(self) -> dict[int, Net]:
        return {}

    def _net(self, architecture: int) -> Net:
        if architecture not in self._nets:
            self._nets[architecture] = Net(deepcopy(self.context.models[architecture]))
        return self._nets[architecture]

    def _best_round(self) -> int:
        best = BestRound.read(self.run.path)
        if best is None:
            raise UserError(
                f"{self.run.path} has no best round; run with --validation 0.1 to let clients judge the rounds"
            )
        return best.round

    def _refuse_without_snapshot(self, done: int) -> None:
        kept = self.run.folder.snapshots()
        if done not in kept:
            known = ", ".join(map(str, kept)) or "none"
            raise UserError(
                f"{self.run.path} has no snapshot of round {done} (it has: {known}); run with --snapshot-rounds {done}"
            )


def snapshots_of(path: str | Path) -> list[int]:
    """The rounds of which a run has kept snapshots."""
    return RunFolder(Path(path)).snapshots()


def batches(x: Pixels, size: int = 64) -> Iterator[Tensor]:
    """Images a few at a time: at most `size`, and fewer where they are large, whose feature maps fill the memory."""
    yield from pieces(x, max(1, min(size, _PIXELS_AT_ONCE // prod(x.shape[2:]))))


def _read_prototypes(folder: Path) -> dict[str, Any] | None:
    """The server's prototypes of a run or a snapshot; None where its method has none."""
    path = folder / _PROTOTYPES
    if not path.exists():
        return None
    try:
        return dict(load_file(path))
    except SafetensorError as problem:
        raise UserError(f"{path} is damaged ({problem})") from None


def _no_global_model(path: Path) -> UserError:
    return UserError(f"{path} has no global model: with this method every client keeps its own")

"""A run opened again after it has ended: everybody's model as it was left, in the last round or in a snapshot.

Nothing but the run folder is read: not the training data, not the weights a backbone was started from. What needs
images of the data set, asks for them (`with_data`).
"""

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from protofed.clients import ClientStore, Prepared, RunContext, Sources, Templates
from protofed.errors import UserError, unknown_name
from protofed.federation import RunFolder
from protofed.method import At, Method
from protofed.models import load_weights
from protofed.models.net import Net
from protofed.records import ClassTable, Features, Record, decode_file
from protofed.runs.assembly import Assembly, assemble, elsewhere, reassemble
from protofed.runs.results import Run

GLOBAL = "global"
"""In the place of a client's name: the server's model."""


class OpenRun:
    """One finished run, or one of its snapshots."""

    def __init__(self, path: str | Path, *, done: int | None = None, with_data: bool = False) -> None:
        self.run = Run(path)
        self._folder = RunFolder(self.run.path)
        self.config = self.run.config
        self._refuse_unfinished(done)
        self.done: int = len(self.run.rounds) if done is None else done
        """After how many rounds."""
        self._place = self.run.path if done is None else self._folder.snapshot(done)
        self._with_data = with_data

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

    @property
    def context(self) -> RunContext:
        """Of the federation; its data are blank unless they were asked for."""
        return self._assembly.context

    @property
    def prepared(self) -> Prepared:
        """The federation as it was before its first round."""
        return self._assembly.prepared

    @property
    def templates(self) -> Templates:
        """The structure of the run's records."""
        return self._assembly.templates

    def model_of(self, client: str) -> tuple[Net, At]:
        """A client's model as its last training left it, or the server's (`global`), and where its hooks stand.

        One network serves all clients of an architecture, so the last one asked for is the one in memory.
        """
        if client == GLOBAL:
            net = self._net(0)
            if not self.has_global:
                raise UserError(f"{self.run.path} has no global model: with this method every client keeps its own")
            load_weights(net.model, self._place / "model.safetensors")
            return net, replace(self.context.at(self._last, None), down=self._down)
        if client not in self.clients:
            raise unknown_name("client", client, [*self.clients, GLOBAL])
        architecture = self.context.architecture_of(client)
        net, fresh = self._net(architecture), self.templates.clients[architecture]
        state = self._store.read(client, self._last, fresh) or fresh
        net.load(state.model)
        return net, replace(self.context.at(self._last, client), down=self._down, memory=state.memory)

    @property
    def has_global(self) -> bool:
        """Whether there is a server's model to ask."""
        return (self._place / "model.safetensors").exists()

    def prototypes(self) -> ClassTable | None:
        """The server's class prototypes; None where the method has none."""
        path = self._place / "prototypes.safetensors"
        return ClassTable(**load_file(path)) if path.exists() else None

    def sources_of(self, client: str, like: Tensor) -> Sources | None:
        """What the client's projection found, for part prototypes such as `like`; None where there was none."""
        none = torch.zeros(0, dtype=torch.int64)
        blank = torch.zeros(0, *self.context.dataset.image_shape, dtype=torch.uint8)
        return self._store.sources(client, Sources(like, none, none, none, blank))

    def received_by(self, client: str) -> Record:
        """What the server would send the client next."""
        return self.method.broadcast(self._server, replace(self.context.at(self.done, None), client=client))

    def features_sent(self) -> dict[str, Features]:
        """The features of single images that the server holds of every client; empty where clients send none."""
        banks = (value for value in vars(self._server).values() if isinstance(value, dict))
        return next((bank for bank in banks if all(isinstance(held, Features) for held in bank.values())), {})

    @cached_property
    def _server(self) -> Record:
        return self._folder.server_after(self.done, self.templates.server)

    def normalised(self, pixels: Tensor) -> Tensor:
        """Images as the network sees them."""
        return self.context.dataset.normalise(pixels, self.context.dtype)

    @property
    def _last(self) -> int:
        return max(0, self.done - 1)

    @cached_property
    def _store(self) -> ClientStore:
        return ClientStore(self._place / "clients")

    @cached_property
    def _down(self) -> Record:
        return decode_file(self._place / "broadcast.safetensors", self.templates.down, "server")

    @cached_property
    def _nets(self) -> dict[int, Net]:
        return {}

    def _net(self, architecture: int) -> Net:
        if architecture not in self._nets:
            self._nets[architecture] = Net(deepcopy(self.context.models[architecture]))
        return self._nets[architecture]

    @cached_property
    def _assembly(self) -> Assembly:
        if not self._with_data:
            return reassemble(self.config, self.run.path)
        return assemble(elsewhere(self.config), self.run.path / "clients")

    def _refuse_unfinished(self, done: int | None) -> None:
        if done is None and not self.run.complete:
            raise UserError(f"the run in {self.run.path} is not complete; continue it with --resume")
        if done is not None and done not in self._folder.snapshots():
            kept = ", ".join(map(str, self._folder.snapshots())) or "none"
            raise UserError(
                f"{self.run.path} has no snapshot of round {done} (it has: {kept}); run with --snapshot-rounds {done}"
            )


def snapshots_of(path: str | Path) -> list[int]:
    """The rounds of which a run has kept snapshots."""
    return RunFolder(Path(path)).snapshots()


def batches(x: Tensor, size: int = 64) -> Iterator[Tensor]:
    """Images a few at a time."""
    yield from torch.split(x, size)

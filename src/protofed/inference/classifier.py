"""A finished run as one module: pixels in, class probabilities out, exactly as the run itself was scored."""

from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from protofed.clients import ClientState, ClientStore, RunContext
from protofed.errors import UserError, unknown_name
from protofed.federation import RunFolder
from protofed.method import At
from protofed.models import ImageShape, Split, laid_out, nothing
from protofed.models.net import Net
from protofed.records import Record, Weights
from protofed.runs.assembly import Assembly, reassemble
from protofed.runs.results import Run


@dataclass(frozen=True)
class _Member:
    """One network, where it predicts from, and its share in the mean."""

    net: Net
    at: At
    share: float


class Classifier(nn.Module):
    """The server's model, or one client's, with its preprocessing; an ensemble where the run ended with one.

    Takes uint8 pixels [n, C, H, W] of the run's image size and gives probabilities [n, classes]. The training images
    are not needed.
    """

    def __init__(self, run: Run | str | Path, client: str | None = None) -> None:
        super().__init__()
        self.run = run if isinstance(run, Run) else Run(run)
        self.client = client
        self.config = self.run.config
        self.summary = self.run.summary
        assembly = reassemble(self.config, self.run.path)
        self._method, self._context = assembly.context.method, assembly.context
        state = RunFolder(self.run.path).last_server(assembly.templates.server)
        members = _server_members(self.run, assembly, *state) if client is None else None
        self._members = members or [_client_member(assembly, client or "", *state)]
        self.networks = nn.ModuleList(member.net.model for member in self._members)
        self.eval()

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, in the order of the probabilities."""
        return self._context.dataset.classes

    @property
    def image_shape(self) -> ImageShape:
        """Channels, height, width."""
        return self._context.dataset.image_shape

    @property
    def normalise(self) -> Any:
        """What turns pixels into what the network sees."""
        return self._context.dataset.normalise

    @property
    def dtype(self) -> torch.dtype:
        """In which it computes."""
        return self._context.dtype

    def forward(self, pixels: Tensor) -> Tensor:
        """Class probabilities."""
        x = self.normalise(pixels, self.dtype)
        parts = [member.share * self._method.predict(member.net, x, member.at) for member in self._members]
        return torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]

    @torch.no_grad()
    def probabilities(self, pixels: Tensor, batch: int = 256) -> Tensor:
        """Of many images, some at a time."""
        return torch.cat([self(part) for part in torch.split(pixels, batch)])


def _server_members(run: Run, assembly: Assembly, round: int, server: Record) -> list[_Member]:
    """The server's model, or the clients' models that predict together."""
    context, method = assembly.context, assembly.context.method
    weights = method.global_weights(server)
    if weights is None:
        names = context.partition.clients
        raise UserError(
            f"{run.path} has no global model: with {assembly.options.method} every client keeps its own; "
            f"give --client, one of {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"
        )
    down = method.broadcast(server, context.at(round + 1, None))
    # A run is scored at the place of the round that has just ended, with what the next one would send.
    at = replace(context.at(round, None), down=down)
    if not (assembly.options.ensemble or method.ensembles):
        return [_Member(_net(context, context.model, weights), at, 1.0)]
    last = run.rounds[-1]
    left_out = {event["client"] for event in last["events"]}
    clients = [client for client in last["participants"] if client not in left_out]
    counts = {client: method.member_weight(context.at(round, client)) for client in clients}
    return [
        _Member(_net(context, context.model, _stored(assembly, client).model), at, count / sum(counts.values()))
        for client, count in counts.items()
    ]


def _client_member(assembly: Assembly, client: str, round: int, server: Record) -> _Member:
    """What a client would use now: the newest broadcast over its own model."""
    context, method = assembly.context, assembly.context.method
    if client not in context.partition.clients:
        raise unknown_name("client", client, context.partition.clients)
    down: Any = method.broadcast(server, context.at(round + 1, client))
    state = _stored(assembly, client)
    net = _net(context, context.models[context.architecture_of(client)], state.model)
    if method.loads != nothing:
        net.load(down.weights, method.loads)
    return _Member(net, replace(context.at(round, client), down=down, memory=state.memory), 1.0)


def _stored(assembly: Assembly, client: str) -> ClientState:
    """A client's state after its last training, or before its first."""
    context = assembly.context
    fresh = assembly.templates.clients[context.architecture_of(client)]
    return ClientStore(context.clients_folder).read(client, context.plan.rounds, fresh) or fresh


def _net(context: RunContext, model: Split, weights: Weights) -> Net:
    net = Net(laid_out(deepcopy(model), context.layout))
    net.load(weights)
    return net

"""A finished run as one module: pixels in, class probabilities out, exactly as the run itself was scored."""

from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from protofed.clients import RunContext
from protofed.data.pixels import Pixels
from protofed.errors import UserError, unknown_name
from protofed.inference.frozen_features import FrozenFeatures
from protofed.method import At
from protofed.models import ImageShape, Split, laid_out, nothing
from protofed.models.net import Net
from protofed.records import Weights
from protofed.runs.opened import LAST, OpenRun, Run
from protofed.system import one_thread


@dataclass(frozen=True)
class _Member:
    """One network, where it predicts from, and its share in the mean."""

    net: Net
    at: At
    share: float
    architecture: int = 0


class Classifier(nn.Module):
    """The server's model, or one client's, with its preprocessing; an ensemble if the run ended with one.

    Takes uint8 pixels [n, C, H, W] of the run's image size and gives probabilities [n, classes]. The training images
    are not needed.
    """

    def __init__(self, run: Run | str | Path, client: str | None = None, model_of: str = LAST) -> None:
        super().__init__()
        opened = OpenRun(run.path if isinstance(run, Run) else run, model_of=model_of)
        self.run = opened.run
        self.client = client
        self.model_of = model_of
        """Of which round: the `last`, or the `best`."""
        self.config = opened.config
        self.summary = self.run.summary
        # The run is put together with a few images; threads would wait for each other longer than they work.
        with one_thread():
            self._method, self._context = opened.method, opened.context
            self._members = _server_members(opened) if client is None else [_client_member(opened, client)]
        self._features = FrozenFeatures(self._context)
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
        """The normalisation that turns pixels into network input."""
        return self._context.dataset.normalise

    @property
    def dtype(self) -> torch.dtype:
        """The type in which it computes."""
        return self._context.dtype

    def forward(self, pixels: Tensor) -> Tensor:
        """Class probabilities."""
        x = self.normalise(pixels, self.dtype)
        parts = [member.share * self._method.predict(member.net, x, member.at) for member in self._members]
        return torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]

    def probabilities(self, pixels: Pixels, batch: int = 256) -> Tensor:
        """Class probabilities of many images, batch by batch; frozen parts run as in training, so rounding may
        differ."""
        parts = [
            member.share * self._features.probabilities(member.net, member.at, pixels, batch, member.architecture)
            for member in self._members
        ]
        return torch.stack(parts).sum(0) if len(parts) > 1 else parts[0]


def ends_in_ensemble(opened: OpenRun) -> bool:
    """Whether the clients' models predict together in the end, instead of their mean, and the end was reached."""
    wanted = bool(opened.run.options.get("ensemble")) or opened.method.ensembles
    return wanted and opened.done >= opened.run.planned_rounds


def _server_members(opened: OpenRun) -> list[_Member]:
    """The server's model, or the clients' models that predict together."""
    context, method, server = opened.context, opened.method, opened.server_state()
    weights = method.global_weights(server)
    if weights is None:
        names = opened.clients
        raise UserError(
            f"{opened.run.path} has no global model: with {opened.config['method']['name']} every client keeps its "
            f"own; give --client, one of {', '.join(names[:5])}{', ...' if len(names) > 5 else ''}"
        )
    down = method.broadcast(server, context.at(opened.done, None))
    # A run is scored at the place of the round that has just ended, with what the next one would send.
    at = replace(context.at(opened.last_round, None), down=down)
    if not ends_in_ensemble(opened):
        return [_Member(_net(context, context.model, weights), at, 1.0)]
    last = opened.run.rounds[-1]
    left_out = {event["client"] for event in last["events"]}
    clients = [client for client in last["participants"] if client not in left_out]
    counts = {client: method.member_weight(context.at(opened.last_round, client)) for client in clients}
    return [
        _Member(_net(context, context.model, opened.state_of(client).model), at, count / sum(counts.values()))
        for client, count in counts.items()
    ]


def _client_member(opened: OpenRun, client: str) -> _Member:
    """What a client would use now: the newest broadcast over its own model."""
    context, method = opened.context, opened.method
    if client not in opened.clients:
        raise unknown_name("client", client, opened.clients)
    down: Any = method.broadcast(opened.server_state(), context.at(opened.done, client))
    state = opened.state_of(client)
    architecture = context.architecture_of(client)
    net = _net(context, context.models[architecture], state.model)
    if method.loads != nothing:
        net.load(method.weights_for(client, down), method.loads)
    at = replace(context.at(opened.last_round, client), down=down, memory=state.memory)
    return _Member(net, at, 1.0, architecture)


def _net(context: RunContext, model: Split, weights: Weights) -> Net:
    net = Net(laid_out(deepcopy(model), context.layout))
    net.load(weights)
    return net

"""A run that is ready to start: its context, and an example of every record it will exchange.

The examples come from letting the method act once on blank images. They are what decoding checks against, so a method
declares nothing about shapes, and a message of another model or method is refused by the field that does not fit.
"""

from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch

from protofed.clients.context import RunContext
from protofed.clients.optimizers import kept_state, make_optimizers
from protofed.clients.samples import ClientSamples
from protofed.clients.store import ClientState
from protofed.data import Augment, Images
from protofed.guards import PrivacyLedger, noised_form
from protofed.method import At
from protofed.models import Split
from protofed.models.net import Net
from protofed.records import Record, Weights

_BLANKS = 2


class GlobalModel(Record):
    """What scoring the server's model takes: its weights, and what a newcomer would receive."""

    weights: Weights
    down: Record


@dataclass(frozen=True)
class Templates:
    """One example of each record."""

    server: Record
    down: Record
    upload: Record
    clients: tuple[ClientState, ...]
    """For each architecture."""
    global_model: GlobalModel | None


@dataclass(frozen=True)
class Prepared:
    """What server and clients share before the first round; it is enough to play any part of the run."""

    context: RunContext
    templates: Templates

    def with_context(self, **changes: Any) -> "Prepared":
        """The same run with some of its context changed, where that leaves the records as they are."""
        return replace(self, context=replace(self.context, **changes))

    def privacy_ledger(self, arrived: dict[int, int] | None = None) -> PrivacyLedger:
        """What the clients spend by the run's plan; `arrived`: how many uploads came in rounds that are over, as its
        owner keeps it.
        """
        context, upload = self.context, self.templates.upload
        known = {} if arrived is None else arrived
        return PrivacyLedger(context.guard, context.method, context.plan, context.sizes, upload, known)


def prepare(context: RunContext) -> Prepared:
    """Find out the records of a run; the initial server and client states are among them."""
    return Prepared(context, _make_templates(context))


def initial_server(context: RunContext, net: Net) -> Record:
    """The server's state before the first round, with this network."""
    at = context.at(0, None)
    return context.method.server_state(net, replace(at, held=at.held.cpu()))


def _make_templates(context: RunContext) -> Templates:
    """The initial states, and what would travel if a client held two blank images."""
    method = context.method
    net = Net(deepcopy(context.model))
    at = context.at(0, next(iter(context.sizes)))
    at = replace(at, held=at.held.cpu())
    server = initial_server(context, net)
    down = method.broadcast(server, at)
    memory = method.client_state(net, at)
    weights = method.global_weights(server)

    shape = (_BLANKS, *context.dataset.image_shape)
    labels = torch.arange(_BLANKS) % at.classes
    blank = Images(torch.zeros(shape, dtype=torch.uint8), labels)
    samples = ClientSamples(blank, context.dataset.normalise, Augment(), context.dtype, torch.device("cpu"))
    with torch.no_grad(), net.eval():
        notes = method.observe(net, next(samples.batches())[0], samples.y)
    upload, _ = method.upload(
        net, samples, replace(at, down=down, memory=memory, start=net.pick(), notes=notes, taken=1, reach=at.lr)
    )
    return Templates(
        server,
        down,
        noised_form(context.guard, upload),
        tuple(_fresh_client(context, model, at) for model in context.models),
        None if weights is None else GlobalModel(weights, down),
    )


def _fresh_client(context: RunContext, model: Split, at: At) -> ClientState:
    """A client with this architecture before its first round."""
    method, net = context.method, Net(deepcopy(model))
    optimizers = make_optimizers(method, net, context.plan, at.lr)
    return ClientState(net.pick(), method.client_state(net, at), kept_state(method, optimizers))

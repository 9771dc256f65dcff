"""The structure of every message, learnt by letting the method act once on blank images.

Templates are what decoding checks against, so a method declares nothing about shapes, and a message of another model
or another method is refused by the field that does not fit.
"""

from copy import deepcopy
from dataclasses import dataclass, replace

import torch

from protofed.clients.optimizers import kept_state, make_optimizers
from protofed.clients.samples import ClientSamples
from protofed.clients.setting import Setting
from protofed.clients.store import ClientState
from protofed.data import Augment, Images
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


def rehearse(setting: Setting) -> Templates:
    """The initial server and client states, and what would travel if a client held two blank images."""
    method = setting.method
    net = Net(deepcopy(setting.model))
    at = setting.at(0, next(iter(setting.sizes)))
    at = replace(at, held=at.held.cpu())
    server = method.server_state(net, replace(at, client=None))
    down = method.broadcast(server, at)
    memory = method.client_state(net, at)
    weights = method.global_weights(server)

    shape = (_BLANKS, *setting.dataset.image_shape)
    labels = torch.arange(_BLANKS) % at.classes
    blank = Images(torch.zeros(shape, dtype=torch.uint8), labels)
    samples = ClientSamples(blank, setting.dataset.normalise, Augment(), setting.dtype, torch.device("cpu"))
    with torch.no_grad(), net.eval():
        notes = method.observe(net, next(samples.batches())[0], samples.y)
    upload, _ = method.upload(
        net, samples, replace(at, down=down, memory=memory, start=net.pick(), notes=notes, taken=1, reach=at.lr)
    )
    return Templates(
        server,
        down,
        upload,
        tuple(_fresh_client(setting, model, at) for model in setting.models),
        None if weights is None else GlobalModel(weights, down),
    )


def _fresh_client(setting: Setting, model: Split, at: At) -> ClientState:
    """A client with this architecture before its first round."""
    method, net = setting.method, Net(deepcopy(model))
    optimizers = make_optimizers(method, net, setting.plan, at.lr)
    return ClientState(net.pick(), method.client_state(net, at), kept_state(method, optimizers))

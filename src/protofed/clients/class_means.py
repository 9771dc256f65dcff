"""A head that starts from class means: what clients send for it, and the linear layer that is made of them."""

from collections.abc import Callable
from copy import deepcopy

import torch
from torch import Tensor, nn

from protofed.clients.samples import ClientSamples
from protofed.errors import UserError
from protofed.models import Split
from protofed.models.net import Net
from protofed.models.protopnet import (
    characteristic_patches,
    has_prototypes,
    patch_channels,
    patch_stage,
    start_from_patches,
)
from protofed.records import ClassTable, Mean, Record, Weights
from protofed.verbs import class_means

_MARGIN = 10.0
"""By how much the logit of its own class leads at an average class mean: sure, but not beyond learning."""


class HeadStatistics(Record):
    """The mean feature of each class a client holds."""

    means: Mean[ClassTable]


@torch.no_grad()
def client_class_means(net: Net, samples: ClientSamples) -> HeadStatistics:
    """Of the client's training images, as they are."""
    with net.eval():
        table = _patch_means(net, samples) if has_prototypes(net.model) else _means(net.features, net, samples)
    return HeadStatistics(Mean(table, table.count.double()))


def _means(features: Callable[[Tensor], Tensor], net: Net, samples: ClientSamples) -> ClassTable:
    """Class means of what `features` gives for a batch."""
    return class_means(torch.cat([features(x) for x, _ in samples.batches()]), samples.y, net.classes)


def _patch_means(net: Net, samples: ClientSamples) -> ClassTable:
    """Class means of each image's most characteristic patch, which is told by the client's own means of whole maps."""
    stage = patch_stage(net.model)
    whole = _means(lambda x: net.features(x, stage).mean((2, 3)), net, samples)
    chosen = [characteristic_patches(net.features(x, stage), y, whole) for x, y in samples.batches()]
    return class_means(torch.cat(chosen), samples.y, net.classes)


def empty_means(model: Split) -> ClassTable:
    """The class means of a client without an image."""
    if not has_prototypes(model):
        return Net(model).empty_table()
    return ClassTable.empty(model.classes, patch_channels(model), like=next(model.parameters()).detach())


def linear_head(model: Split) -> tuple[str, nn.Linear]:
    """The one linear layer behind the features, and its name; other heads cannot be computed from class means."""
    names = model.stage_names[model.stages_until(None) :]
    stages = [(name, stage) for name, stage in model.stages().items() if name in names]
    if len(stages) != 1 or not isinstance(stages[0][1], nn.Linear) or stages[0][1].bias is None:
        raise UserError("--head closed-form needs a network whose head is a single linear layer; omit it")
    return stages[0][0], stages[0][1]


def head_from_means(model: Split, means: ClassTable) -> Weights:
    """The weights of a head that prefers the nearest class mean; classes nobody holds are never preferred.

    With mu the mean of the class means m_c: logit_c = a ((m_c - mu)' h - (|m_c|^2 - |mu|^2) / 2), which orders classes
    by distance to m_c; a makes the margin at an average class mean the same whatever the scale of the features.
    """
    held = means.count > 0
    if has_prototypes(model):
        return Weights(start_from_patches(model, means.rows, held), {})
    name, layer = linear_head(model)
    rows = means.rows.double()
    mu = rows[held].mean(0)
    centred = (rows - mu) * held[:, None]
    scale = _MARGIN / centred[held].square().sum(1).mean()
    bias = -scale * (rows.square().sum(1) - mu.square().sum()) / 2
    bias = torch.where(held, bias, bias[held].min() - _MARGIN)
    return Weights({f"{name}.weight": (scale * centred).to(layer.weight), f"{name}.bias": bias.to(layer.weight)}, {})


def with_head(model: Split, head: Weights) -> Net:
    """The initial network with another head."""
    net = Net(deepcopy(model))
    net.load(head)
    return net

"""A head that starts from class means: what clients send for it, and the linear layer that is made of them."""

from copy import deepcopy

import torch
from torch import nn

from protofed.clients.samples import ClientSamples
from protofed.errors import UserError
from protofed.models import Split
from protofed.models.net import Net
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
        h = torch.cat([net.features(x) for x, _ in samples.batches()])
    table = class_means(h, samples.y, net.classes)
    return HeadStatistics(Mean(table, table.count.double()))


def linear_head(model: Split) -> tuple[str, nn.Linear]:
    """The one linear layer behind the features, and its name; other heads cannot be computed from class means."""
    names = model.stage_names[model.stages_until(None) :]
    stages = [(name, stage) for name, stage in model.stages().items() if name in names]
    if len(stages) != 1 or not isinstance(stages[0][1], nn.Linear) or stages[0][1].bias is None:
        raise UserError("--head closed-form needs a network whose head is one linear layer; leave it out")
    return stages[0][0], stages[0][1]


def head_from_means(model: Split, means: ClassTable) -> Weights:
    """The weights of a head that prefers the nearest class mean; classes nobody holds are never preferred.

    With mu the mean of the class means m_c: logit_c = a ((m_c - mu)' h - (|m_c|^2 - |mu|^2) / 2), which orders classes
    by distance to m_c; a makes the margin at an average class mean the same whatever the scale of the features.
    """
    name, layer = linear_head(model)
    rows, held = means.rows.double(), means.count > 0
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

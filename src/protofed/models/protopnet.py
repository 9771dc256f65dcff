"""Part prototypes: a class is recognised by how near some patch of the image comes to one of its prototypes.

Chen, Li, Tao, Barnett, Rudin, Su. This Looks Like That: Deep Learning for Interpretable Image Recognition. NeurIPS
2019.

What a loss or an explanation needs lies between the stages that replace the pooling and the head of a backbone:

    net.features(x, "addon")        z, the patches of the image, [n, D, h, w]
    net.features(x, "prototypes")   squared distance of every patch to every prototype, [n, m, h', w']
    net.call("similarity", maps)    the same as activation maps
    net.features(x, "nearest")      d, the distance of the nearest patch, [n, m]
    net.features(x)                 similarity of the nearest patch: the features, [n, m]
    prototypes_of(net.model).labels the class of each prototype, [m]
"""

from collections import OrderedDict
from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from protofed.errors import UserError
from protofed.models.adapters import init_convolution, output_channels
from protofed.models.groups import Group, part
from protofed.models.layers import in_full_precision
from protofed.models.net import Net
from protofed.models.split import Split
from protofed.records import ClassTable

SimilarityKind = Literal["linear", "log"]

prototype_layer: Group = part("addon", "prototypes", "last")
"""All that a part-prototype network learns on top of its backbone."""

_EPSILON = 1e-4
_LEAD, _SEARCH = 10.0, 8
"""The logit by which the own class leads at the start from patches, and the steps in which its scale is found."""
_SPREAD = 0.5
"""How far the prototypes of a class start from one another, in parts of how far classes are."""


class PartPrototypes(nn.Module):
    """m = classes x per_class prototypes p_j of shape D x size x size; prototype j is of class j // per_class."""

    def __init__(self, classes: int, per_class: int, dim: int, size: int) -> None:
        super().__init__()
        self.per_class = per_class
        self.size = size
        self.vectors = nn.Parameter(torch.rand(classes * per_class, dim, size, size))

    @property
    def labels(self) -> Tensor:
        """The class of each prototype, [m]."""
        return torch.arange(len(self.vectors), device=self.vectors.device) // self.per_class

    def forward(self, z: Tensor) -> Tensor:
        """|z(h,w) - p_j|^2 at every position."""
        if min(z.shape[-2:]) < self.size:
            height, width = z.shape[-2:]
            raise UserError(
                f"prototypes of {self.size}x{self.size} patches do not fit feature maps of {height}x{width}; "
                "use a smaller prototype_size or larger images"
            )
        return _squared_distances(z, self.vectors)


@in_full_precision
def _squared_distances(z: Tensor, vectors: Tensor) -> Tensor:
    """|z|^2 - 2 z p_j + |p_j|^2, in which rounding may go below zero, [n, m, h, w]."""
    patches = functional.conv2d(z.pow(2), torch.ones_like(vectors[:1]))
    matches = functional.conv2d(z, vectors)
    return functional.relu(patches - 2 * matches + vectors.pow(2).sum((1, 2, 3))[:, None, None])


class _Nearest(nn.Module):
    """The minimum over all positions."""

    def forward(self, maps: Tensor) -> Tensor:
        """Distances [n, m] from distance maps [n, m, h, w]."""
        return maps.flatten(2).amin(2)


class Similarity(nn.Module):
    """Near is similar: -d, or log((d + 1) / (d + 0.0001))."""

    def __init__(self, kind: SimilarityKind) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, d: Tensor) -> Tensor:
        """Similarities of distances, or of whole distance maps."""
        return -d if self.kind == "linear" else torch.log((d + 1) / (d + _EPSILON))


def with_prototypes(base: Split, *, per_class: int, dim: int, size: int, similarity: SimilarityKind) -> Split:
    """The model with part prototypes instead of its feature vector and head."""
    names = base.stage_names[: base.stage_names.index(base.cut)]
    stages = {name: stage for name, stage in base.stages().items() if name in names}
    channels = output_channels(*stages.values())
    if not channels:
        raise UserError(
            "part prototypes compare patches of feature maps, but this model has no convolution before its "
            f"feature vector ({base.cut}); use a convolutional network such as resnet50"
        )
    prototypes = PartPrototypes(base.classes, per_class, dim, size)
    stages |= {
        "addon": _addon(channels, dim),
        "prototypes": prototypes,
        "nearest": _Nearest(),
        "similarity": Similarity(similarity),
        "last": _last(base.classes, prototypes.labels),
    }
    return Split(stages, cut="similarity", dim=base.classes * per_class, classes=base.classes)


def _addon(channels: int, dim: int) -> nn.Sequential:
    """Two 1x1 convolutions; the sigmoid keeps patches where the prototypes start, in [0, 1]."""
    first, second = nn.Conv2d(channels, dim, 1), nn.Conv2d(dim, dim, 1)
    init_convolution(first)
    init_convolution(second)
    return nn.Sequential(OrderedDict(conv1=first, relu=nn.ReLU(), conv2=second, sigmoid=nn.Sigmoid()))


def _last(classes: int, labels: Tensor) -> nn.Linear:
    """Prototypes speak for their own class (+1) and against the others (-0.5)."""
    last = nn.Linear(len(labels), classes, bias=False)
    own = torch.arange(classes)[:, None] == labels
    with torch.no_grad():
        last.weight.copy_(torch.where(own, 1.0, -0.5))
    return last


def patch_stage(model: Split) -> str:
    """The last stage of the backbone, whose patches the add-on layers see."""
    return model.stage_names[model.stage_names.index("addon") - 1]


def patch_channels(model: Split) -> int:
    """The length of such a patch."""
    first = model.get_submodule("addon.conv1")
    assert isinstance(first, nn.Conv2d)
    return first.in_channels


def characteristic_patches(maps: Tensor, y: Tensor, means: ClassTable) -> Tensor:
    """Of each feature map the patch that points most from the mean of all classes to that of its own, [n, channels]."""
    centre = means.rows[means.held].mean(0) if means.held.sum() > 1 else torch.zeros_like(means.rows[0])
    patches = maps.flatten(2)
    best = torch.einsum("nc,ncp->np", means.rows[y] - centre, patches).argmax(1)
    return patches[torch.arange(len(y), device=y.device), :, best]


@torch.no_grad()
def start_from_patches(model: Split, rows: Tensor, held: Tensor) -> dict[str, Tensor]:
    """Weights of an add-on and of prototypes that fit the backbone, from a patch for every class, [C, channels].

    As drawn, the add-on saturates where features are large, and prototypes lie far from every patch. So its input is
    centred and scaled, and the prototypes of a class start around what it makes of the patch of that class. The scale
    is such that, with the last layer as it starts, the own class leads by `_LEAD` at these patches.
    """
    layer, addon = prototypes_of(model), deepcopy(model.stages()["addon"]).double()
    first = addon.get_submodule("conv1")
    assert isinstance(first, nn.Conv2d)
    assert first.bias is not None
    wide = rows.double()
    centre = wide[held].mean(0)
    drawn = first.weight.clone()
    apart_before = (wide[held] - centre).square().sum(1).mean().sqrt()
    if not apart_before > 0:
        return {}  # a single class, or all alike: nothing to go by
    scale = 1 / apart_before
    # Distances grow with the square of the scale as long as the sigmoid is straight, so that a few steps suffice.
    for _ in range(_SEARCH):
        first.weight.copy_(scale * drawn)
        first.bias.copy_(-scale * drawn[:, :, 0, 0] @ centre)
        means = addon(torch.where(held[:, None], wide, centre)[:, :, None, None])[:, :, 0, 0]
        apart = torch.cdist(means[held], means[held]).square()
        lead = 1.5 * layer.per_class * layer.size**2 * apart.sum() / max(1, apart.numel() - len(apart))
        scale = scale * (_LEAD / lead.clamp(min=1e-12)).sqrt()
    spread = (means[held] - means[held].mean(0)).square().mean().sqrt()
    vectors = means[layer.labels][:, :, None, None] + _SPREAD * spread * (2 * layer.vectors.double() - 1)
    started = {
        "addon.conv1.weight": first.weight,
        "addon.conv1.bias": first.bias,
        "prototypes.vectors": vectors,
    }
    return {name: tensor.to(layer.vectors.dtype) for name, tensor in started.items()}


def has_prototypes(model: Split) -> bool:
    """Whether the model decides by part prototypes."""
    return isinstance(model.stages().get("prototypes"), PartPrototypes)


def prototypes_of(model: Split) -> PartPrototypes:
    """The prototypes of a model that has some."""
    layer = model.stages().get("prototypes")
    if not isinstance(layer, PartPrototypes):
        raise UserError("this model has no part prototypes; fedprototypical and fedadapterproto train such models")
    return layer


@dataclass(frozen=True)
class Projection:
    """Where each prototype was found: the image by its place among the samples, and the patch by its upper left."""

    image: Tensor
    """[m]; -1 where there is no image of the prototype's class."""
    row: Tensor
    column: Tensor
    distance: Tensor
    """How far the prototype was moved, squared; infinite where there was nothing to move it to."""


@torch.no_grad()
def project(net: Net, batches: Iterable[tuple[Tensor, Tensor]]) -> Projection:
    """Move every prototype onto the nearest patch of an image of its class; without such an image it stays.

    `batches` are one client's own clean images: a projected prototype is a piece of an image, so it is looked at where
    it was projected and never averaged with others. Of equally near patches the first is taken.
    """
    layer = prototypes_of(net.model)
    size, count = layer.size, len(layer.vectors)
    moved = layer.vectors.detach().clone()
    image = torch.full((count,), -1)
    row, column = torch.zeros_like(image), torch.zeros_like(image)
    distance = moved.new_full((count,), torch.inf)
    offset = 0
    with net.eval():
        for x, y in batches:
            z = net.features(x, "addon")
            maps = net.call("prototypes", z).transpose(0, 1)  # [m, n, h, w]
            others = layer.labels[:, None] != y
            nearest = maps.masked_fill(others[:, :, None, None], torch.inf).flatten(1).min(1)
            for j in (nearest.values < distance).nonzero()[:, 0].tolist():
                i, r, c = (int(index) for index in torch.unravel_index(nearest.indices[j], maps.shape[1:]))
                image[j], row[j], column[j], distance[j] = offset + i, r, c, nearest.values[j]
                moved[j] = z[i, :, r : r + size, c : c + size]
            offset += len(y)
    layer.vectors.copy_(moved)
    return Projection(image, row, column, distance)

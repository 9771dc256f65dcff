"""Residual networks for small (cifar stem) and large (standard stem) images.

Inside the stages the names are torchvision's, so its weight files fit once `conv1` and `bn1` are put under `stem`.
"""

from collections import OrderedDict
from collections.abc import Sequence
from math import gcd
from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from protofed.models.catalog import register_model
from protofed.models.split import ImageShape, Split

Width = Annotated[
    int, Field(ge=1, description=("channels of the first stage; each later stage has twice as many as the one before"))
]
Stem = Annotated[
    Literal["cifar", "standard"],
    Field(description="first convolution: 3x3 stride 1 (cifar) or 7x7 stride 2 (standard)"),
]
StemMaxpool = Annotated[
    bool | None, Field(description="3x3 stride 2 max-pool after the stem; unset: with the standard stem only")
]
Norm = Annotated[
    Literal["batch", "group"],
    Field(description="normalise over the batch, or over groups of channels within each image"),
]
Local = Annotated[
    bool, Field(description="make second convolutions 1x1: a position sees less of the image, so maps are sharper")
]
Init = Annotated[
    Literal["kaiming", "pytorch"],
    Field(
        description=(
            "initialisation of the convolutions: normal by their outputs (kaiming, as in torchvision), "
            "or PyTorch's own, uniform and smaller, which learns faster before batch normalisation"
        )
    ),
]
_GROUPS = 32


def _norm(kind: Norm, channels: int) -> nn.Module:
    """A normalisation layer; the groups are as many as divide the channels, 32 at most."""
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    return nn.GroupNorm(gcd(channels, _GROUPS), channels)


class _BasicBlock(nn.Module):
    """Two 3x3 convolutions around a shortcut.

    What normalisation and convolution give is not needed for their gradients, so the next function may overwrite it.
    """

    expansion = 1
    second_kernel = 3
    """Side of the second convolution."""

    def __init__(self, inputs: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 3, stride, padding=1, bias=False)
        self.bn1 = _norm(norm, width)
        self.conv2 = nn.Conv2d(width, width, self.second_kernel, padding=self.second_kernel // 2, bias=False)
        self.bn2 = _norm(norm, width)
        self.downsample = _shortcut(inputs, width, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        h = functional.relu_(self.bn1(self.conv1(x)))
        h = self.bn2(self.conv2(h))
        return functional.relu_(h.add_(self.downsample(x)))


class _LocalBlock(_BasicBlock):
    """The same with a 1x1 convolution in second place, as in networks of local features (Brendel, Bethge, ICLR 2019).

    A position of the last stage of a ResNet-10 sees 19 pixels of the image instead of 49.
    """

    second_kernel = 1


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions around a shortcut; the 3x3 one carries the stride, as in published weights."""

    expansion = 4

    def __init__(self, inputs: int, width: int, stride: int, norm: Norm) -> None:
        super().__init__()
        outputs = width * self.expansion
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = _norm(norm, width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = _norm(norm, width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = _norm(norm, outputs)
        self.downsample = _shortcut(inputs, outputs, stride, norm)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        h = functional.relu_(self.bn1(self.conv1(x)))
        h = functional.relu_(self.bn2(self.conv2(h)))
        h = self.bn3(self.conv3(h))
        return functional.relu_(h.add_(self.downsample(x)))


def _register_basic(number: int, depth: int) -> None:
    """Offer the network of `depth` basic blocks in each of its four stages."""

    @register_model(f"resnet{number}", description=f"ResNet-{number} of basic blocks, features of length 8 x width")
    def build(
        image_shape: ImageShape,
        classes: int,
        *,
        width: Width = 64,
        stem: Stem = "cifar",
        stem_maxpool: StemMaxpool = None,
        norm: Norm = "batch",
        local: Local = False,
        init: Init = "kaiming",
    ) -> Split:
        block = _LocalBlock if local else _BasicBlock
        return _resnet(block, (depth,) * 4, image_shape, classes, width, stem, stem_maxpool, norm, init)


_register_basic(10, depth=1)
_register_basic(18, depth=2)


@register_model("resnet50", description="ResNet-50 of bottleneck blocks, features of length 32 x width")
def resnet50(
    image_shape: ImageShape,
    classes: int,
    *,
    width: Width = 64,
    stem: Stem = "standard",
    stem_maxpool: StemMaxpool = None,
    norm: Norm = "batch",
    init: Init = "kaiming",
) -> Split:
    """ResNet-50: 3, 4, 6 and 3 bottleneck blocks."""
    return _resnet(Bottleneck, (3, 4, 6, 3), image_shape, classes, width, stem, stem_maxpool, norm, init)


def _resnet(
    block: type[_BasicBlock | Bottleneck],
    depths: Sequence[int],
    image_shape: ImageShape,
    classes: int,
    width: Width,
    stem: Stem,
    stem_maxpool: StemMaxpool,
    norm: Norm,
    init: Init,
) -> Split:
    pooled = stem == "standard" if stem_maxpool is None else stem_maxpool
    stages: dict[str, nn.Module] = {"stem": _stem(image_shape[0], width, stem, pooled, norm)}
    channels = width
    for level, depth in enumerate(depths):
        blocks = []
        for position in range(depth):
            stride = 2 if level > 0 and position == 0 else 1
            blocks.append(block(channels, width * 2**level, stride, norm))
            channels = width * 2**level * block.expansion
        stages[f"layer{level + 1}"] = nn.Sequential(*blocks)
    stages["pool"] = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    stages["fc"] = nn.Linear(channels, classes)
    model = Split(stages, cut="pool", dim=channels, classes=classes)
    for module in model.modules():
        if init == "kaiming" and isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


def _stem(inputs: int, width: int, kind: Stem, pooled: bool, norm: Norm) -> nn.Sequential:
    kernel, stride = {"cifar": (3, 1), "standard": (7, 2)}[kind]
    convolution = nn.Conv2d(inputs, width, kernel, stride, padding=kernel // 2, bias=False)
    stem = nn.Sequential(OrderedDict(conv1=convolution, bn1=_norm(norm, width), relu=nn.ReLU(inplace=True)))
    if pooled:
        stem.add_module("maxpool", nn.MaxPool2d(3, stride=2, padding=1))
    return stem


def _shortcut(inputs: int, outputs: int, stride: int, norm: Norm) -> nn.Module:
    if inputs == outputs and stride == 1:
        return nn.Identity()
    return nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), _norm(norm, outputs))

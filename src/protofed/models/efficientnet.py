"""EfficientNet-Lite: convolutional networks for photographs, small enough for a CPU, with published ImageNet weights.

Tan, Le. EfficientNet: Rethinking Model Scaling for Convolutional Neural Networks. ICML 2019; the Lite family (2020)
has no squeeze-and-excitation and ReLU6 in place of swish. Dropout and stochastic depth are left out: what a stage does
to an image then depends on its weights alone.
"""

from collections import OrderedDict
from math import ceil
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from protofed.errors import UserError
from protofed.models.catalog import register_model, require_side
from protofed.models.fast.depthwise import convolved_depthwise, worth_pieces
from protofed.models.split import ImageShape, Split

FEATURES = 1280
"""Length of the feature vector, in every size of the family."""

_COLOURS = 3
_STEM = 32
_SMALLEST = 32
_EPS = 1e-3
_MOMENTUM = 0.01
"""TensorFlow's decay of 0.99 as torch counts it."""
_DIVISOR = 8


class _Row(NamedTuple):
    """A row of the paper's table 1: blocks of one width."""

    layer: str
    kernel: int
    stride: int
    expansion: int
    channels: int
    depth: int


# Strides of 4, 8, 16 and 32 end the four layers, as they do in a residual network.
_ROWS = (
    _Row("layer1", 3, 1, 1, 16, 1),
    _Row("layer1", 3, 2, 6, 24, 2),
    _Row("layer2", 5, 2, 6, 40, 2),
    _Row("layer3", 3, 2, 6, 80, 3),
    _Row("layer3", 5, 1, 6, 112, 3),
    _Row("layer4", 5, 2, 6, 192, 4),
    _Row("layer4", 3, 1, 6, 320, 1),
)


class SameConv2d(nn.Conv2d):
    """A convolution padded as TensorFlow's "same": ceil(side / stride) positions, the odd row of zeros at the end."""

    in_pieces = False
    """Whether wide depthwise kernels get their gradient a few columns at a time, where that is faster."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, groups: int = 1) -> None:
        super().__init__(inputs, outputs, kernel, stride, groups=groups, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[n, inputs, h, w] to [n, outputs, ceil(h / stride), ceil(w / stride)]."""
        (top, bottom), (left, right) = (
            _same_padding(side, kernel, stride)
            for side, kernel, stride in zip(x.shape[-2:], self.kernel_size, self.stride, strict=True)
        )
        padding: tuple[int, int] = (top, left)
        if (top, left) != (bottom, right):
            x, padding = functional.pad(x, (left, right, top, bottom)), (0, 0)
        if self.in_pieces and worth_pieces(x, self.weight):
            return convolved_depthwise(x, self.weight, self.stride, padding)  # type: ignore[arg-type]
        return functional.conv2d(x, self.weight, self.bias, self.stride, padding, self.dilation, self.groups)


def _same_padding(side: int, kernel: int, stride: int) -> tuple[int, int]:
    """Zeros before and after."""
    needed = max((-(-side // stride) - 1) * stride + kernel - side, 0)
    return needed // 2, needed - needed // 2


class _MBConv(nn.Module):
    """An inverted residual: 1x1 to many channels, depthwise, 1x1 back; a shortcut where the shape stays the same."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        wide = inputs * expansion
        self.expand = _unit(nn.Conv2d(inputs, wide, 1, bias=False)) if expansion > 1 else nn.Identity()
        self.depthwise = _unit(SameConv2d(wide, wide, kernel, stride, groups=wide))
        self.project = _unit(nn.Conv2d(wide, outputs, 1, bias=False), activated=False)
        self.has_shortcut = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
        h: Tensor = self.project(self.depthwise(self.expand(x)))
        return h.add_(x) if self.has_shortcut else h


class _GreyToColour(nn.Module):
    """The one channel of a grey image three times, so that weights learnt from colour fit."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x] * _COLOURS, 1)


@register_model("efficientnet_lite0", description="EfficientNet-Lite0 for photographs, features of length 1280")
def efficientnet_lite0(image_shape: ImageShape, classes: int) -> Split:
    """The smallest: 3.4 million parameters before the classifier."""
    return _efficientnet("efficientnet_lite0", image_shape, classes, width=1.0, depth=1.0)


@register_model("efficientnet_lite1", description="EfficientNet-Lite1: Lite0 with more blocks")
def efficientnet_lite1(image_shape: ImageShape, classes: int) -> Split:
    """4.1 million parameters before the classifier."""
    return _efficientnet("efficientnet_lite1", image_shape, classes, width=1.0, depth=1.1)


@register_model("efficientnet_lite2", description="EfficientNet-Lite2: Lite1 with wider blocks")
def efficientnet_lite2(image_shape: ImageShape, classes: int) -> Split:
    """4.8 million parameters before the classifier."""
    return _efficientnet("efficientnet_lite2", image_shape, classes, width=1.1, depth=1.2)


def _efficientnet(name: str, image_shape: ImageShape, classes: int, *, width: float, depth: float) -> Split:
    require_side(name, image_shape, _SMALLEST)
    if image_shape[0] not in (1, _COLOURS):
        raise UserError(f"model {name!r} needs images of 1 or {_COLOURS} channels, not {image_shape[0]}")
    layers, channels = _layers(width, depth)
    stages: dict[str, nn.Module] = {"stem": _stem(image_shape[0]), **layers}
    stages["top"] = _unit(nn.Conv2d(channels, FEATURES, 1, bias=False))
    stages["pool"] = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
    stages["fc"] = nn.Linear(FEATURES, classes)
    model = Split(stages, cut="pool", dim=FEATURES, classes=classes)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            # Kaiming (fan-out); torch's own counts the channels that a depthwise kernel does not reach.
            nn.init.normal_(module.weight, std=(2 * module.groups / module.weight[:, 0].numel()) ** 0.5)
    return model


def _stem(channels: int) -> nn.Sequential:
    unit = _unit(SameConv2d(_COLOURS, _STEM, 3, 2))
    if channels == _COLOURS:
        return unit
    return nn.Sequential(OrderedDict(colour=_GreyToColour(), **dict(unit.named_children())))


def _layers(width: float, depth: float) -> tuple[dict[str, nn.Module], int]:
    """The four layers, and the channels that come out; the Lite family scales neither stem nor the outer depths."""
    blocks: dict[str, list[nn.Module]] = {}
    channels = _STEM
    for row in _ROWS:
        outputs = _scaled(row.channels, width)
        repeats = row.depth if row in (_ROWS[0], _ROWS[-1]) else ceil(row.depth * depth)
        for position in range(repeats):
            stride = row.stride if position == 0 else 1
            blocks.setdefault(row.layer, []).append(_MBConv(channels, outputs, row.kernel, stride, row.expansion))
            channels = outputs
    return {name: nn.Sequential(*layers) for name, layers in blocks.items()}, channels


def _scaled(channels: int, width: float) -> int:
    """The nearest multiple of eight, unless that takes away more than a tenth."""
    wanted = channels * width
    rounded = max(_DIVISOR, int(wanted + _DIVISOR / 2) // _DIVISOR * _DIVISOR)
    return rounded if rounded >= 0.9 * wanted else rounded + _DIVISOR


def _unit(convolution: nn.Conv2d, activated: bool = True) -> nn.Sequential:
    norm = nn.BatchNorm2d(convolution.out_channels, eps=_EPS, momentum=_MOMENTUM)
    unit = nn.Sequential(OrderedDict(conv=convolution, bn=norm))
    if activated:
        unit.add_module("act", nn.ReLU6(inplace=True))
    return unit

"""Inception-v3 up to its pooled features, with the names of torchvision's weight files.

Szegedy, Vanhoucke, Ioffe, Shlens, Wojna. Rethinking the Inception Architecture for Computer Vision. CVPR 2016.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_Kernel = int | tuple[int, int]


class Unit(nn.Module):
    """Convolution, normalisation, ReLU."""

    def __init__(self, inputs: int, outputs: int, kernel: _Kernel, stride: int = 1, padding: _Kernel = 0) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride, padding, bias=False)
        self.bn = nn.BatchNorm2d(outputs, eps=0.001)

    def forward(self, x: Tensor) -> Tensor:
        """The unit's output."""
        return F.relu(self.bn(self.conv(x)))


class _Branches(nn.Module):
    """Chains of units side by side, whose outputs are joined; with `pool` the input is pooled beside them.

    `chains` name the units in the order they run. A last tuple of names forks: its units see the same input.
    """

    def __init__(
        self, units: Mapping[str, Unit], chains: tuple[tuple[str | tuple[str, ...], ...], ...], pool: str
    ) -> None:
        super().__init__()
        for name, unit in units.items():
            self.add_module(name, unit)
        self._chains = chains
        self._pool = pool

    def forward(self, x: Tensor) -> Tensor:
        """All branches along the channels."""
        outputs = [self._chain(x, chain) for chain in self._chains]
        if self._pool == "max":
            outputs.append(F.max_pool2d(x, 3, stride=2))
        else:
            outputs.append(self.get_submodule("branch_pool")(F.avg_pool2d(x, 3, stride=1, padding=1)))
        return torch.cat(outputs, 1)

    def _chain(self, x: Tensor, chain: tuple[str | tuple[str, ...], ...]) -> Tensor:
        for step in chain:
            if isinstance(step, str):
                x = self.get_submodule(step)(x)
            else:
                x = torch.cat([self.get_submodule(name)(x) for name in step], 1)
        return x


def _a(inputs: int, pooled: int) -> _Branches:
    units = {
        "branch1x1": Unit(inputs, 64, 1),
        "branch5x5_1": Unit(inputs, 48, 1),
        "branch5x5_2": Unit(48, 64, 5, padding=2),
        "branch3x3dbl_1": Unit(inputs, 64, 1),
        "branch3x3dbl_2": Unit(64, 96, 3, padding=1),
        "branch3x3dbl_3": Unit(96, 96, 3, padding=1),
        "branch_pool": Unit(inputs, pooled, 1),
    }
    chains = (
        ("branch1x1",),
        ("branch5x5_1", "branch5x5_2"),
        ("branch3x3dbl_1", "branch3x3dbl_2", "branch3x3dbl_3"),
    )
    return _Branches(units, chains, "average")


def _b(inputs: int) -> _Branches:
    units = {
        "branch3x3": Unit(inputs, 384, 3, stride=2),
        "branch3x3dbl_1": Unit(inputs, 64, 1),
        "branch3x3dbl_2": Unit(64, 96, 3, padding=1),
        "branch3x3dbl_3": Unit(96, 96, 3, stride=2),
    }
    return _Branches(units, (("branch3x3",), ("branch3x3dbl_1", "branch3x3dbl_2", "branch3x3dbl_3")), "max")


def _c(inputs: int, middle: int) -> _Branches:
    wide, high = ((1, 7), (0, 3)), ((7, 1), (3, 0))
    units = {
        "branch1x1": Unit(inputs, 192, 1),
        "branch7x7_1": Unit(inputs, middle, 1),
        "branch7x7_2": Unit(middle, middle, wide[0], padding=wide[1]),
        "branch7x7_3": Unit(middle, 192, high[0], padding=high[1]),
        "branch7x7dbl_1": Unit(inputs, middle, 1),
        "branch7x7dbl_2": Unit(middle, middle, high[0], padding=high[1]),
        "branch7x7dbl_3": Unit(middle, middle, wide[0], padding=wide[1]),
        "branch7x7dbl_4": Unit(middle, middle, high[0], padding=high[1]),
        "branch7x7dbl_5": Unit(middle, 192, wide[0], padding=wide[1]),
        "branch_pool": Unit(inputs, 192, 1),
    }
    chains = (
        ("branch1x1",),
        ("branch7x7_1", "branch7x7_2", "branch7x7_3"),
        tuple(f"branch7x7dbl_{number}" for number in range(1, 6)),
    )
    return _Branches(units, chains, "average")


def _d(inputs: int) -> _Branches:
    units = {
        "branch3x3_1": Unit(inputs, 192, 1),
        "branch3x3_2": Unit(192, 320, 3, stride=2),
        "branch7x7x3_1": Unit(inputs, 192, 1),
        "branch7x7x3_2": Unit(192, 192, (1, 7), padding=(0, 3)),
        "branch7x7x3_3": Unit(192, 192, (7, 1), padding=(3, 0)),
        "branch7x7x3_4": Unit(192, 192, 3, stride=2),
    }
    chains = (("branch3x3_1", "branch3x3_2"), tuple(f"branch7x7x3_{number}" for number in range(1, 5)))
    return _Branches(units, chains, "max")


def _e(inputs: int) -> _Branches:
    units = {
        "branch1x1": Unit(inputs, 320, 1),
        "branch3x3_1": Unit(inputs, 384, 1),
        "branch3x3_2a": Unit(384, 384, (1, 3), padding=(0, 1)),
        "branch3x3_2b": Unit(384, 384, (3, 1), padding=(1, 0)),
        "branch3x3dbl_1": Unit(inputs, 448, 1),
        "branch3x3dbl_2": Unit(448, 384, 3, padding=1),
        "branch3x3dbl_3a": Unit(384, 384, (1, 3), padding=(0, 1)),
        "branch3x3dbl_3b": Unit(384, 384, (3, 1), padding=(1, 0)),
        "branch_pool": Unit(inputs, 192, 1),
    }
    chains = (
        ("branch1x1",),
        ("branch3x3_1", ("branch3x3_2a", "branch3x3_2b")),
        ("branch3x3dbl_1", "branch3x3dbl_2", ("branch3x3dbl_3a", "branch3x3dbl_3b")),
    )
    return _Branches(units, chains, "average")


class Inception(nn.Module):
    """Images [n, 3, H, W] in [0, 1] to 2,048 features."""

    side = 299

    def __init__(self) -> None:
        super().__init__()
        stages: dict[str, nn.Module] = {
            "Conv2d_1a_3x3": Unit(3, 32, 3, stride=2),
            "Conv2d_2a_3x3": Unit(32, 32, 3),
            "Conv2d_2b_3x3": Unit(32, 64, 3, padding=1),
            "maxpool1": nn.MaxPool2d(3, stride=2),
            "Conv2d_3b_1x1": Unit(64, 80, 1),
            "Conv2d_4a_3x3": Unit(80, 192, 3),
            "maxpool2": nn.MaxPool2d(3, stride=2),
            "Mixed_5b": _a(192, 32),
            "Mixed_5c": _a(256, 64),
            "Mixed_5d": _a(288, 64),
            "Mixed_6a": _b(288),
            "Mixed_6b": _c(768, 128),
            "Mixed_6c": _c(768, 160),
            "Mixed_6d": _c(768, 160),
            "Mixed_6e": _c(768, 192),
            "Mixed_7a": _d(768),
            "Mixed_7b": _e(1280),
            "Mixed_7c": _e(2048),
        }
        for name, stage in stages.items():
            self.add_module(name, stage)

    def forward(self, x: Tensor) -> Tensor:
        """The pooled features; published weights expect pixels between -1 and 1."""
        x = 2 * F.interpolate(x, (self.side, self.side), mode="bilinear") - 1
        for stage in self.children():
            x = stage(x)
        return x.mean((2, 3))

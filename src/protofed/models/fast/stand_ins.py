"""Stand-ins for stages that are not trained: the same function of the same weights, computed with less work.

Batch normalisation is folded into the convolution before it. In evaluation mode it is, channel by channel,
y = g (z - m) / sqrt(v + eps) + b; with s = g / sqrt(v + eps) and z = W * x + c that is one convolution with kernels s W
and bias b + s (c - m). Convolutions on maps of a few positions, whose kernels are larger than what they are convolved
with, are done in the way that moves kernels least.
"""

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

from protofed.models.fast.layout import laid_out

_ROUNDING = 1e-9
_FEW_POSITIONS = 16
"""On maps up to 4x4 a convolution with channels last was measured to be slower than what stands in for it here."""


@dataclass(frozen=True)
class Recipe:
    """How the stand-in of a stage is made; modules are named by their paths in the stage."""

    folds: dict[str, str] = field(default_factory=dict)
    """Batch normalisations, and the convolutions they are folded into."""
    few_positions: tuple[str, ...] = ()
    """Convolutions whose maps are small."""


@torch.no_grad()
def find_recipe(stage: nn.Module, x: Tensor) -> Recipe:
    """How to make a stand-in for a stage, found by running it on `x`.

    A batch normalisation is folded where it takes what a convolution gives. That nothing else takes it as well cannot
    be seen, so the folded stage is compared with the stage itself, in float64; where they differ nothing is folded.
    """
    exact, x = deepcopy(stage).eval().double(), x.double()
    modules = dict(exact.named_modules())
    calls: list[tuple[str, Tensor, Tensor]] = []

    def record(path: str) -> Callable[..., None]:
        return lambda _, inputs, result: calls.append((path, inputs[0], result))

    recorded = [path for path, module in modules.items() if isinstance(module, _BatchNorm | _ConvNd)]
    hooks = [modules[path].register_forward_hook(record(path)) for path in recorded]
    expected = exact(x)
    for hook in hooks:
        hook.remove()
    made_by = {id(result): path for path, _, result in calls if isinstance(modules[path], _ConvNd)}
    folds = {
        path: made_by[id(inputs)]
        for path, inputs, _ in calls
        if isinstance(modules[path], _BatchNorm) and id(inputs) in made_by and modules[path].running_mean is not None
    }
    if (_folded(exact, folds)(x) - expected).abs().max() > _ROUNDING * expected.abs().max():
        folds = {}
    small = {
        path: None
        for path, _, result in calls
        if _is_plain(modules[path]) and result.shape[-2] * result.shape[-1] <= _FEW_POSITIONS
    }
    return Recipe(folds, tuple(small))


def stand_in(stage: nn.Module, recipe: Recipe, layout: str) -> nn.Module:
    """A module that computes what the stage does in evaluation mode, with the weights the stage has now."""
    copy = laid_out(_folded(stage, recipe.folds), layout)
    if layout == "channels-last":
        for path in recipe.few_positions:
            conv = copy.get_submodule(path)
            assert isinstance(conv, nn.Conv2d)
            _replace(copy, path, _OnFewPositions(conv))
    return copy


def _is_plain(module: nn.Module) -> bool:
    return isinstance(module, nn.Conv2d) and module.groups == 1 and module.padding_mode == "zeros"


class _OnFewPositions(nn.Module):
    """A convolution on small maps: with kernels of one position a product of matrices, else in the standard layout."""

    def __init__(self, conv: nn.Conv2d) -> None:
        super().__init__()
        self.conv = conv.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
        self.pointwise = conv.kernel_size == (1, 1) and conv.padding in ((0, 0), "same", "valid")

    def forward(self, x: Tensor) -> Tensor:
        """What the convolution gives."""
        if not self.pointwise:
            result: Tensor = self.conv(x.contiguous())
            return result
        rows, columns = self.conv.stride
        pixels = x[:, :, ::rows, ::columns].permute(0, 2, 3, 1)
        # One product of two matrices: of anything else torch makes a batch of products, and reads the kernels for each.
        flat = functional.linear(pixels.reshape(-1, pixels.shape[-1]), self.conv.weight.flatten(1), self.conv.bias)
        return flat.view(*pixels.shape[:-1], -1).permute(0, 3, 1, 2)


@torch.no_grad()
def _folded(stage: nn.Module, folds: dict[str, str]) -> nn.Module:
    """A copy of the stage, in evaluation mode and not to be trained, in which these normalisations are folded."""
    copy = deepcopy(stage).eval().requires_grad_(False)
    for norm_path, conv_path in folds.items():
        _fold(copy.get_submodule(conv_path), copy.get_submodule(norm_path))
        _replace(copy, norm_path, nn.Identity())
    return copy


def _fold(conv: Any, norm: Any) -> None:
    """Fold a normalisation into a convolution, in float64, so that it is rounded only once."""
    mean = norm.running_mean.double()
    scale = (1 if norm.weight is None else norm.weight.double()) / (norm.running_var.double() + norm.eps).sqrt()
    shift = 0 if norm.bias is None else norm.bias.double()
    bias = 0 if conv.bias is None else conv.bias.double()
    kernels = conv.weight.double() * scale.view(-1, *[1] * (conv.weight.dim() - 1))
    dtype = conv.weight.dtype
    conv.weight = nn.Parameter(kernels.to(dtype), requires_grad=False)
    conv.bias = nn.Parameter((shift + scale * (bias - mean)).to(dtype), requires_grad=False)


def _replace(model: nn.Module, path: str, module: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)

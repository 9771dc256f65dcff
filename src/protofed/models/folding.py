"""Folding batch normalisation that is not trained into the convolution before it: the same function, one pass less.

In evaluation mode batch normalisation is y = g (z - m) / sqrt(v + eps) + b, channel by channel. With s = g / sqrt(v + eps) and
z = W * x + c that is one convolution with kernels s W and bias b + s (c - m).
"""

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd

Folds = dict[str, str]
"""The path of a batch normalisation, and that of the convolution it is folded into."""

_ROUNDING = 1e-9


@torch.no_grad()
def find_folds(stage: nn.Module, x: Tensor) -> Folds:
    """Every batch normalisation of a stage that takes what a convolution gives; none where the stage is then another.

    Which module follows which is seen by running the stage on `x`. That nothing else uses what a convolution gives
    cannot be seen, so the folded stage is compared with the stage itself, in float64.
    """
    exact, x = deepcopy(stage).eval().double(), x.double()
    modules = dict(exact.named_modules())
    calls: list[tuple[str, Tensor, Tensor]] = []

    def watch(path: str) -> Any:
        return lambda module, given, result: calls.append((path, given[0], result))

    watched = [path for path, module in modules.items() if isinstance(module, _BatchNorm | _ConvNd)]
    hooks = [modules[path].register_forward_hook(watch(path)) for path in watched]
    expected = exact(x)
    for hook in hooks:
        hook.remove()
    made_by = {id(result): path for path, _, result in calls if isinstance(modules[path], _ConvNd)}
    folds = {
        path: made_by[id(given)]
        for path, given, _ in calls
        if isinstance(modules[path], _BatchNorm) and id(given) in made_by and modules[path].running_mean is not None
    }
    scale = expected.abs().max().clamp(min=1e-30)
    same = not folds or bool((folded(exact, folds)(x) - expected).abs().max() <= _ROUNDING * scale)
    return folds if same else {}


@torch.no_grad()
def folded(stage: nn.Module, folds: Folds) -> nn.Module:
    """A copy of the stage, in evaluation mode and not to be trained, in which these normalisations are folded."""
    copy = deepcopy(stage).eval().requires_grad_(False)
    for norm_path, conv_path in folds.items():
        norm, conv = copy.get_submodule(norm_path), copy.get_submodule(conv_path)
        assert isinstance(norm, _BatchNorm)
        assert isinstance(conv, _ConvNd)
        _fold(conv, norm)
        parent, _, name = norm_path.rpartition(".")
        setattr(copy.get_submodule(parent), name, nn.Identity())
    return copy


def _fold(conv: _ConvNd, norm: _BatchNorm) -> None:
    """Computed in float64, so that what is rounded is rounded once."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    mean, variance = norm.running_mean.double(), norm.running_var.double()
    weight = torch.ones_like(mean) if norm.weight is None else norm.weight.double()
    shift = torch.zeros_like(mean) if norm.bias is None else norm.bias.double()
    bias = torch.zeros_like(mean) if conv.bias is None else conv.bias.double()
    scale = weight / (variance + norm.eps).sqrt()
    kernels = conv.weight.double() * scale.view(-1, *[1] * (conv.weight.dim() - 1))
    conv.weight = _still(kernels, conv.weight)
    conv.bias = _still(shift + scale * (bias - mean), conv.weight)


def _still(value: Tensor, like: Tensor) -> nn.Parameter:
    return nn.Parameter(value.to(like.dtype), requires_grad=False)

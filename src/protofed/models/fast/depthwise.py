"""Depthwise convolution whose wide kernels get their gradient in pieces, a few columns at a time.

On a CPU torch leaves convolution to oneDNN. Its fast code for the gradient of depthwise kernels covers kernels of at
most three columns, and images with at least as many rows as the kernel; anything else is done by code meant for many
channels per group. For kernels of 5x5 that takes about ten times as long as the convolution itself. But each column of
a kernel has a gradient of its own: that of a narrower kernel, on those columns of the image that it meets.
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_aten = torch.ops.aten

_WIDEST = 3
"""Columns of a piece."""

Pair = tuple[int, int]
"""Rows, columns."""


def worth_pieces(x: Tensor, kernels: Tensor) -> bool:
    """Whether kernels [channels, 1, h, w] will need a gradient that is computed faster in pieces."""
    return (
        kernels.requires_grad
        and torch.is_grad_enabled()
        and kernels.shape[:2] == (x.shape[1], 1)
        and kernels.shape[3] > _WIDEST
        and x.dtype == torch.float32
        and x.device.type == "cpu"
        and not torch.is_autocast_enabled("cpu")
        # A small image alone is not left to oneDNN: torch would go through its channels one by one, for every piece.
        and len(x) > 1
    )


def convolved_depthwise(x: Tensor, kernels: Tensor, stride: Pair, padding: Pair) -> Tensor:
    """conv2d(x, kernels, None, stride, padding, groups=channels); only the kernels' gradient is rounded differently."""
    result: Tensor = _Depthwise.apply(x, kernels, stride, padding)  # type: ignore[no-untyped-call]
    return result


class _Depthwise(torch.autograd.Function):
    """Its gradient is made of differentiable operations, so second derivatives are right, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kernels: Tensor, stride: Pair, padding: Pair) -> Tensor:
        ctx.save_for_backward(x, kernels)
        ctx.stride, ctx.padding = stride, padding
        return functional.conv2d(x, kernels, None, stride, padding, groups=len(kernels))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, kernels = ctx.saved_tensors
        of_x, of_kernels, *_ = ctx.needs_input_grad
        return (
            _gradients(gradient, x, kernels, ctx.stride, ctx.padding, of="x")[0] if of_x else None,
            _in_pieces(gradient, x, kernels, ctx.stride, ctx.padding) if of_kernels else None,
            None,
            None,
        )


def _gradients(gradient: Tensor, x: Tensor, kernels: Tensor, stride: Pair, padding: Pair, *, of: str) -> list[Tensor]:
    """Of images, kernels and bias by torch; those that are not wanted are not computed."""
    wanted = [of == "x", of == "kernels", False]
    options = (stride, padding, (1, 1), False, (0, 0), len(kernels))
    return list(_aten.convolution_backward(gradient, x, kernels, None, *options, wanted))


def _in_pieces(gradient: Tensor, x: Tensor, kernels: Tensor, stride: Pair, padding: Pair) -> Tensor:
    """The gradient of the kernels."""
    (height, width), step = kernels.shape[2:], stride[1]
    (above, left), small = padding, x.shape[2] < height or x.shape[3] < width
    if any(padding) and (small or step > 1):
        x, above, left = functional.pad(x, (left, left, above, above)), 0, 0
    result = torch.empty_like(kernels)
    # Columns of a kernel that are `step` apart meet columns of the image that the others never meet: where each residue
    # is one piece, no column of the image is copied twice.
    for residue in range(step):
        for first in range(residue, width, step * _WIDEST):
            columns = slice(first, first + step * _WIDEST, step)
            piece = kernels[..., columns]
            seen = _columns(x, first - left, gradient.shape[3] + piece.shape[3] - 1, step)
            found = _gradients(gradient, seen, piece, (stride[0], 1), (above, 0), of="kernels")
            result[..., columns] = found[1]
    return result


def _columns(x: Tensor, first: int, count: int, step: int) -> Tensor:
    """So many columns of images; those beyond their edges are zero."""
    end = first + (count - 1) * step + 1
    before, after = max(-first, 0), max(end - x.shape[3], 0)
    inside = x[..., first + before : end - after : step]
    inside = functional.pad(inside, (before, after)) if before or after else inside
    # Left to itself torch copies a part of an image into the standard layout, and convolves there.
    return inside.contiguous(memory_format=torch.channels_last)

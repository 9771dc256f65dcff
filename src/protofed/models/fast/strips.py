"""Convolution, 2x2 max-pool and ReLU of small images as products of matrices.

A processor convolves few channels slowly: its vectors hold 16 numbers, and LeNet has 1, 6 and 16 channels. But it
multiplies matrices at full speed. So a strip of neighbouring columns of the output is computed at once: it is the sum,
over the rows of the kernel, of pieces of image rows times a matrix along whose diagonals the kernel's row lies. What
the zeros beside the diagonals cost is less than what full vectors save.

Inside, the rows of all images lie outermost: [row, image, column, channel]. The next row of every image is then one
step away in memory, and what the rows of a kernel are multiplied with are overlapping views of the same numbers.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_aten = torch.ops.aten

_WIDEST = 48
"""Numbers in a strip, columns x channels: wider ones hold more zeros, narrower ones fill no vector."""
_NARROWEST = 16


def worth_strips(images: torch.Size, kernels: torch.Size) -> bool:
    """Whether images of this shape are convolved faster in strips; kernels as convolutions have them, [O, I, h, w]."""
    cut = _Cut.of(images, kernels)
    return cut.strips > 0 and cut.pooled_rows > 0 and _NARROWEST <= cut.columns * kernels[0] <= _WIDEST


def convolved_in_strips(x: Tensor, kernels: Tensor, bias: Tensor) -> Tensor:
    """relu(max_pool2d(conv2d(x, kernels, bias), 2)), up to rounding."""
    result: Tensor = _Convolved.apply(x, kernels, bias)  # type: ignore[no-untyped-call]
    return result


class _Convolved(torch.autograd.Function):
    """Both ways by hand: as separate operations, moving the numbers would take longer than multiplying them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, kernels: Tensor, bias: Tensor) -> Tensor:
        ctx.cut = cut = _Cut.of(x.shape, kernels.shape)
        pieces, matrices = cut.pieces_of(x), cut.matrices_of(kernels)
        biases = bias.expand(cut.columns, -1).reshape(-1)
        convolved = torch.addbmm(biases, cut.by_kernel_row(pieces), matrices)
        pooled, places = _aten.max_pool2d_with_indices(cut.as_images(convolved), [2, 2], [2, 2])
        ctx.save_for_backward(pieces, matrices, pooled.relu_(), places)
        return cut.outside(pooled)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        pieces, matrices, result, places = ctx.saved_tensors
        cut: _Cut = ctx.cut
        of_x, of_kernels, of_bias = ctx.needs_input_grad
        pooled = _aten.threshold_backward(cut.inside(gradient), result, 0)
        # Of what was pooled torch looks at the shape alone: the places say which of four numbers was the largest.
        unpooled = cut.as_images(pooled.new_empty(4 * pooled.numel()))
        _aten.max_pool2d_with_indices_backward.grad_input(
            pooled, unpooled, [2, 2], [2, 2], [0, 0], [1, 1], False, places, grad_input=unpooled
        )
        convolved = unpooled.permute(0, 2, 3, 1).view(-1, matrices.shape[2])
        return (
            cut.gradient_of_images(convolved, matrices, pieces) if of_x else None,
            cut.gradient_of_kernels(convolved, pieces) if of_kernels else None,
            pooled.permute(0, 2, 3, 1).reshape(-1, cut.kernels[0]).sum(0) if of_bias else None,
        )


@dataclass(frozen=True)
class _Cut:
    """An output cut into strips. In a strip all even columns come first: what is pooled has equal positions."""

    images: torch.Size
    kernels: torch.Size
    strips: int
    columns: int
    """Of a strip."""
    pooled_rows: int

    @classmethod
    def of(cls, images: torch.Size, kernels: torch.Size) -> "_Cut":
        """The widest strips that are of equal width and not too wide."""
        outputs, _, height, width = kernels
        rows, columns = images[2] - height + 1, (images[3] - width + 1) // 2 * 2
        fitting = (size for size in range(2, columns + 1, 2) if columns % size == 0 and size * outputs <= _WIDEST)
        widest = max(fitting, default=2)
        return cls(images, kernels, columns // widest, widest, rows // 2)

    def pieces_of(self, x: Tensor) -> Tensor:
        """What each strip sees of each row of each image: [row, image, strip, column and channel]."""
        count, channels, height, width = self.images
        length = (self.columns + self.kernels[3] - 1) * channels
        rows = x.permute(2, 0, 3, 1).reshape(height, count, width * channels)
        return rows.unfold(2, length, self.columns * channels).contiguous()

    def by_kernel_row(self, pieces: Tensor) -> Tensor:
        """The pieces each row of a kernel is multiplied with: [kernel row, output row and image and strip, ...]."""
        length, step = pieces.shape[-1], pieces.stride(0)
        return pieces.as_strided((self.kernels[2], 2 * self.pooled_rows * step // length, length), (step, length, 1))

    def matrices_of(self, kernels: Tensor) -> Tensor:
        """For each row of a kernel what makes a strip of a piece: [kernel row, column and channel, strip]."""
        outputs, inputs, height, width = self.kernels
        matrices = kernels.new_zeros(height, (self.columns + width - 1) * inputs, self.columns * outputs)
        self._diagonals(matrices).copy_(kernels.permute(2, 3, 1, 0).contiguous())
        return matrices

    def gradient_of_kernels(self, convolved: Tensor, pieces: Tensor) -> Tensor:
        """From the gradient of the strips."""
        matrices = self.by_kernel_row(pieces).transpose(1, 2) @ convolved
        return self._diagonals(matrices).sum((0, 1)).permute(3, 2, 0, 1)

    def gradient_of_images(self, convolved: Tensor, matrices: Tensor, pieces: Tensor) -> Tensor:
        """From the gradient of the strips."""
        count, channels, height, width = self.images
        own = torch.zeros_like(pieces)
        for row, matrix in zip(self.by_kernel_row(own), matrices, strict=True):
            row.addmm_(convolved, matrix.t())
        rows = own.new_zeros(height, count, width * channels)
        step, length = self.columns * channels, own.shape[-1]
        for strip in range(self.strips):
            rows[:, :, strip * step : strip * step + length].add_(own[:, :, strip])
        return rows.view(height, count, width, channels).permute(1, 3, 0, 2)

    def as_images(self, convolved: Tensor) -> Tensor:
        """Strips as torch pools them best: images of two rows, even and odd columns, and channels last."""
        channels = self.columns // 2 * self.kernels[0]
        return convolved.view(self.pooled_rows, 2, -1, channels).permute(0, 3, 1, 2)

    def outside(self, pooled: Tensor) -> Tensor:
        """What was pooled, as [image, channel, row, column]."""
        rows = pooled.permute(0, 2, 3, 1).view(self.pooled_rows, self.images[0], -1, self.kernels[0])
        return rows.permute(1, 3, 0, 2)

    def inside(self, result: Tensor) -> Tensor:
        """The way back from `outside`."""
        channels = self.columns // 2 * self.kernels[0]
        return result.permute(2, 0, 3, 1).reshape(self.pooled_rows, 1, -1, channels).permute(0, 3, 1, 2)

    def _diagonals(self, matrices: Tensor) -> Tensor:
        """Positions of the kernels in matrices, once for each column of a strip: [pair, even or odd, h, w, I, O]."""
        outputs, inputs, height, width = self.kernels
        pairs, across = self.columns // 2, inputs * matrices.shape[2]
        return matrices.as_strided(
            (pairs, 2, height, width, inputs, outputs),
            (2 * across + outputs, across + pairs * outputs, matrices.stride(0), across, matrices.shape[2], 1),
        )

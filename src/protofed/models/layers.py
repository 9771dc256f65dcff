"""Small building blocks that several models share."""

from collections import OrderedDict
from collections.abc import Callable
from functools import wraps

import torch
from torch import Tensor, nn

from protofed.models.fast.strips import convolved_in_strips, worth_strips


class ConvPoolReLU(nn.Sequential):
    """Convolution, 2x2 max-pool, ReLU: pooling first leaves a quarter of the work to ReLU, with the same result."""

    conv: nn.Conv2d
    in_strips = False
    """Whether small images are convolved by products of matrices, where that is faster."""

    def __init__(self, inputs: int, outputs: int, *, kernel: int, padding: int = 0) -> None:
        convolved = nn.Conv2d(inputs, outputs, kernel, padding=padding)
        super().__init__(OrderedDict(conv=convolved, pool=nn.MaxPool2d(2), relu=nn.ReLU()))

    @property
    def fits_strips(self) -> bool:
        """Whether there is another way than torch's at all."""
        return self.conv.padding == (0, 0)

    def forward(self, x: Tensor) -> Tensor:
        """[n, inputs, h, w] to [n, outputs, h', w']."""
        kernels, bias = self.conv.weight, self.conv.bias
        if bias is not None and self.in_strips and worth_strips(x.shape, kernels.shape):
            return convolved_in_strips(x, kernels, bias)
        result: Tensor = super().forward(x)  # type: ignore[no-untyped-call]
        return result


def dense(inputs: int, outputs: int) -> nn.Sequential:
    """Fully connected layer on the flattened input, then ReLU."""
    return nn.Sequential(OrderedDict(flatten=nn.Flatten(), linear=nn.Linear(inputs, outputs), relu=nn.ReLU()))


def in_full_precision(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same function of tensors, computed at least in float32, even under autocast.

    Squared distances as |x|^2 - 2 x y + |y|^2 are small differences of large numbers: in bfloat16 nothing is left.
    """

    @wraps(function)
    def computed(*tensors: Tensor) -> Tensor:
        with torch.autocast(tensors[0].device.type, enabled=False):
            return function(*(tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors))

    return computed

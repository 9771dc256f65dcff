"""Small building blocks that several models share."""

from collections import OrderedDict

from torch import Tensor, nn

from protofed.models.strips import convolved_in_strips, worth_strips


class Convolution(nn.Sequential):
    """Convolution, 2x2 max-pool, ReLU: after the pool there is a quarter left to do, and the numbers are the same."""

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

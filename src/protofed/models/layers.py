"""Small building blocks that several models share."""

from collections import OrderedDict

from torch import nn


def convolution(inputs: int, outputs: int, *, kernel: int, padding: int = 0) -> nn.Sequential:
    """Convolution, 2x2 max-pool, ReLU: after the pool there is a quarter left to do, and the numbers are the same."""
    convolved = nn.Conv2d(inputs, outputs, kernel, padding=padding)
    return nn.Sequential(OrderedDict(conv=convolved, pool=nn.MaxPool2d(2), relu=nn.ReLU()))


def dense(inputs: int, outputs: int) -> nn.Sequential:
    """Fully connected layer on the flattened input, then ReLU."""
    return nn.Sequential(OrderedDict(flatten=nn.Flatten(), linear=nn.Linear(inputs, outputs), relu=nn.ReLU()))

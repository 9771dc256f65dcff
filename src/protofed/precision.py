"""Where half of a number's digits are not enough."""

from collections.abc import Callable
from functools import wraps

import torch
from torch import Tensor


def in_full_precision(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The same function of tensors, computed in float32 at least, also under autocast.

    Squared distances as |x|^2 - 2 x y + |y|^2 are small differences of large numbers: of bfloat16 nothing is left.
    """

    @wraps(function)
    def computed(*tensors: Tensor) -> Tensor:
        with torch.autocast(tensors[0].device.type, enabled=False):
            return function(*(tensor.to(torch.promote_types(tensor.dtype, torch.float32)) for tensor in tensors))

    return computed

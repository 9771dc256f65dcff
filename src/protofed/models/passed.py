"""Images that have passed the frozen part of a network: what came out of it is known, the images are not at hand."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


class ImagesWanted(Exception):
    """Something is computed from images that are not at hand."""


DESCRIPTIONS = {
    Tensor.__len__,
    Tensor.size,
    Tensor.dim,
    Tensor.is_floating_point,
    *(getattr(Tensor, name).__get__ for name in ("shape", "dtype", "device", "ndim", "requires_grad")),
}
"""What a batch tells about itself without its images."""


class PassedImages(Tensor):
    """Stands for a batch of images such as `like`; a network may look up what came out of its first stages for it.

    A loss that looks at the images themselves raises ImagesWanted, so nothing else is ever mistaken for them.
    """

    @staticmethod
    def __new__(cls, like: Tensor, count: int) -> "PassedImages":
        """A batch of so many."""
        shape = (count, *like.shape[1:])
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)

    def __init__(self, like: Tensor, count: int) -> None:
        """Nothing is kept of `like`."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Shape and the like are known, and nothing else."""
        if func not in DESCRIPTIONS:
            raise ImagesWanted
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """For what reaches torch without its Python interface."""
        raise ImagesWanted

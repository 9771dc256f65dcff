"""A classifier as a chain of named stages, cut into features and head."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType

import torch
from torch import Tensor, nn

from protofed.errors import UserError, unknown_name

ImageShape = tuple[int, int, int]
"""Channels, height, width."""


@contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Evaluation mode inside the context; afterwards every module returns to its previous mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


class Split(nn.Module):
    """Named stages that run one after the other; the features are the output of the stage called `cut`.

    Parts (a generator, say) may be attached beside the stages: they are trained, sent and stored with the model, but
    do not run in its chain.
    """

    def __init__(
        self, stages: Mapping[str, nn.Module] | Iterable[tuple[str, nn.Module]], *, cut: str, dim: int, classes: int
    ) -> None:
        super().__init__()
        self.cut = cut
        self.dim = dim
        self.classes = classes
        self.stage_names: tuple[str, ...] = ()
        """The stages in the order they run."""
        for name, stage in stages.items() if isinstance(stages, Mapping) else stages:
            self.attach(name, stage)
            self.stage_names += (name,)
        self.stages_until(cut)

    def attach(self, name: str, part: nn.Module) -> None:
        """Add a module that is not a stage."""
        if hasattr(self, name):
            raise UserError(f"the name {name!r} is already taken in this model; every stage and part needs its own")
        self.add_module(name, part)

    def stages(self) -> dict[str, nn.Module]:
        """The stages by name, in the order they run; a method's `build` puts its own between them."""
        return {name: self.get_submodule(name) for name in self.stage_names}

    def features(self, x: Tensor, cut: str | None = None) -> Tensor:
        """The output of stage `cut` (the model's own cut by default)."""
        return self.between(x, 0, self.stages_until(cut))

    def head(self, h: Tensor, cut: str | None = None) -> Tensor:
        """Class scores from the output of stage `cut`."""
        return self.between(h, self.stages_until(cut), len(self.stage_names))

    def between(
        self, x: Tensor, first: int, end: int, stand_ins: Mapping[str, nn.Module] = MappingProxyType({})
    ) -> Tensor:
        """The output of the stages `first` to `end` - 1 for x; a stand-in replaces its stage."""
        for name in self.stage_names[first:end]:
            x = (stand_ins.get(name) or self._modules[name])(x)  # type: ignore[misc]
        return x

    def forward(self, x: Tensor) -> Tensor:
        """Class scores."""
        return self.head(self.features(x))

    def feature_shape(self, image_shape: ImageShape, cut: str | None = None) -> tuple[int, ...]:
        """Shape of one image's features at `cut`; weights, statistics and training mode stay as they are."""
        sample = next(self.parameters(), torch.empty(0))
        with torch.no_grad(), evaluation_mode(self):
            images = torch.zeros(1, *image_shape, dtype=sample.dtype, device=sample.device)
            return tuple(self.features(images, cut).shape[1:])

    def stages_until(self, cut: str | None) -> int:
        """How many stages run up to and including `cut`."""
        name = self.cut if cut is None else cut
        if name not in self.stage_names:
            raise unknown_name("stage", name, self.stage_names)
        return self.stage_names.index(name) + 1

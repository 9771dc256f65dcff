"""Features of length 1 under a linear head: the network of methods whose head is computed from class statistics."""

import torch
from torch import Tensor, nn
from torch.nn import functional

from protofed.models.freezing import Frozen
from protofed.models.split import Split

HEAD = "fc"
"""The stage that is computed, a linear layer."""


class Cheap(nn.Module):
    """A stage that costs next to nothing: what stages before it made is kept, and serves networks with other ends."""


class UnitLength(Cheap):
    """Every vector scaled to length 1; a vector of zeros stays as it is."""

    def forward(self, x: Tensor) -> Tensor:
        """[n, d] to [n, d]."""
        return functional.normalize(x, dim=1, eps=1e-12)


class RandomProjection(Cheap):
    """x times a random matrix that whoever knows the seed can make, so that it never travels."""

    def __init__(self, inputs: int, outputs: int, rng: torch.Generator) -> None:
        super().__init__()
        matrix = torch.randn(outputs, inputs, generator=rng, dtype=torch.float64) / outputs**0.5
        self.matrix = nn.Parameter(matrix.to(torch.get_default_dtype()))

    def forward(self, x: Tensor) -> Tensor:
        """[n, inputs] to [n, outputs]."""
        return functional.linear(x, self.matrix)


def with_unit_features(base: Split, project: int | None = None, rng: torch.Generator | None = None) -> Split:
    """The model up to its cut, its features scaled to length 1, and one linear layer of zeros for a head.

    With `project` features are brought to that many dimensions before, by a random matrix drawn from `rng`.
    """
    kept = base.stage_names[: base.stages_until(None)]
    stages: dict[str, nn.Module] = {name: base.get_submodule(name) for name in kept}
    dim = base.dim
    if project is not None:
        assert rng is not None, "a projection is drawn from somewhere"
        stages["projection"] = Frozen(RandomProjection(dim, project, rng))
        dim = project
    stages["unit"] = UnitLength()
    linear = nn.Linear(dim, base.classes)
    nn.init.zeros_(linear.weight)
    nn.init.zeros_(linear.bias)
    stages[HEAD] = linear
    return Split(stages, cut="unit", dim=dim, classes=base.classes)

"""Stand-ins compute what their stages do: batch normalisation folded, small maps as products of matrices."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from protofed.models import build_model, tensors
from protofed.models.fast.stand_ins import find_recipe, stand_in


def lived_in(model: nn.Module) -> nn.Module:
    """In float64, with the statistics and scales of a network that has seen data."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.running_mean, module.bias):
                nn.init.normal_(tensor)  # type: ignore[arg-type]
            for tensor in (module.running_var, module.weight):
                nn.init.uniform_(tensor, 0.5, 2)  # type: ignore[arg-type]
    return model.double().eval()


def gradient(module: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (found,) = torch.autograd.grad(module(x).sin().sum(), x)
    return found


@pytest.mark.parametrize("layout", ["standard", "channels-last"])
@pytest.mark.parametrize("name", ["resnet10", "resnet50"])
def test_every_stage_of_a_residual_network_in_float64(name: str, layout: str) -> None:
    torch.manual_seed(0)
    model: Any = lived_in(build_model(name, (3, 32, 32), 2, {"width": 4}))
    before = deepcopy(tensors(model))
    x = torch.randn(3, 3, 32, 32, dtype=torch.float64)
    folded = 0
    for stage in model.stages().values():
        recipe = find_recipe(stage, x)
        folded += len(recipe.folds)
        other = stand_in(stage, recipe, layout)
        torch.testing.assert_close(other(x), stage(x), rtol=1e-11, atol=1e-11)
        torch.testing.assert_close(gradient(other, x), gradient(stage, x), rtol=1e-10, atol=1e-10)
        assert not any(isinstance(module, nn.BatchNorm2d) for module in other.modules())
        assert not any(param.requires_grad for param in other.parameters())
        x = stage(x).detach()
    assert folded == sum(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    assert all(torch.equal(before[key], tensor) for key, tensor in tensors(model).items())


class Twice(nn.Module):
    """Its convolution is normalised, and also used as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 2, 3), nn.BatchNorm2d(2)

    def forward(self, x: Tensor) -> Tensor:
        z = self.conv(x)
        result: Tensor = self.norm(z) + z
        return result


@pytest.mark.parametrize(
    "stage",
    [
        Twice(),
        nn.Sequential(nn.BatchNorm2d(2), nn.Conv2d(2, 2, 1)),
        nn.Sequential(nn.Conv2d(2, 2, 1), nn.ReLU(), nn.BatchNorm2d(2)),
        nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2, track_running_stats=False)),
        nn.Sequential(nn.Conv2d(2, 2, 1), nn.GroupNorm(1, 2)),
    ],
)
def test_what_does_not_follow_a_convolution_alone_is_not_folded(stage: nn.Module) -> None:
    for norm in stage.modules():
        if isinstance(norm, nn.BatchNorm2d) and norm.running_var is not None:
            nn.init.constant_(norm.running_var, 3.0)
    x = torch.randn(2, 2, 5, 5)
    recipe = find_recipe(stage, x)
    assert recipe.folds == {}
    torch.testing.assert_close(stand_in(stage, recipe, "standard")(x), deepcopy(stage).eval()(x))


@pytest.mark.parametrize("options", [{}, {"stride": 2}, {"kernel_size": 3, "padding": 1, "stride": 2}, {"padding": 1}])
@pytest.mark.parametrize("bias", [True, False])
def test_convolutions_on_few_positions(options: dict[str, int], bias: bool) -> None:
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 5, **{"kernel_size": 1, **options}, bias=bias).double()
    x = torch.randn(2, 3, 2, 2, dtype=torch.float64)
    recipe = find_recipe(nn.Sequential(conv), x)
    assert recipe.few_positions == ("0",)
    other = stand_in(nn.Sequential(conv), recipe, "channels-last")
    assert not isinstance(other[0], nn.Conv2d)  # type: ignore[index]
    torch.testing.assert_close(other(x), conv(x))
    torch.testing.assert_close(gradient(other, x), gradient(conv, x))


def test_large_maps_and_grouped_convolutions_stay_convolutions() -> None:
    assert find_recipe(nn.Conv2d(2, 2, 1), torch.randn(1, 2, 5, 5)).few_positions == ()
    assert find_recipe(nn.Conv2d(2, 2, 1, groups=2), torch.randn(1, 2, 2, 2)).few_positions == ()

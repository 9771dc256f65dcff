import pytest
import torch

from protofed.errors import UserError
from protofed.models import Split, build_model, of_type
from protofed.models.adapters import Adapter, with_adapters


def count(model: Split, names: frozenset[str]) -> int:
    return sum(param.numel() for name, param in model.named_parameters() if name in names)


def small(classes: int = 3) -> Split:
    torch.manual_seed(0)
    return build_model("resnet10", (3, 16, 16), classes, {"width": 4}).eval()


@pytest.mark.parametrize(("channels", "expected"), [(256, 8_464), (512, 33_312), (1024, 132_160), (2048, 526_464)])
def test_size_of_an_adapter(channels: int, expected: int) -> None:
    assert sum(param.numel() for param in Adapter(channels).parameters()) == expected


def test_resnet50_gets_700400_numbers_of_adapters_and_keeps_its_own() -> None:
    base = build_model("resnet50", (3, 64, 64), 2)
    model = with_adapters(base, reduction=16, kernel=1, init="zero_up")
    chosen = of_type(Adapter).names(model)
    assert count(model, chosen) == 700_400
    assert sum(param.numel() for param in model.parameters()) == 23_512_130 + 700_400
    assert set(model.state_dict()) - chosen == set(base.state_dict())
    assert model.stage_names == (
        *("stem", "layer1", "adapter1", "layer2", "adapter2", "layer3", "adapter3", "layer4", "adapter4"),
        *("pool", "fc"),
    )
    assert (model.cut, model.dim, model.classes) == ("pool", 2048, 2)


def test_an_adapter_is_u_plus_up_relu_down_u() -> None:
    adapter = Adapter(2, reduction=2)
    with torch.no_grad():
        adapter.down.weight.copy_(torch.tensor([1.0, -1.0]).view(1, 2, 1, 1))
        adapter.down.bias.fill_(0.5)
        adapter.up.weight.copy_(torch.tensor([2.0, 3.0]).view(2, 1, 1, 1))
        adapter.up.bias.copy_(torch.tensor([0.0, 1.0]))
    u = torch.tensor([[3.0, 1.0], [0.0, 4.0]]).view(2, 2, 1, 1)
    # relu(3 - 1 + .5) = 2.5 and relu(0 - 4 + .5) = 0
    expected = torch.tensor([[3 + 5.0, 1 + 7.5 + 1], [0.0, 4 + 1.0]]).view(2, 2, 1, 1)
    torch.testing.assert_close(adapter(u), expected)


def test_zero_up_starts_as_the_base_model_and_kaiming_does_not() -> None:
    base, images = small(), torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(
        with_adapters(base, reduction=16, kernel=1, init="zero_up").eval()(images), base(images), rtol=0, atol=0
    )
    changed = with_adapters(base, reduction=16, kernel=1, init="kaiming").eval()
    assert not torch.allclose(changed(images), base(images))
    assert all((module.up.bias == 0).all() for module in changed.modules() if isinstance(module, Adapter))


@pytest.mark.parametrize("kernel", [1, 3])
def test_any_kernel_keeps_the_size_of_the_maps(kernel: int) -> None:
    u = torch.randn(2, 4, 5, 3)
    assert Adapter(4, reduction=2, kernel=kernel, init="kaiming")(u).shape == u.shape


def test_a_narrow_stage_keeps_one_channel_in_its_adapter() -> None:
    assert Adapter(4, reduction=16).down.out_channels == 1


def test_a_model_without_residual_stages_is_refused_in_words() -> None:
    base = build_model("mlp", (1, 8, 8), 3)
    with pytest.raises(UserError, match=r"layer1 to layer4 of a residual network.*hidden, fc.*resnet10, resnet18"):
        with_adapters(base, reduction=16, kernel=1, init="zero_up")

import pytest
import torch
from torch import nn

from protofed.models import Split, build_model, features, head, normalisation, tensors


def count(model: Split, names: frozenset[str] | None = None) -> int:
    """Learnable numbers, of all tensors or of the named ones."""
    return sum(p.numel() for name, p in model.named_parameters() if names is None or name in names)


@pytest.fixture(scope="module")
def resnet50() -> Split:
    return build_model("resnet50", (3, 224, 224), 2)


@pytest.mark.parametrize(
    ("name", "image_shape", "classes", "expected"),
    [
        ("lenet5", (1, 28, 28), 10, 44_426),
        ("lenet5", (1, 28, 28), 47, 47_571),
        ("lenet5", (3, 32, 32), 10, 62_006),
        ("cnn", (3, 32, 32), 10, 163_690),
        ("mlp", (1, 28, 28), 10, 784 * 128 + 128 + 128 * 10 + 10),
        ("resnet10", (3, 32, 32), 10, 4_903_242),
        ("resnet18", (3, 32, 32), 7, 11_172_423),
    ],
)
def test_whole_model(name: str, image_shape: tuple[int, int, int], classes: int, expected: int) -> None:
    assert count(build_model(name, image_shape, classes)) == expected


def test_resnet50(resnet50: Split) -> None:
    assert count(resnet50) == 23_512_130
    assert count(resnet50, features.names(resnet50)) == 23_508_032
    assert count(resnet50, head.names(resnet50)) == 4_098


def test_resnet50_normalisation_includes_the_shortcuts(resnet50: Split) -> None:
    chosen = normalisation.names(resnet50)
    assert count(resnet50, chosen) == 53_120
    assert count(resnet50, frozenset(name for name in chosen if "downsample" in name)) == 7_680


@pytest.mark.parametrize(
    ("name", "classes", "learnable_tensors", "affine"), [("resnet10", 10, 38, 5_760), ("resnet18", 7, 62, 9_600)]
)
def test_small_resnets_have_as_many_statistics_as_affine_numbers(
    name: str, classes: int, learnable_tensors: int, affine: int
) -> None:
    model = build_model(name, (3, 32, 32), classes)
    chosen = normalisation.names(model)
    assert len(list(model.parameters())) == learnable_tensors
    assert count(model, chosen) == affine
    assert sum(tensors(model)[name].numel() for name in chosen) == 2 * affine


def test_resnet_starts_with_unit_gains_and_kaiming_fan_out() -> None:
    model = build_model("resnet10", (3, 32, 32), 10)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert (module.weight == 1).all()
        if isinstance(module, nn.Conv2d) and module.weight.numel() > 10_000:
            fan_out = module.out_channels * module.kernel_size[0] * module.kernel_size[1]
            assert module.weight.std().item() == pytest.approx((2 / fan_out) ** 0.5, rel=0.05)


def test_resnet_can_start_as_pytorch_starts_convolutions() -> None:
    torch.manual_seed(0)
    for module in build_model("resnet10", (3, 32, 32), 10, {"init": "pytorch"}).modules():
        if isinstance(module, nn.Conv2d):
            bound = (module.in_channels * module.kernel_size[0] * module.kernel_size[1]) ** -0.5
            assert 0.99 * bound < module.weight.abs().max().item() <= bound
            assert module.weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.05)

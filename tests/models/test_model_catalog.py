import inspect
from collections.abc import Callable
from typing import Annotated, Literal

import pytest
import torch
from pydantic import Field
from torch import nn

from protofed.errors import UserError
from protofed.models import Split, build_model, catalog, describe, model_names, register_model


@pytest.fixture(autouse=True)
def restored_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "_models", dict(catalog._models))


def identity_builder(_: tuple[int, int, int], classes: int) -> Split:
    return Split([("fc", nn.Identity())], cut="fc", dim=1, classes=classes)


def test_our_models_are_known() -> None:
    assert {"cnn", "lenet5", "mlp", "resnet10", "resnet18", "resnet50"} <= set(model_names())
    assert list(model_names()) == sorted(model_names())


def test_options_may_be_text() -> None:
    model = build_model("resnet10", (3, 32, 32), 10, {"width": "8", "stem": "standard", "stem_maxpool": "off"})
    assert model.dim == 64
    assert model.feature_shape((3, 32, 32), "stem") == (8, 16, 16)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": "wide"}, "model.width=wide is not valid; it takes a whole number >= 1"),
        ({"width": 0}, "model.width=0 is not valid; it takes a whole number >= 1"),
        ({"stem": "big"}, r"model.stem=big is not valid; it takes cifar\|standard"),
        ({"stem_maxpool": "maybe"}, r"model.stem_maxpool=maybe is not valid; it takes on\|off"),
        ({"widht": 8}, "unknown setting of model 'resnet10': 'widht'; did you mean width"),
    ],
)
def test_bad_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        build_model("resnet10", (3, 32, 32), 10, options)


def test_option_of_a_model_without_options() -> None:
    with pytest.raises(UserError, match=r"model.width: model 'lenet5' has no settings"):
        build_model("lenet5", (1, 28, 28), 10, {"width": 8})


def test_unknown_model() -> None:
    with pytest.raises(UserError, match="unknown model 'resnet11'; did you mean resnet"):
        build_model("resnet11", (3, 32, 32), 10)
    with pytest.raises(UserError, match="unknown model"):
        describe("resnet11")


@pytest.mark.parametrize(("name", "side"), [("lenet5", 16), ("cnn", 8)])
def test_images_too_small(name: str, side: int) -> None:
    build_model(name, (1, side, side), 10)
    with pytest.raises(
        UserError, match=f"'{name}' needs images of at least {side}x{side} pixels, not {side}x{side - 1}"
    ):
        build_model(name, (1, side, side - 1), 10)


@pytest.mark.parametrize(("shape", "classes"), [((0, 8, 8), 3), ((1, 8), 3), ((1, 8, 8), 0)])
def test_impossible_shapes(shape: tuple[int, ...], classes: int) -> None:
    with pytest.raises(UserError, match="cannot be built for images"):
        build_model("mlp", shape, classes)  # type: ignore[arg-type]


def test_description_has_type_default_and_doc_of_each_option() -> None:
    options = describe("resnet50").options
    assert list(options) == ["width", "stem", "stem_maxpool", "norm", "init"]
    assert (options["width"].values, options["width"].default) == ("a whole number >= 1", 64)
    assert (options["stem"].values, options["stem"].default) == ("cifar|standard", "standard")
    assert options["stem_maxpool"].values == "on|off"
    assert all(option.description for option in options.values())


def test_plugin_model() -> None:
    @register_model("tiny", description="a user's own")
    def tiny(
        _: tuple[int, int, int],
        classes: int,
        *,
        size: int,
        bias: bool = True,
        kind: Literal["plain"] = "plain",
        scale: Annotated[float, Field(gt=0, le=1, description="of the weights")] = 1.0,
    ) -> Split:
        assert (kind, scale) == ("plain", 0.5)
        stages = [("body", nn.Flatten()), ("fc", nn.Linear(size, classes, bias=bias))]
        return Split(stages, cut="body", dim=size, classes=classes)

    assert "tiny" in model_names()
    assert build_model("tiny", (1, 2, 2), 3, {"size": "4", "bias": "off", "scale": "0.5"}).state_dict().keys() == {
        "fc.weight"
    }
    scale = describe("tiny").options["scale"]
    assert (scale.values, scale.default, scale.description) == ("a number > 0 and <= 1", 1.0, "of the weights")
    assert describe("tiny").options["kind"].values == "plain"
    assert describe("tiny").options["size"].default is inspect.Parameter.empty
    with pytest.raises(UserError, match=r"model 'tiny' needs the setting model.size, a whole number"):
        build_model("tiny", (1, 2, 2), 3)


def test_a_name_belongs_to_one_builder() -> None:
    register: Callable[..., object] = register_model("mine", description="")
    register(identity_builder)
    register(identity_builder)
    with pytest.raises(UserError, match="a model named 'mine' already exists"):
        register(lambda image_shape, classes: identity_builder(image_shape, classes))


def test_option_without_annotation_is_refused() -> None:
    with pytest.raises(UserError, match="setting '_size' of model 'untyped' needs a type annotation"):
        register_model("untyped", description="")(lambda shape, classes, *, _size=3: identity_builder(shape, classes))


def test_builder_must_return_a_split() -> None:
    register_model("bare", description="")(lambda _, classes: nn.Linear(1, classes))  # type: ignore[type-var]
    with pytest.raises(UserError, match="model 'bare' was built as a Linear; its builder must return a Split"):
        build_model("bare", (1, 2, 2), 3)


def test_positions_of_a_local_network_see_19_pixels_instead_of_49() -> None:
    for local, seen in ((False, 49), (True, 19)):
        torch.manual_seed(0)
        model = build_model("resnet10", (1, 64, 64), 2, {"width": 4, "local": local}).eval()
        image = torch.rand(1, 1, 64, 64, requires_grad=True)
        model.features(image, "layer4")[0, :, 4, 4].sum().backward()
        assert image.grad is not None
        rows = image.grad[0, 0].abs().sum(1).nonzero()[:, 0]
        assert int(rows[-1] - rows[0]) + 1 == seen

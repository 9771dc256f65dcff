import copy
from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from protofed.errors import UserError
from protofed.models import ImageShape, Split, build_model

SMALL_MODELS: list[tuple[str, ImageShape, dict[str, object]]] = [
    ("lenet5", (1, 28, 28), {}),
    ("lenet5", (3, 17, 20), {}),
    ("cnn", (3, 32, 32), {}),
    ("cnn", (1, 8, 13), {}),
    ("mlp", (1, 8, 8), {"hidden": 16}),
    ("resnet10", (3, 16, 16), {"width": 8}),
    ("resnet18", (1, 16, 16), {"width": 8}),
    ("resnet50", (3, 32, 32), {"width": 8}),
    ("resnet10", (3, 32, 32), {"width": 8, "stem": "standard", "stem_maxpool": False}),
]


def build(name: str, shape: ImageShape, options: dict[str, object], seed: int = 0) -> Split:
    torch.manual_seed(seed)
    return build_model(name, shape, 5, options).eval()


@pytest.mark.parametrize(("name", "shape", "options"), SMALL_MODELS)
def test_head_of_features_is_the_model_at_every_cut(name: str, shape: ImageShape, options: dict[str, object]) -> None:
    model = build(name, shape, options)
    images = torch.randn(2, *shape)
    scores = model(images)
    assert scores.shape == (2, 5)
    assert torch.equal(model.head(model.features(images)), scores)
    for cut in model.stage_names:
        h = model.features(images, cut)
        assert torch.equal(model.head(h, cut), scores)
        assert tuple(h.shape[1:]) == model.feature_shape(shape, cut)
    assert model.feature_shape(shape) == (model.dim,)


@pytest.mark.parametrize(
    ("name", "shape", "options"), [("lenet5", (1, 28, 28), {}), ("resnet10", (3, 16, 16), {"width": 8})]
)
def test_two_sets_of_weights_under_functional_call_and_vmap(
    name: str, shape: ImageShape, options: dict[str, object]
) -> None:
    models = [build(name, shape, options, seed).double() for seed in (0, 1)]
    images = torch.randn(2, 3, *shape, dtype=torch.float64)
    expected = torch.stack([model(x) for model, x in zip(models, images, strict=True)])
    called = functional_call(models[0], models[1].state_dict(), (images[1],))
    torch.testing.assert_close(called, expected[1])

    parameters, buffers = stack_module_state(models)

    def scores(parameters: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor) -> Tensor:
        result: Tensor = functional_call(models[0], (parameters, buffers), (x,))
        return result

    torch.testing.assert_close(vmap(scores)(parameters, buffers, images), expected, rtol=1e-10, atol=1e-10)


def test_gradients_pass_through_vmap() -> None:
    models = [build("lenet5", (1, 16, 16), {}, seed).double() for seed in (0, 1)]
    images = torch.randn(2, 1, 16, 16, dtype=torch.float64)
    parameters, _ = stack_module_state(models)

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        result: Tensor = functional_call(models[0], parameters, (images,))
        return result.square().mean()

    together = vmap(torch.func.grad(loss))(parameters)
    for position, model in enumerate(models):
        model(images).square().mean().backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(together[name][position], parameter.grad, rtol=1e-10, atol=1e-10)


def test_parameter_names_are_stage_then_torchvision_names() -> None:
    names = set(build("resnet18", (3, 16, 16), {"width": 4}).state_dict())
    assert {
        "stem.conv1.weight",
        "stem.bn1.running_var",
        "layer1.0.conv1.weight",
        "layer2.0.downsample.0.weight",
    } <= names
    assert {"layer2.0.downsample.1.bias", "layer4.1.bn2.weight", "fc.weight", "fc.bias"} <= names
    assert "layer1.0.downsample.0.weight" not in names


def test_stem_options_change_the_resolution() -> None:
    def side_after_stem(**options: object) -> int:
        return build("resnet10", (3, 32, 32), {"width": 4, **options}).feature_shape((3, 32, 32), "stem")[-1]

    assert side_after_stem() == 32
    assert side_after_stem(stem_maxpool=True) == 16
    assert side_after_stem(stem="standard") == 8
    assert side_after_stem(stem="standard", stem_maxpool=False) == 16


def test_feature_shape_leaves_the_model_alone() -> None:
    model = build("resnet10", (3, 16, 16), {"width": 4}).train()
    model.get_submodule("layer1").eval()
    before = copy.deepcopy(model.state_dict())
    modes = [module.training for module in model.modules()]
    assert model.feature_shape((3, 16, 16), "layer2") == (8, 8, 8)
    assert [module.training for module in model.modules()] == modes
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.parametrize("training", [True, False])
def test_no_stage_changes_what_it_is_given(training: bool) -> None:
    for name, shape, options in SMALL_MODELS:
        model = build(name, shape, options).train(training)
        x = torch.randn(4, *shape)
        for number, stage in enumerate(model.stage_names):
            given = x.clone()
            after = model.between(x, number, number + 1)
            assert torch.equal(x, given), (name, stage)
            x = after


def test_unknown_cut_is_named() -> None:
    model = build("lenet5", (1, 28, 28), {})
    with pytest.raises(UserError, match="unknown stage 'conv3'; did you mean"):
        model.features(torch.zeros(1, 1, 28, 28), "conv3")
    with pytest.raises(UserError, match="unknown stage 'pool'"):
        model.head(torch.zeros(1, 120), "pool")
    with pytest.raises(UserError, match="unknown stage 'b'; known: a"):
        Split(OrderedDict(a=nn.Identity()), cut="b", dim=1, classes=1)


@pytest.mark.parametrize("taken", ["a", "head", "cut"])
def test_stage_names_must_be_free(taken: str) -> None:
    with pytest.raises(UserError, match=f"the name '{taken}' is already taken"):
        Split([("a", nn.Identity()), (taken, nn.Identity())], cut="a", dim=1, classes=1)

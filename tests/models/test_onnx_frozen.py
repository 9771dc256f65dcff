"""Frozen stages on ONNX Runtime compute what torch does; torch takes over where they cannot."""

import logging
import os
from importlib.util import find_spec
from multiprocessing import get_context

import onnxruntime
import pytest
import torch
from torch import Tensor, nn

from protofed.models import Split, build_model
from protofed.models.adapters import with_adapters
from protofed.models.fast import onnx_frozen
from protofed.models.fast.onnx_frozen import OnnxExtractor, TorchExtractor, frozen_extractor
from protofed.models.pretrained import imagenet_classifier

SHAPE = (3, 64, 64)


def prefix(model: Split, cut: str | None = None) -> list[nn.Module]:
    return list(model.stages().values())[: model.stages_until(cut)]


@pytest.fixture(scope="module")
def lite0() -> Split:
    return imagenet_classifier("efficientnet_lite0", SHAPE)


@pytest.mark.parametrize("name", ["efficientnet_lite0", "efficientnet_lite1", "efficientnet_lite2"])
@pytest.mark.parametrize("channels", [1, 3])
@torch.no_grad()
def test_pretrained_features(name: str, channels: int) -> None:
    model = imagenet_classifier(name, (channels, 64, 64))
    fast = frozen_extractor(prefix(model), (channels, 64, 64))
    assert fast.runtime == f"onnxruntime {onnxruntime.__version__}"
    for size in ((64, 64), (97, 50)):
        x = torch.randn(5, channels, *size)
        torch.testing.assert_close(fast.features(x), model.features(x), rtol=0, atol=1e-4)


@pytest.mark.parametrize("cut", ["stem", "layer2", "layer4", "pool", "fc"])
def test_any_stage_may_be_the_last(lite0: Split, cut: str) -> None:
    fast, x = frozen_extractor(prefix(lite0, cut), SHAPE), torch.randn(3, *SHAPE)
    assert isinstance(fast, OnnxExtractor)
    torch.testing.assert_close(fast.features(x), lite0.features(x, cut).detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["resnet10", "resnet50", "lenet5", "cnn", "mlp"])
def test_other_networks_of_the_catalogue(name: str) -> None:
    torch.manual_seed(0)
    model = build_model(name, (3, 32, 32), 4, {"width": 16, "stem": "standard"} if name == "resnet10" else {}).eval()
    fast, x = frozen_extractor(prefix(model), (3, 32, 32)), torch.randn(3, 3, 32, 32)
    assert isinstance(fast, OnnxExtractor)
    torch.testing.assert_close(fast.features(x), model.features(x).detach(), rtol=1e-4, atol=1e-4)


def test_adapters_run_as_well(lite0: Split) -> None:
    model = with_adapters(lite0, reduction=16, kernel=3, init="kaiming").eval()
    fast, x = frozen_extractor(prefix(model), SHAPE), torch.randn(3, *SHAPE)
    assert isinstance(fast, OnnxExtractor)
    torch.testing.assert_close(fast.features(x), model.features(x).detach(), rtol=1e-4, atol=1e-4)


def test_everything_is_folded_and_fused(lite0: Split, tmp_path: object) -> None:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    options.optimized_model_filepath = f"{tmp_path}/optimised.onnx"
    onnxruntime.InferenceSession(
        onnx_frozen.onnx_graph(nn.Sequential(*prefix(lite0))), options, providers=["CPUExecutionProvider"]
    )
    import onnx

    kinds = {node.op_type for node in onnx.load(options.optimized_model_filepath).graph.node}
    assert kinds <= {"FusedConv", "Conv", "Add", "GlobalAveragePool", "Flatten"}


def test_a_feature_does_not_depend_on_the_batch_or_the_threads(lite0: Split) -> None:
    x = torch.randn(7, *SHAPE)
    one, two = (frozen_extractor(prefix(lite0), SHAPE, threads) for threads in (1, 2))
    together = one.features(x)
    assert together.shape == (7, 1280)
    assert torch.equal(together, torch.cat([one.features(image[None]) for image in x]))
    assert torch.equal(together, two.features(x))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.timeout(60)
def test_it_works_on_in_a_forked_process(lite0: Split) -> None:
    fast, x = frozen_extractor(prefix(lite0), SHAPE, threads=2), torch.randn(2, *SHAPE)
    expected = fast.features(x)
    context = get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=lambda: answers.put(fast.features(x).numpy()))
    child.start()
    assert torch.equal(torch.from_numpy(answers.get()), expected)
    child.join()
    assert torch.equal(fast.features(x), expected)


def test_weights_of_later_are_not_those_it_computes_with() -> None:
    model = build_model("resnet10", (3, 32, 32), 4, {"width": 4}).eval()
    fast, x = frozen_extractor(prefix(model), (3, 32, 32)), torch.randn(1, 3, 32, 32)
    before = fast.features(x)
    with torch.no_grad():
        next(model.parameters()).zero_()
    assert torch.equal(fast.features(x), before)


def test_modes_stay_as_they_are() -> None:
    model = build_model("efficientnet_lite0", SHAPE, 3).train()
    frozen_extractor(prefix(model), SHAPE)
    assert all(module.training for module in model.modules())


def test_float64_is_left_to_torch() -> None:
    model = build_model("mlp", SHAPE, 3).double()
    reference = frozen_extractor(prefix(model), SHAPE)
    assert reference.runtime == f"torch {torch.__version__}"
    x = torch.randn(2, *SHAPE, dtype=torch.float64)
    assert torch.equal(reference.features(x), model.features(x))


class Odd(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.erf()


class Overwriting(nn.Module):
    """Looks at a tensor after it was overwritten, which no trace shows."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(x)
        h.add_(x)
        return h + x


@pytest.mark.parametrize(
    ("module", "said"),
    [(Odd(), "cannot be exported to onnx (no onnx for erf)"), (Overwriting(), "onnx differs by")],
)
def test_torch_takes_over_where_onnx_cannot(module: nn.Module, said: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "protofed"):
        reference = frozen_extractor([module], SHAPE)
    assert isinstance(reference, TorchExtractor)
    assert said in caplog.text
    x = torch.randn(2, *SHAPE)
    assert torch.equal(reference.features(x), module(x))


def test_torch_takes_over_without_onnxruntime(
    lite0: Split, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(onnx_frozen, "find_spec", lambda name: None if name == "onnxruntime" else find_spec(name))
    with caplog.at_level(logging.WARNING, "protofed"):
        assert isinstance(frozen_extractor(prefix(lite0), SHAPE), TorchExtractor)
    assert "which is slower: pip install onnxruntime" in caplog.text

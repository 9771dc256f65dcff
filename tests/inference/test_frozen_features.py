"""Predictions of a run with a frozen backbone: by the fast runtime and the cache, equal to those of torch."""

from typing import Any

import numpy as np
import pytest
import torch

from protofed.data import load
from protofed.inference import Classifier, evaluate
from protofed.inference.frozen_features import FrozenFeatures
from protofed.models.fast.onnx_frozen import OnnxExtractor
from protofed.runs.opened import OpenRun


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many images the fast runtime has been given, call by call."""
    seen: list[int] = []
    features = OnnxExtractor.features

    def counting(self: OnnxExtractor, x: torch.Tensor) -> torch.Tensor:
        seen.append(len(x))
        return features(self, x)

    monkeypatch.setattr(OnnxExtractor, "features", counting)
    return seen


@pytest.mark.parametrize(
    ("method", "options"),
    [("fedavg", {"train": "last"}), ("fedncm", {"model": "efficientnet_lite0", "image_size": 32})],
)
def test_the_fast_runtime_predicts_as_torch_does(
    method: str, options: dict[str, Any], tiny_run: Any, make_data: Any, computed: list[int]
) -> None:
    run = tiny_run(method, make_data(size=16), **{"model": "cnn", **options})
    classifier = Classifier(run)
    channels, side, _ = classifier.image_shape
    data = make_data(("x",), size=side, channels=channels, name="other", test=70, seed=1)
    other = load(data).domains["x"].test.x
    computed.clear()
    fast = classifier.probabilities(other)
    assert sum(computed) >= len(other)
    with torch.no_grad():
        torch.testing.assert_close(fast, classifier(other), atol=1e-4, rtol=0)
    before = sum(computed)
    assert Classifier(run).probabilities(other).equal(fast)
    assert sum(computed) == before, "the second time features are looked up"


def test_all_models_of_a_run_share_what_is_computed(tiny_run: Any, make_data: Any, computed: list[int]) -> None:
    run = tiny_run("fedavg", make_data(size=16), model="cnn", train="last")
    other = make_data(("x",), size=16, name="other", seed=1)
    computed.clear()
    content = evaluate(run.path, other)
    images = content["images"]
    assert sum(computed) - 2 == images, "each once, and two for a comparison with torch"
    opened = OpenRun(run.path)
    for name in content["models"]:
        net, at = opened.model_of(name)
        x = load(other).domains["x"].test
        with net.eval(), torch.no_grad():
            own = opened.method.predict(net, opened.normalised(x.x), at)
        assert content["models"][name]["accuracy"] == pytest.approx(float((own.argmax(1) == x.y).double().mean()))


def test_without_the_fast_runtime_torch_computes(
    tiny_run: Any, make_data: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny_run("fedavg", make_data(size=16), model="cnn", train="last")
    monkeypatch.setattr("protofed.models.fast.onnx_frozen._lacking", lambda: ["onnxruntime"])
    x = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (5, 1, 16, 16), dtype=np.uint8))
    classifier = Classifier(run)
    with torch.no_grad():
        torch.testing.assert_close(classifier.probabilities(x), classifier(x), atol=1e-6, rtol=0)


def test_what_is_trained_is_left_to_torch(tiny_run: Any, tiny_data: str) -> None:
    run = tiny_run("fedavg")
    assert FrozenFeatures(OpenRun(run.path).context).backbone() is None
    x = load(tiny_data).domains["a"].test.x
    classifier = Classifier(run)
    with torch.no_grad():
        assert classifier.probabilities(x).equal(classifier(x))


def test_a_network_is_left_as_it_was(tiny_run: Any, make_data: Any) -> None:
    run = tiny_run("fedavg", make_data(size=16), model="cnn", train="last")
    classifier = Classifier(run)
    classifier.probabilities(torch.zeros(3, 1, 16, 16, dtype=torch.uint8))
    assert all(member.net.shortcut is None for member in classifier._members)

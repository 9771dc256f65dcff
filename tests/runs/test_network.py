"""Which network a run has, from which weights, and what of it is trained, sent, stored and kept."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from protofed.clients.feature_cache import FeatureCache
from protofed.errors import UserError
from protofed.method import Method
from protofed.methods.fedadapter import FedAdapter
from protofed.methods.fedavg import FedAvg
from protofed.models import build_model
from protofed.models.freezing import frozen_tensors
from protofed.models.pretrained import load_pretrained, pretrained_hash
from protofed.registry import find_method, method_names
from protofed.runs.assembly import assemble
from protofed.runs.network import choose_network
from protofed.runs.options import make_options

HEAD_BYTES = 4 * (1280 * 4 + 4)


def chosen(shape: tuple[int, int, int], method: type[Method] = FedAvg, **options: Any) -> Any:
    return choose_network(make_options(options), shape, method)


@pytest.mark.parametrize(
    ("shape", "name", "size"),
    [
        ((1, 28, 28), "cnn", None),
        ((3, 32, 32), "cnn", None),
        ((3, 47, 90), "cnn", None),
        ((3, 48, 48), "efficientnet_lite0", 128),
        ((3, 64, 64), "efficientnet_lite0", 128),
        ((1, 100, 100), "efficientnet_lite0", 96),
        ((3, 160, 160), "efficientnet_lite0", 160),
        ((3, 191, 300), "efficientnet_lite0", 160),
        ((3, 192, 192), "efficientnet_lite0", 224),
        ((3, 256, 256), "efficientnet_lite0", 224),
    ],
)
def test_what_fits_the_images(shape: tuple[int, int, int], name: str, size: int | None) -> None:
    network = chosen(shape)
    assert (network.names, network.image_size) == ((name,), size)
    assert bool(network.reason) == (name == "efficientnet_lite0")


def test_the_line_about_the_network_says_what_is_trained_of_it() -> None:
    assert "ImageNet weights at 128 pixels, with --train head" in chosen((3, 64, 64)).reason
    assert "from scratch, with --train all" in chosen((3, 64, 64), weights="none").reason
    for method in ("fedadapter", "fedncm", "protoridge"):
        reason = choose_network(make_options({"method": method}), (3, 64, 64), find_method(method)).reason
        assert f"frozen except for what {method} adds to it" in reason
        assert "--train" not in reason


def test_photographs_made_small_say_that_they_get_the_small_network() -> None:
    network = chosen((3, 32, 32), image_size=32)
    assert network.names == ("cnn",)
    assert "images of 32 pixels (--image-size): cnn" in network.reason
    assert chosen((3, 32, 32), image_size=32, model="cnn").reason == ""


def test_what_the_user_asks_for_comes_first() -> None:
    assert chosen((3, 64, 64), model="resnet10").weights == "none"
    assert chosen((3, 64, 64), model="resnet10").train == "all"
    assert chosen((3, 64, 64), image_size=64).image_size == 64
    assert chosen((1, 28, 28), model="efficientnet_lite0").weights == "imagenet"
    scratch = chosen((3, 64, 64), weights="none")
    assert (scratch.names, scratch.train, scratch.image_size) == (("efficientnet_lite0",), "all", None)
    assert chosen((3, 64, 64), train="last").views > 1
    assert chosen((3, 64, 64), train="last", set={"data.augment": "flip"}).views == 1
    assert chosen((3, 64, 64), train="head", views=3).views == 3


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"model": "resnet10", "weights": "imagenet"}, "resnet10 has none"),
        ({"views": 2, "train": "all"}, "--views needs a frozen part"),
        ({"model": "cnn,lenet5", "weights": "w.pth"}, "fits only one architecture"),
    ],
)
def test_what_does_not_go_together(options: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text):
        chosen((3, 64, 64), **options)


def test_methods_with_adapters_keep_their_own_rule() -> None:
    assert chosen((3, 64, 64), FedAdapter).train == "all"


@pytest.fixture
def photographs(make_data: Any) -> str:
    return make_data(("a", "b"), size=48, channels=3, train=10, test=6)


@pytest.fixture
def photo_run(photographs: str, tiny_run: Any) -> Any:
    """A run on small photographs, seen at 48 pixels to be quick."""

    def start(method: str = "fedavg", **options: Any) -> Any:
        return tiny_run(method, photographs, **{"model": None, "image_size": 48, "rounds": 1, **options})

    return start


def test_only_the_head_is_trained_sent_and_stored(photo_run: Any) -> None:
    run = photo_run(train="head")
    record = run.rounds[0]
    for way in ("up", "down"):
        assert record["bytes"][way]["weights"] == 2 * HEAD_BYTES
    assert set(load_file(run.path / "model.safetensors")) == {"fc.weight", "fc.bias"}
    stored = (run.path / "clients" / "a-0.safetensors").stat().st_size
    assert HEAD_BYTES < stored < 2 * HEAD_BYTES
    start = run.config["model"]["start"]
    assert start["sha256"] == {"efficientnet_lite0": pretrained_hash("efficientnet_lite0")}
    assert run.config["model"]["parameters"] == [3_371_008 + 1280 * 4 + 4]
    assert run.config["data"]["normalise"]["mean"] == [0.485, 0.456, 0.406]


def test_a_reopened_run_has_its_frozen_stages_back(photo_run: Any) -> None:
    run = photo_run(train="last")
    model = run.model()
    published = build_model("efficientnet_lite0", (3, 48, 48), 4)
    load_pretrained(published, "efficientnet_lite0")
    frozen = frozen_tensors(model)
    whole = {name for name in frozen if name.partition(".")[0] in ("stem", "layer1", "layer2", "layer3")}
    assert all(".bn." in name for name in frozen.keys() - whole)  # of the trained stages only their normalisation
    assert any(name.startswith("top.bn") for name in frozen)
    state = published.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in frozen.items())


def test_features_are_computed_once_for_all_runs(photo_run: Any, same_results: Any, monkeypatch: Any) -> None:
    first = photo_run(train="head")
    kept = FeatureCache().content().features
    assert kept == 2 * (10 + 6)

    def refuse(*_: object) -> None:
        raise AssertionError("an image was computed again")

    monkeypatch.setattr("protofed.models.fast.onnx_frozen.OnnxExtractor.features", refuse)
    monkeypatch.setattr("protofed.clients.frozen.frozen_extractor", lambda *_: FakeExtractor())
    same_results(first, photo_run(train="head"))
    assert FeatureCache().content().features == kept


class FakeExtractor:
    """Has the runtime's name, and cannot compute."""

    @property
    def runtime(self) -> str:
        import onnxruntime

        return f"onnxruntime {onnxruntime.__version__}"

    def features(self, _: object) -> None:
        raise AssertionError("an image was computed again")


@pytest.mark.parametrize("engine", ["loop", "workers"])
def test_cached_or_not_engines_agree(engine: str, photo_run: Any, same_results: Any, monkeypatch: Any) -> None:
    cached = photo_run("i2pfl", train="last", engine="loop", views=2)
    monkeypatch.setenv("PROTOFED_CACHE", "/dev/null/nowhere")
    same_results(cached, photo_run("i2pfl", train="last", engine=engine, views=2))


def test_views_differ_and_stay_the_same(photo_run: Any, same_results: Any) -> None:
    plain, viewed = (photo_run(train="head", views=views, epochs=2) for views in (1, 3))
    assert (
        load_file(plain.path / "model.safetensors")["fc.weight"]
        .ne(load_file(viewed.path / "model.safetensors")["fc.weight"])
        .any()
    )
    same_results(viewed, photo_run(train="head", views=3, epochs=2))
    assert FeatureCache().content().features == 2 * (3 * 10 + 6)


@pytest.mark.parametrize(
    "method",
    [
        name
        for name in method_names()
        if find_method(name).trains_backbone and find_method(name).trained_stages == "head"
    ],
)
def test_every_method_that_trains_weights_takes_a_frozen_backbone(method: str, photo_run: Any) -> None:
    run = photo_run(method, train="head", set={})
    if run.path.joinpath("model.safetensors").exists():
        assert not any(name.startswith("layer") for name in load_file(run.path / "model.safetensors"))


def test_a_head_of_class_means(photo_run: Any) -> None:
    run = photo_run(head="closed-form", rounds=2, lr=1e-9)
    assert run.summary["accuracy_final"]["global"]["average"] > 0.3  # of 4 classes, without any training
    first, second = (record["bytes"]["up"] for record in run.rounds)
    assert first["prototypes"] == 2 * 4 * 1280 * 4
    assert second["prototypes"] == 0


@pytest.mark.parametrize(
    ("method", "options", "text"),
    [
        ("fedproto", {}, "fedproto has none"),
        ("fedavg", {"guard": "clip=1,noise=1"}, "no guard covers"),
    ],
)
def test_a_head_that_cannot_start_so(method: str, options: dict[str, Any], text: str, photo_run: Any) -> None:
    with pytest.raises(UserError, match=text):
        photo_run(method, head="closed-form", **options)


def test_grey_images_are_normalised_as_the_weights_want(make_data: Any, tiny_run: Any) -> None:
    grey = make_data(("a", "b"), size=50, train=6, test=4, name="grey")
    run = tiny_run("fedavg", grey, model=None, image_size=48, rounds=1)
    assert run.config["data"]["normalise"]["mean"] == pytest.approx([sum((0.485, 0.456, 0.406)) / 3])


def test_the_cache_is_shown_and_cleared(photo_run: Any, capsys: Any) -> None:
    from protofed.cli.app import main

    photo_run(train="head")
    for arguments, cleared in (
        (["data", "--cache", "--json"], False),
        (["data", "--cache", "--clear", "--json"], True),
    ):
        assert main(arguments) == 0
        shown = json.loads(capsys.readouterr().out)
        assert shown["features"] == 32
        assert shown["cleared"] == cleared
    assert not Path(shown["path"]).exists()


@pytest.mark.parametrize(
    ("size", "options", "augmented"),
    [
        (48, {"weights": "none"}, True),
        (48, {"train": "all"}, True),
        (48, {}, False),  # the head alone: features are computed once
        (48, {"weights": "none", "set": {"data.augment": "none"}}, False),
        (28, {"model": "resnet10"}, False),
        (48, {"method": "fedadapter", "weights": "none"}, False),
        (48, {"method": "fedncm", "weights": "none", "train": "all"}, False),
    ],
)
def test_photographs_are_augmented_where_a_whole_network_is_trained(
    size: int, options: dict[str, Any], augmented: bool, make_data: Any
) -> None:
    data = make_data("ab", size=size, channels=3, train=4, test=2, name=f"side{size}")
    context = assemble(make_options({"method": "fedavg", "data": data, **options}), Path("unused")).context
    assert bool(context.augment) == augmented

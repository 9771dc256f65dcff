"""Exact evidence: places and bias add up to the logit; shifted copies to the mean of theirs."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional

import protofed
from protofed.cli.app import main
from protofed.errors import UserError
from protofed.explain import explain
from protofed.explain.evidence import explain_with, kind_of_evidence
from protofed.explain.exact import LogitEvidence, _shifted, decides_by_patches, pooled_head
from protofed.explain.explanation import Explanation
from protofed.models import build_model
from protofed.models.net import Net
from protofed.models.unit_length import with_unit_features
from protofed.runs.opened import OpenRun
from protofed.testing import toy_data

RUNS: dict[str, dict[str, Any]] = {
    "protoridge": {},
    "projected": {"method": "protoridge", "set": {"project": 6, "gram": "none"}},
    "fedcgs": {},
    "fedavg": {"train": "head"},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Tiny runs whose network ends in one linear layer on pooled patches, in float64."""
    folder = tmp_path_factory.mktemp("exact")
    data = toy_data(folder / "data", classes=3, size=32, channels=3, absent={"a": [2]})
    common = {"model": "resnet10", "layout": "standard", "dtype": "float64", "rounds": 1, "batch": 8, "engine": "loop"}
    made = {}
    for name, options in RUNS.items():
        options = dict(options)
        settings = {"model.width": 2, **options.pop("set", {})}
        method = options.pop("method", name)
        made[name] = protofed.run(method, data, out=folder / name, set=settings, **common, **options).path
    return made


@pytest.fixture
def images() -> Tensor:
    return torch.randint(0, 256, (5, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def logits_of(opened: OpenRun, images: Tensor) -> Tensor:
    net, _ = opened.model_of("global")
    with torch.no_grad(), net.eval():
        return net(opened.normalised(images))


def maps_in(view: Explanation) -> list[LogitEvidence]:
    return [each for each in view.evidence if isinstance(each, LogitEvidence)]


@pytest.mark.parametrize("name", list(RUNS))
def test_places_and_bias_are_the_logit(name: str, runs: dict[str, Path], images: Tensor) -> None:
    opened = OpenRun(runs[name])
    views, logits = explain_with(opened, "global", images, top=4), logits_of(opened, images)
    for view, scores in zip(views, logits, strict=True):
        lead, *alone = maps_in(view)
        assert view.predicted == int(scores.argmax()) == lead.label
        best, second = scores.topk(2).indices.tolist()
        assert lead.rival == second
        assert lead.patches.sum() + lead.bias == pytest.approx(float(scores[best] - scores[second]), abs=1e-9)
        assert len(alone) == 3
        for each in alone:
            assert each.patches.sum() + each.bias == pytest.approx(float(scores[each.label]), abs=1e-9)
            assert each.logit == pytest.approx(float(scores[each.label]), abs=1e-12)


def test_a_place_adds_its_own_share(runs: dict[str, Path], images: Tensor) -> None:
    """w_c' f_p / (P |phi(x)|), worked out place by place."""
    opened = OpenRun(runs["protoridge"])
    net, _ = opened.model_of("global")
    with torch.no_grad(), net.eval():
        patches = net.features(opened.normalised(images), "layer4")[0]
    W = net.params()["fc.weight"].detach()
    phi = patches.flatten(1).mean(1)
    (view, *_) = explain_with(opened, "global", images, top=2)
    found = maps_in(view)[1]
    for row in range(patches.shape[1]):
        for column in range(patches.shape[2]):
            share = W[found.label] @ patches[:, row, column] / (phi.norm() * patches[0].numel())
            assert found.patches[row, column] == pytest.approx(float(share), abs=1e-12)


def test_maps_over_shifted_copies_add_up_to_the_mean_of_their_logits(runs: dict[str, Path], images: Tensor) -> None:
    opened = OpenRun(runs["protoridge"])
    (view, *_) = explain_with(opened, "global", images, top=2, shifts=2)
    found = maps_in(view)[1]
    # The stride is 8 (32 pixels, 4 places): copies lie 2 pixels to either side.
    assert found.positions == (8, 8)
    x = functional.pad(opened.normalised(images[:1]), (2, 2, 2, 2), mode="replicate")
    net, _ = opened.model_of("global")
    with torch.no_grad(), net.eval():
        copies = [net(x[:, :, top : top + 32, left : left + 32])[0] for top in (0, 4) for left in (0, 4)]
    mean = float(torch.stack(copies).mean(0)[found.label])
    assert found.shifted_logit == pytest.approx(mean, abs=1e-9)
    assert float(found.map.sum(dtype="float64")) + found.bias == pytest.approx(mean, abs=1e-5)
    assert found.patches.sum() + found.bias == pytest.approx(found.logit, abs=1e-9)
    assert found.logit != pytest.approx(mean, abs=1e-6)


def test_a_shift_looks_further_down_and_right() -> None:
    x = torch.arange(36.0).view(1, 1, 6, 6)
    assert torch.equal(_shifted(x, 2, 1)[0, 0, :4, :5], x[0, 0, 2:, 1:])
    assert torch.equal(_shifted(x, -2, -1)[0, 0, 2:, 1:], x[0, 0, :4, :5])


@pytest.mark.parametrize("model", ["resnet10", "resnet50", "efficientnet_lite0"])
def test_networks_that_average_their_maps_have_exact_evidence(model: str) -> None:
    settings = {} if model.startswith("efficient") else {"width": 2}
    base = build_model(model, (3, 32, 32), 3, settings)
    assert pooled_head(Net(base)) is not None
    closed = pooled_head(Net(with_unit_features(base, 4, torch.Generator().manual_seed(0))))
    assert closed is not None
    assert closed.unit
    assert closed.weight.shape == (3, base.dim)


@pytest.mark.parametrize("model", ["mlp", "cnn", "lenet5"])
def test_others_have_none(model: str) -> None:
    assert pooled_head(Net(build_model(model, (1, 16, 16), 3, {}))) is None


def test_methods_with_prototypes_are_explained_by_them_unless_asked(fedmp_run: Path) -> None:
    opened = OpenRun(fedmp_run)
    assert kind_of_evidence(opened, "a-0") == "classes"
    assert kind_of_evidence(opened, "a-0", "exact") == "exact"
    net, _ = opened.model_of("a-0")
    assert decides_by_patches(net, opened.method)


def test_the_server_is_asked_where_sites_have_nothing_of_their_own(
    runs: dict[str, Path], tmp_path: Path, capsys: Any
) -> None:
    why = tmp_path / "why"
    words = ["explain", str(runs["protoridge"]), "--domain", "b", "--count", "3", "--faithfulness", "--out", str(why)]
    assert main(words) == 0
    assert "not class" in capsys.readouterr().out
    content = json.loads((why / "explanations.json").read_text())
    assert content["clients"] == ["global"]
    assert content["evidence"] == "exact"
    for image in content["images"]:
        with Image.open(why / image["pictures"][0]) as picture:
            assert picture.width > 600
        for each in image["clients"][0]["prototypes"]:
            assert sum(map(sum, each["map"])) + each["bias"] == pytest.approx(each["logit"], abs=1e-5)
    assert "the map and the bias add up to the logit" in (why / "index.html").read_text()
    with pytest.raises(UserError, match="--clients global"):
        explain(runs["protoridge"], domain="b", clients=["a-0"], out=why)
    trained = explain(runs["fedavg"], domain="b", count=1, out=why)
    assert trained["clients"] == ["a-0", "b-0", "c-0"]


def test_refusals_say_what_can_be_explained(tiny_run: Any, parts_run: Path) -> None:
    image = torch.zeros(1, 1, 8, 8, dtype=torch.uint8)
    run = tiny_run("fedavg", rounds=1)
    with pytest.raises(UserError, match=r"fedavg with mlp cannot be explained.*resnet10.*efficientnet_lite0"):
        explain_with(OpenRun(run.path), "a-0", image, top=1)
    with pytest.raises(UserError, match="decides by part prototypes"):
        kind_of_evidence(OpenRun(parts_run), "a-0", "exact")
    with pytest.raises(UserError, match="--shifts"):
        explain_with(OpenRun(parts_run), "a-0", torch.zeros(1, 3, 16, 16, dtype=torch.uint8), top=1, shifts=2)

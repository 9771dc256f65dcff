import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from protofed.errors import UserError
from protofed.explain.evidence import _explanations, explain_with, similarity_maps, source_patches
from protofed.explain.maps import enlarged, peak_box
from protofed.models import Split, build_model
from protofed.models.net import Net
from protofed.models.protopnet import prototypes_of
from protofed.runs.opened import OpenRun


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randint(0, 256, (4, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_contributions_add_up_to_the_logit(parts_run: Path, images: torch.Tensor) -> None:
    opened = OpenRun(parts_run)
    views = explain_with(opened, "a-0", images, top=4)
    net, _ = opened.model_of("a-0")
    with torch.no_grad(), net.eval():
        logits = net(opened.normalised(images))
    for view, scores in zip(views, logits, strict=True):
        assert view.predicted == int(scores.argmax())
        assert sum(each.contribution for each in view.evidence) == pytest.approx(float(scores.max()), rel=1e-9)
        assert view.strongest.lift == max(each.lift for each in view.evidence)


def test_prototypes_of_other_classes_speak_against(parts_run: Path, images: torch.Tensor) -> None:
    for view in explain_with(OpenRun(parts_run), "b-0", images, top=4):
        for each in view.evidence:
            assert each.speaks_for == (each.label == view.predicted)


def test_a_coarse_map_is_known(parts_run: Path, images: torch.Tensor) -> None:
    (view, *_) = explain_with(OpenRun(parts_run), "a-0", images, top=1)
    assert view.strongest.positions == (2, 2)
    assert view.strongest.coarse


def test_one_client_is_explained_without_any_data(parts_run: Path, images: torch.Tensor, tmp_path: Path) -> None:
    """Neither the data set nor other clients' states are there."""
    before = explain_with(OpenRun(parts_run), "a-0", images, top=2)
    alone = tmp_path / "alone"
    shutil.copytree(parts_run, alone)
    for other in [*(alone / "clients").glob("b-0*"), *(alone / "clients").glob("c-0*")]:
        other.unlink()
    config = json.loads((alone / "run.json").read_text())
    config["options"]["data"] = str(tmp_path / "nowhere")
    (alone / "run.json").write_text(json.dumps(config))
    for left, right in zip(before, explain_with(OpenRun(alone), "a-0", images, top=2), strict=True):
        assert left.probabilities == right.probabilities
        assert np.array_equal(left.strongest.map, right.strongest.map)


def test_projection_stays_with_the_client(parts_run: Path) -> None:
    opened = OpenRun(parts_run, with_data=True)
    net, _ = opened.model_of("a-0")
    sources = opened.sources_of("a-0", prototypes_of(net.model).vectors.detach())
    assert sources is not None
    own = opened.context.samples("a-0")
    labels = prototypes_of(net.model).labels
    assert torch.equal(own.y[sources.image], labels)
    assert torch.equal(own.pixels(sources.image), sources.pixels)
    with torch.no_grad(), net.eval():
        z = net.features(opened.normalised(sources.pixels), "addon")
    at_place = z[torch.arange(len(labels)), :, sources.row, sources.column]
    torch.testing.assert_close(at_place, sources.vectors[:, :, 0, 0], rtol=0, atol=1e-10)
    # Nothing of it is in what the server keeps or sends.
    sent = b"".join(path.read_bytes() for path in [*parts_run.glob("*.safetensors"), *parts_run.glob("checkpoint/*")])
    assert sources.pixels[0].numpy().tobytes() not in sent
    summary = json.loads((parts_run / "summary.json").read_text())
    assert set(summary["projection"]) == {"before", "after"}
    assert set(summary["projection"]["after"]) == {"a-0", "b-0", "c-0", "average"}


def test_projected_prototypes_are_used_on_demand(parts_run: Path, images: torch.Tensor) -> None:
    opened = OpenRun(parts_run)
    trained = explain_with(opened, "a-0", images, top=1)
    moved = explain_with(opened, "a-0", images, top=1, projected=True)
    assert [view.probabilities for view in trained] != [view.probabilities for view in moved]
    patches = source_patches(opened, "a-0", range(4))
    assert all(patch.dtype == np.uint8 and patch.shape[2] == 3 for patch in patches.values())


def test_maps_of_pooled_features_are_cosines_of_positions() -> None:
    torch.manual_seed(0)
    net = Net(build_model("resnet10", (1, 16, 16), 2, {"width": 2}).double())
    x, rows = torch.randn(3, 1, 16, 16, dtype=torch.float64), torch.randn(2, 16, dtype=torch.float64)
    maps = similarity_maps(net, x, rows)
    with torch.no_grad(), net.eval():
        z = net.features(x, "layer4")
    expected = torch.nn.functional.cosine_similarity(z[:, None], rows[None, :, :, None, None], dim=2)
    torch.testing.assert_close(maps, expected.to(maps.dtype), rtol=0, atol=1e-6)


def test_maps_of_other_features_follow_the_gradient() -> None:
    """The features see the first position only, so no other one has a share."""

    class First(torch.nn.Module):
        def forward(self, maps: torch.Tensor) -> torch.Tensor:
            return maps[:, :, 0, 0] ** 2

    stages: dict[str, Any] = {"maps": torch.nn.Conv2d(1, 4, 1), "first": First(), "fc": torch.nn.Linear(4, 2)}
    torch.manual_seed(0)
    net = Net(Split(stages, cut="first", dim=4, classes=2))
    x, rows = torch.randn(2, 1, 3, 3), torch.randn(2, 4)
    maps = similarity_maps(net, x, rows)
    assert maps.shape == (2, 2, 3, 3)
    # m d(cos)/dm with features m^2, whose length is held still, is twice the cosine.
    cosines = torch.nn.functional.cosine_similarity(net.features(x)[:, None], rows[None], dim=2)
    torch.testing.assert_close(maps[:, :, 0, 0], 2 * cosines.detach())
    assert (maps.flatten(2)[:, :, 1:] == 0).all()


def test_class_prototypes_explain_other_methods(fedmp_run: Path) -> None:
    opened = OpenRun(fedmp_run, with_data=True)
    pixels = opened.context.dataset.domains["a"].test.x
    for client in ("a-0", "global"):
        for view in explain_with(opened, client, pixels, top=3):
            assert [each.label for each in view.evidence if each.speaks_for] == [view.predicted]
            assert all(-1.001 <= each.similarity <= 1.001 for each in view.evidence)


def test_methods_without_prototypes_are_refused_in_words(tiny_run: Any) -> None:
    run = tiny_run("fedavg", rounds=1)
    with pytest.raises(UserError, match="fedavg with mlp cannot be explained: it keeps no prototypes"):
        explain_with(OpenRun(run.path), "a-0", torch.zeros(1, 1, 8, 8, dtype=torch.uint8), top=1)
    with pytest.raises(UserError, match="unknown client 'z-0'"):
        OpenRun(run.path).model_of("z-0")


def test_networks_without_maps_are_refused_in_words(tiny_run: Any) -> None:
    run = tiny_run("i2pfl", rounds=1)
    with pytest.raises(UserError, match="no feature maps"):
        explain_with(OpenRun(run.path), "a-0", torch.zeros(1, 1, 8, 8, dtype=torch.uint8), top=1)


def test_lift_is_what_the_best_place_has_beyond_an_average_one(parts_run: Path, images: torch.Tensor) -> None:
    opened = OpenRun(parts_run)
    net, _ = opened.model_of("a-0")
    with torch.no_grad(), net.eval():
        maps = -net.features(opened.normalised(images), "prototypes").flatten(2)  # the similarity -d
        weight = net.params()["last.weight"]
    for i, view in enumerate(explain_with(opened, "a-0", images, top=4)):
        for each in view.evidence:
            values = maps[i, each.prototype]
            expected = weight[view.predicted, each.prototype] * (values.max() - values.mean())
            assert each.lift == pytest.approx(expected.item(), abs=1e-9)


def test_lift_of_a_class_prototype_is_beyond_an_average_place_and_against_other_classes(fedmp_run: Path) -> None:
    opened = OpenRun(fedmp_run, with_data=True)
    pixels = opened.context.dataset.domains["b"].test.x
    net, _ = opened.model_of("b-0")
    table = opened.prototypes()
    assert table is not None
    maps = similarity_maps(net, opened.normalised(pixels), table.rows).flatten(2)
    for i, view in enumerate(explain_with(opened, "b-0", pixels, top=3)):
        for each in view.evidence:
            values, sign = maps[i, each.label], 1 if each.label == view.predicted else -1
            assert each.lift == pytest.approx(sign * float(values.max() - values.mean()), abs=1e-5)


def test_a_map_lies_the_right_way_round() -> None:
    """The one place of 3 x 4 that is like the prototype: in the upper row, right of the middle."""
    maps = torch.zeros(1, 1, 3, 4)
    maps[0, 0, 0, 2] = 1.0
    one = torch.ones(1, 1)
    (shown,) = _explanations(
        "a-0", torch.zeros(1, 3, 30, 40), one, maps, torch.tensor([0]), one, one, one, torch.tensor([0]), top=1
    )
    row, column = np.unravel_index(shown.strongest.map.argmax(), (30, 40))
    assert 0 <= row < 10
    assert 20 <= column < 30
    box = shown.strongest.box
    assert box is not None
    assert box.contains(5, 25)


def test_a_source_patch_belongs_to_its_prototype(parts_run: Path) -> None:
    opened = OpenRun(parts_run)
    net, _ = opened.model_of("a-0")
    sources = opened.sources_of("a-0", prototypes_of(net.model).vectors.detach())
    assert sources is not None
    patches = source_patches(opened, "a-0", [3, 1, 2, 0])
    assert patches
    for j, patch in patches.items():
        with torch.no_grad(), net.eval():
            maps = -net.features(opened.normalised(sources.pixels[j : j + 1]), "prototypes")[0, j]
        box = peak_box(enlarged(maps, (16, 16)).numpy())
        assert box is not None
        image = sources.pixels[j].permute(1, 2, 0).numpy()
        assert np.array_equal(patch, image[box.top : box.bottom, box.left : box.right])


def test_the_nearest_class_prototype_comes_first(fedmp_run: Path) -> None:
    opened = OpenRun(fedmp_run, with_data=True)
    pixels = opened.context.dataset.domains["b"].test.x
    net, _ = opened.model_of("b-0")
    table = opened.prototypes()
    assert table is not None
    with torch.no_grad(), net.eval():
        h = net.features(opened.normalised(pixels))
    nearest = torch.nn.functional.cosine_similarity(h[:, None], table.rows[None].to(h), dim=2).argmax(1)
    shown = explain_with(opened, "b-0", pixels, top=2)
    assert [view.strongest.label for view in shown] == nearest.tolist()
    assert any(view.strongest.label != view.predicted for view in shown)

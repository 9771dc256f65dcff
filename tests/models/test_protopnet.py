import pytest
import torch
from torch import Tensor, nn

from protofed.errors import UserError
from protofed.models import Split, build_model, head
from protofed.models.net import Net
from protofed.models.protopnet import (
    PartPrototypes,
    characteristic_patches,
    project,
    prototype_layer,
    prototypes_of,
    start_from_patches,
    with_prototypes,
)
from protofed.records import ClassTable, Weights

# GT-32: one image of 2x2 positions and two channels, prototypes of classes 0, 0, 1, 1.
# In float64, because the log similarity has a slope of 1e4 at d = 0.
Z = torch.tensor([[[[0.2, 0.8], [0.5, 1.0]], [[0.1, 0.4], [0.9, 0.0]]]], dtype=torch.float64)
VECTORS = torch.tensor([[0.2, 0.1], [1.0, 1.0], [0.5, 0.5], [0.0, 1.0]], dtype=torch.float64).view(4, 2, 1, 1)


def on_patches(similarity: str = "linear", vectors: Tensor = VECTORS) -> Net:
    """A part-prototype network whose patches are its input."""
    classes, size = 2, vectors.shape[-1]
    base = Split(
        {"maps": nn.Conv2d(2, 2, 1), "pool": nn.Flatten(), "fc": nn.Linear(1, 1)}, cut="pool", dim=1, classes=classes
    )
    made = with_prototypes(base, per_class=2, dim=2, size=size, similarity=similarity)  # type: ignore[arg-type]
    stages = {**made.stages(), "maps": nn.Identity(), "addon": nn.Identity()}
    prototypes_of(made).vectors.data = vectors.clone()
    return Net(Split(stages, cut=made.cut, dim=made.dim, classes=classes).double())


def assert_near(found: Tensor, expected: object, atol: float = 1e-5) -> None:
    torch.testing.assert_close(found, torch.tensor(expected, dtype=found.dtype), rtol=0, atol=atol)


def small(**options: object) -> Split:
    torch.manual_seed(0)
    base = build_model("resnet10", (3, 16, 16), 3, {"width": 4})
    chosen = {"per_class": 2, "dim": 8, "size": 1, "similarity": "linear", **options}
    return with_prototypes(base, **chosen).eval()  # type: ignore[arg-type]


def test_gt32_distances_similarities_and_logits() -> None:
    net = on_patches()
    assert_near(net.features(Z, "nearest"), [[0.0, 0.26, 0.10, 0.26]])
    assert_near(net(Z), [[-0.08, -0.23]])
    assert nn.functional.cross_entropy(net(Z), torch.tensor([0])).item() == pytest.approx(0.620957, abs=1e-5)
    net = on_patches("log")
    assert_near(net.features(Z), [[9.2103, 1.5778, 2.3969, 1.5778]], atol=5e-5)  # printed with four digits
    assert_near(net(Z), [[8.8008, -1.4194]], atol=5e-5)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_distance_maps_equal_the_distance_of_every_patch(size: int) -> None:
    torch.manual_seed(0)
    layer = PartPrototypes(classes=2, per_class=3, dim=4, size=size).double()
    z = torch.rand(2, 4, 5, 4, dtype=torch.float64)
    maps = layer(z)
    assert maps.shape == (2, 6, 6 - size, 5 - size)
    for r in range(6 - size):
        for c in range(5 - size):
            patch = z[:, None, :, r : r + size, c : c + size]
            torch.testing.assert_close(maps[:, :, r, c], (patch - layer.vectors).pow(2).sum((2, 3, 4)))


def test_a_distance_is_never_negative() -> None:
    layer = PartPrototypes(classes=1, per_class=1, dim=512, size=1)
    z = layer.vectors.detach().expand(1, 512, 7, 7)
    assert (layer(z) >= 0).all()


def test_autocast_leaves_distances_their_digits() -> None:
    layer = PartPrototypes(classes=2, per_class=1, dim=512, size=1)
    z = layer.vectors.detach()[:, :, 0, 0].mean(0)[None, :, None, None] + 0.02
    with torch.autocast("cpu", torch.bfloat16):
        half = layer(z)
    torch.testing.assert_close(half, layer(z))


def test_resnet50_has_1316884_numbers_in_its_prototype_layer() -> None:
    base = build_model("resnet50", (3, 64, 64), 2)
    model = with_prototypes(base, per_class=5, dim=512, size=1, similarity="linear")
    sizes = {name: param.numel() for name, param in model.named_parameters()}
    chosen = prototype_layer.names(model)
    assert sum(sizes[name] for name in chosen) == 1_316_884
    assert sum(sizes.values()) == 23_508_032 + 1_316_884
    assert {name: sizes[name] for name in chosen if not name.startswith("addon")} == {
        "prototypes.vectors": 5_120,
        "last.weight": 20,
    }


def test_initial_weights() -> None:
    model = small()
    assert torch.equal(
        model.get_submodule("last").weight,
        torch.tensor([[1, 1, -0.5, -0.5, -0.5, -0.5], [-0.5, -0.5, 1, 1, -0.5, -0.5], [-0.5, -0.5, -0.5, -0.5, 1, 1]]),
    )
    layer = prototypes_of(model)
    assert layer.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert 0 <= layer.vectors.min() < 0.2
    assert 0.8 < layer.vectors.max() <= 1
    addon = model.get_submodule("addon")
    assert (addon.conv1.bias == 0).all()
    assert (addon.conv2.bias == 0).all()


@pytest.mark.parametrize(("similarity", "size"), [("linear", 1), ("log", 2)])
def test_every_cut_leads_to_the_same_logits(similarity: str, size: int) -> None:
    model = small(similarity=similarity, size=size)
    images = torch.randn(2, 3, 16, 16)
    logits = model(images)
    assert logits.shape == (2, 3)
    for cut in model.stage_names:
        assert torch.equal(model.head(model.features(images, cut), cut), logits)
    assert model.feature_shape((3, 16, 16)) == (model.dim,) == (6,)
    assert model.feature_shape((3, 16, 16), "addon") == (8, 2, 2)
    assert model.feature_shape((3, 16, 16), "prototypes") == (6, 3 - size, 3 - size)
    assert head.names(model) == {"last.weight"}


@pytest.mark.parametrize("similarity", ["linear", "log"])
def test_the_largest_activation_is_the_feature(similarity: str) -> None:
    net = Net(small(similarity=similarity))
    images = torch.randn(2, 3, 16, 16)
    with net.eval():
        maps = net.call("similarity", net.features(images, "prototypes"))
        torch.testing.assert_close(maps.flatten(2).amax(2), net.features(images))


@pytest.mark.parametrize("name", ["cnn", "lenet5"])
def test_other_convolutional_networks_have_patches_too(name: str) -> None:
    base = build_model(name, (1, 28, 28), 3)
    model = with_prototypes(base, per_class=2, dim=8, size=1, similarity="linear")
    assert model(torch.randn(2, 1, 28, 28)).shape == (2, 3)


def test_what_cannot_have_prototypes_is_refused_in_words() -> None:
    options = {"per_class": 2, "dim": 8, "similarity": "linear"}
    with pytest.raises(UserError, match=r"no convolution before its feature vector \(hidden\).*resnet50"):
        with_prototypes(build_model("mlp", (1, 8, 8), 3), size=1, **options)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"3x3 patches do not fit feature maps of 2x2.*prototype_size"):
        small(size=3)(torch.randn(1, 3, 16, 16))
    with pytest.raises(UserError, match="no part prototypes"):
        prototypes_of(build_model("mlp", (1, 8, 8), 3))


def test_projection_moves_prototypes_onto_the_nearest_patch_of_their_class() -> None:
    net = on_patches()
    # A second image of class 1: the prototypes of class 1 may use it, those of class 0 may not.
    other = torch.tensor([[[[0.0, 0.6], [0.9, 0.9]], [[0.9, 0.6], [0.9, 0.9]]]], dtype=torch.float64)
    found = project(net, [(Z, torch.tensor([0])), (other, torch.tensor([1]))])
    assert found.image.tolist() == [0, 0, 1, 1]
    assert list(zip(found.row.tolist(), found.column.tolist(), strict=True)) == [(0, 0), (1, 0), (0, 1), (0, 0)]
    assert_near(found.distance, [0.0, 0.26, 0.02, 0.01])
    expected = [[0.2, 0.1], [0.5, 0.9], [0.6, 0.6], [0.0, 0.9]]
    assert_near(prototypes_of(net.model).vectors[:, :, 0, 0], expected, atol=0)


def test_projection_leaves_a_class_without_images_alone() -> None:
    net = on_patches()
    found = project(net, [(Z, torch.tensor([0]))])
    assert found.image.tolist() == [0, 0, -1, -1]
    assert found.distance[2:].tolist() == [float("inf")] * 2
    assert torch.equal(prototypes_of(net.model).vectors[2:], VECTORS[2:])


@pytest.mark.parametrize("size", [1, 2])
def test_after_projection_every_prototype_is_a_patch_of_its_image(size: int) -> None:
    net = Net(small(size=size).double())
    images, labels = torch.randn(9, 3, 16, 16, dtype=torch.float64), torch.arange(9) % 3
    net.model.train()
    found = project(net, zip(images.split(4), labels.split(4), strict=True))
    assert all(module.training for module in net.model.modules())
    layer = prototypes_of(net.model)
    assert torch.equal(labels[found.image], layer.labels)
    with net.eval():
        maps = net.features(images, "prototypes")
    at_place = maps[found.image, torch.arange(6), found.row, found.column]
    assert_near(at_place, [0.0] * 6, atol=1e-12)
    again = project(net, [(images, labels)])
    assert_near(again.distance, [0.0] * 6, atol=1e-12)


def test_a_characteristic_patch_points_to_its_class() -> None:
    maps = torch.zeros(3, 2, 1, 3)
    maps[0, :, 0] = torch.tensor([[0.0, 5.0, 1.0], [9.0, 1.0, 0.0]])
    maps[1, :, 0] = torch.tensor([[0.0, 5.0, 1.0], [9.0, 1.0, 0.0]])
    maps[2, :, 0] = torch.tensor([[7.0, 1.0, 1.0], [8.0, 1.0, 0.0]])
    means = ClassTable(torch.tensor([[2.0, 0.0], [0.0, 2.0], [0.0, 0.0]]), torch.tensor([1.0, 1.0, 0.0]))
    patches = characteristic_patches(maps, torch.tensor([0, 1, 0]), means)
    assert patches.tolist() == [[5.0, 1.0], [0.0, 9.0], [1.0, 0.0]]
    only = ClassTable(means.rows, torch.tensor([1.0, 0.0, 0.0]))  # one class alone: the way from the origin
    assert characteristic_patches(maps[:1], torch.tensor([0]), only).tolist() == [[5.0, 1.0]]


@pytest.mark.parametrize("scale", [0.01, 1.0, 100.0])
def test_a_start_from_patches_leads_alike_whatever_the_scale_of_the_features(scale: float) -> None:
    base = build_model("resnet10", (1, 16, 16), 3, {"width": 4})
    model = with_prototypes(base, per_class=2, dim=16, size=1, similarity="linear").double()
    rows = 5 + torch.randn(3, 32, dtype=torch.float64)
    held = torch.tensor([True, True, False])
    started = start_from_patches(model, scale * rows, held)
    Net(model).load(Weights(started, {}))
    maps = (scale * rows)[:, :, None, None]
    d = model.get_submodule("prototypes")(model.get_submodule("addon")(maps)).flatten(1)
    logits = model.get_submodule("last")(-d)
    lead = [(logits[k, k] - logits[k, 1 - k]).item() for k in (0, 1)]
    assert sum(lead) / 2 == pytest.approx(10, rel=0.3)  # the prototypes of a class lie around its patch
    assert logits[:2].argmax(1).tolist() == [0, 1]


def test_one_class_alone_is_no_place_to_start_from() -> None:
    base = build_model("resnet10", (1, 16, 16), 3, {"width": 4})
    model = with_prototypes(base, per_class=2, dim=16, size=1, similarity="linear")
    assert start_from_patches(model, torch.rand(3, 32), torch.tensor([False, True, False])) == {}

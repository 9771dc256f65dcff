"""What is not trained is computed once, and nothing but the time it takes changes."""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save_file
from torch import Tensor, nn

from protofed.clients import ClientSide
from protofed.clients import features as features_room
from protofed.clients.features import FeatureBlock, FeatureKey, FeatureStore
from protofed.clients.frozen import FrozenStages, feature_store, find_frozen
from protofed.clients.samples import SampleBatch, SampleSet
from protofed.data.pixels import StoredPixels
from protofed.errors import UserError
from protofed.method import At, Step, Terms
from protofed.methods.fedadapter import FedAdapter, FrozenBackbone
from protofed.methods.fedadapterproto import FedPrototypical
from protofed.methods.fedavg import FedAvg
from protofed.methods.fedproto import FedProto
from protofed.models import Split, build_model, head, part
from protofed.models.freezing import Frozen
from protofed.models.net import Net
from protofed.models.passed import ImagesWanted
from protofed.records import Weights
from protofed.registry import register
from protofed.runs.assembly import Assembly, assemble
from protofed.runs.description import describe_run
from protofed.runs.options import make_options
from protofed.testing import results_of
from protofed.verbs import cross_entropy

SMALL = {"model.width": 4}
PROTOTYPES = {"prototype_dim": 8, "per_class": 2}
SETTINGS: dict[str, dict[str, Any]] = {
    "fedadapter": {},
    "fedadapter_noprox": {},
    "fedprototypical": PROTOTYPES,
    "fedadapterproto": PROTOTYPES,
    "last_stages": {},
}


class LastStages(FedAvg):
    """An ordinary method, of which only the last stages are trained; all the rest travels nevertheless."""

    steps = (Step(trains=part("layer4", "fc")),)


class HeadOnly(FrozenBackbone):
    """Has nothing to train but its head."""

    trained = head
    separable = True

    def loss(self, net: Net, x: Tensor, y: Tensor, at: At) -> Terms:
        return {"ce": cross_entropy(net(x), y)}


class Brightens(FrozenBackbone):
    """Computes with its images before it shows them to the network."""

    trained = head
    separable = True

    def loss(self, net: Net, x: Tensor, y: Tensor, at: At) -> Terms:
        return {"changed": cross_entropy(net(x + 0.1), y), "in_place": cross_entropy(net(x.mul_(1.1)), y)}


@pytest.fixture(autouse=True)
def methods() -> None:
    register("last_stages")(LastStages)
    register("head_only")(HeadOnly)
    register("brightens")(Brightens)


@pytest.fixture
def data(make_data: Callable[..., str]) -> str:
    """Clients of different sizes, none of which the batch size divides."""
    return make_data(classes=2, size=16, channels=3, train={"a": 11, "b": 21, "c": 18}, test=7)


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A backbone whose batch normalisation has something to fold."""
    torch.manual_seed(0)
    model = build_model("resnet10", (3, 16, 16), 2, {"width": 4})
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.3)  # type: ignore[arg-type]
            nn.init.uniform_(module.running_var, 0.7, 1.4)  # type: ignore[arg-type]
    path = tmp_path_factory.mktemp("backbone") / "backbone.safetensors"
    save_file(model.state_dict(), path)
    return str(path)


@pytest.fixture
def frozen_run(tiny_run: Any, data: str, weights: str) -> Callable[..., Any]:
    """A run on that backbone, in float64 unless told."""

    def start(method: str, frozen: str = "auto", **options: Any) -> Any:
        chosen = {**SMALL, **SETTINGS.get(method, {}), **options.pop("set", {})}
        defaults = {"model": "resnet10", "weights": weights, "dtype": "float64", "epochs": 2, "lr": 0.02}
        return tiny_run(method, data, **{**defaults, **options}, set=chosen, frozen=frozen)

    return start


@pytest.fixture
def ready(data: str, weights: str, tmp_path: Path) -> Callable[..., Assembly]:
    """A federation on that backbone that could start."""

    def make(method: str, **options: Any) -> Assembly:
        (tmp_path / "run").mkdir(exist_ok=True)
        chosen = {**SMALL, **SETTINGS.get(method, {}), **options.pop("set", {})}
        given = {"method": method, "data": data, "model": "resnet10", "weights": weights, "batch": 8, **options}
        return assemble(make_options({**given, "set": chosen}), tmp_path / "run" / "clients")

    return make


@pytest.fixture
def filled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], list[str]]:
    """Which sample sets had their features computed, in all processes."""
    log = tmp_path / "filled.txt"
    log.touch()
    rows = FeatureStore.rows

    def noted(self: FeatureStore, key: FeatureKey, fill: Callable[[Tensor], None]) -> Tensor | None:
        def noting(view: Tensor) -> None:
            with log.open("a") as file:
                file.write(f"{key.samples.kind} {key.samples.owner}\n")
            fill(view)

        return rows(self, key, noting)

    monkeypatch.setattr(FeatureStore, "rows", noted)
    return lambda: log.read_text().splitlines()


def assert_same_but_for_rounding(one: Any, other: Any) -> None:
    """The same files, tensors, bytes and scores; numbers up to the rounding of float64."""
    left, right = results_of(one.path), results_of(other.path)
    assert sorted(left) == sorted(right)
    for name in left:
        if name.endswith(".safetensors"):
            mine, its = load(left[name]), load(right[name])
            assert mine.keys() == its.keys()
            for key in mine:
                torch.testing.assert_close(mine[key], its[key], rtol=1e-7, atol=1e-9)
    for mine, its in zip(left["rounds.jsonl"], right["rounds.jsonl"], strict=True):
        # Private training tells no loss.
        expected = its["train_loss"] and pytest.approx(its["train_loss"], rel=1e-7)
        assert mine["train_loss"] == expected
        for key in ("bytes", "accuracy", "participants", "samples", "events"):
            assert mine[key] == its[key]


@pytest.mark.parametrize("method", SETTINGS)
def test_equal_to_the_run_that_computes_everything(method: str, frozen_run: Any, filled: Any) -> None:
    plain = frozen_run(method, "plain")
    assert filled() == []
    kept = frozen_run(method, "auto" if method == "last_stages" else "cached")
    assert_same_but_for_rounding(plain, kept)
    assert plain.config["engine"]["frozen"] == {"kept": [], "folded": [], "why": "asked for"}
    assert "not trained" in kept.config["engine"]["frozen"]["why"]


@pytest.mark.parametrize("method", ["head_only", "brightens"])
def test_gradients_of_single_samples_too(method: str, frozen_run: Any, filled: Any) -> None:
    guard = "clip=1,noise=0.5"
    plain = frozen_run(method, "plain", guard=guard)
    assert_same_but_for_rounding(plain, frozen_run(method, guard=guard))
    # A loss that changes its images is computed from them, in training as ever; the others never decode one.
    assert "train a-0" in filled()


def test_images_that_have_passed_are_not_mistaken_for_images() -> None:
    net = Net(build_model("resnet10", (3, 16, 16), 2, {"width": 4})).using(Weights({}, {}))
    like, h = torch.zeros(0, 3, 16, 16), torch.ones(5, 4, 16, 16)
    x = net.entered(1, h, like)
    assert (len(x), x.shape) == (5, (5, 3, 16, 16))
    torch.testing.assert_close(net.features(x), net.model.between(h, 1, net.model.stages_until(None)))
    for look in (lambda: x + 1, lambda: x[None], lambda: net.model(x), lambda: torch.stack([x])):
        with pytest.raises(ImagesWanted):
            look()


def test_the_frozen_stages_do_take_the_short_way(frozen_run: Any, filled: Any) -> None:
    run = frozen_run("fedprototypical", dtype="float32")
    stages = ["stem", "layer1", "layer2", "layer3", "layer4"]
    assert run.config["engine"]["frozen"]["kept"] == [stages]
    assert run.config["engine"]["frozen"]["folded"] == [stages]
    # Two rounds of two epochs, and every sample set once.
    assert sorted(filled()) == sorted(
        [f"{kind} {d}" for d in "abc" for kind in ("test",)] + [f"train {d}-0" for d in "abc"]
    )


@pytest.mark.parametrize("method", ["fedadapter", "fedprototypical"])
def test_engines_agree_bit_for_bit_and_share_what_was_computed(
    method: str, frozen_run: Any, same_results: Any, filled: Any
) -> None:
    loop = frozen_run(method, dtype="float32", rounds=3)
    once = sorted(filled())
    same_results(loop, frozen_run(method, dtype="float32", rounds=3, engine="workers", workers=2))
    assert sorted(filled()) == sorted(2 * once)


def test_a_resumed_run_is_the_same(frozen_run: Any, same_results: Any) -> None:
    import protofed

    class Stop(Exception):
        pass

    class StopAfterFirst:
        def round_end(self, run: Any, record: Any) -> None:
            raise Stop

    straight = frozen_run("fedadapter", dtype="float32")
    with pytest.raises(Stop):
        frozen_run("fedadapter", dtype="float32", callbacks=[StopAfterFirst()], name="stopped")
    same_results(straight, protofed.run(out=straight.path.parent / "stopped", resume=True))


def test_holdouts_and_validation_samples(frozen_run: Any, filled: Any) -> None:
    options: dict[str, Any] = {"protocol": "iid=2", "set": {"data.holdout": 0.2, "data.validation": 0.2}}
    plain = frozen_run("fedadapter", "plain", **options)
    assert_same_but_for_rounding(plain, frozen_run("fedadapter", **options))
    assert {line.split()[0] for line in filled()} == {"train", "validation", "holdout", "test"}
    assert len(filled()) == len(set(filled()))


def test_clients_with_different_networks(tiny_run: Any, data: str) -> None:
    class HeadsOnly(FedProto):
        """Each client trains a head on a backbone of its own architecture."""

        steps = (Step(trains=head),)

    register("heads_only")(HeadsOnly)
    options: dict[str, Any] = {"model": "cnn,lenet5", "dtype": "float64", "image_size": 32, "set": {}}
    kept = tiny_run("heads_only", data, **options, frozen="cached")
    first, second = kept.config["engine"]["frozen"]["kept"]
    assert first != second
    assert_same_but_for_rounding(tiny_run("heads_only", data, **options, frozen="plain"), kept)


def test_augmentation(frozen_run: Any, filled: Any) -> None:
    options: dict[str, Any] = {"set": {"data.augment": "flip"}}
    with pytest.raises(UserError, match=r"--frozen cached: images are augmented .*omit data\.augment"):
        frozen_run("fedadapter", "cached", **options)
    plain, kept = frozen_run("fedadapter", "plain", **options), frozen_run("fedadapter", **options)
    assert_same_but_for_rounding(plain, kept)
    assert sorted(filled()) == ["test a", "test b", "test c"]  # scoring is not augmented
    assert "augmented" in kept.config["engine"]["frozen"]["why"]


def test_a_method_that_computes_with_its_images(frozen_run: Any, filled: Any) -> None:
    assert_same_but_for_rounding(frozen_run("brightens", "plain"), frozen_run("brightens"))
    assert sorted(filled()) == ["test a", "test b", "test c"]


def test_where_everything_is_trained_there_is_nothing_to_do(frozen_run: Any) -> None:
    run = frozen_run("fedavg", rounds=1)
    assert run.config["engine"]["frozen"] == {
        "kept": [],
        "folded": [],
        "why": "the first stage of the model (stem) is trained, or changes during training",
    }
    with pytest.raises(UserError, match=r"the first stage of the model .* is trained.*frozen backbone"):
        frozen_run("fedavg", "cached")
    with pytest.raises(UserError, match="sometimes"):
        frozen_run("fedavg", "sometimes")


def chain(*stages: tuple[str, nn.Module]) -> Split:
    return Split([*stages, ("fc", nn.LazyLinear(2))], cut=stages[-1][0], dim=2, classes=2)


@pytest.mark.parametrize(
    ("second", "prefix"),
    [
        (nn.ReLU(), ("conv", "second", "flat")),
        (nn.BatchNorm2d(2), ("conv", "second", "flat")),
        (nn.BatchNorm2d(2, affine=False), ("conv",)),  # never frozen: it has nothing that could be trained
        (nn.Sequential(nn.Conv2d(2, 2, 1), nn.Dropout()), ("conv",)),
    ],
)
def test_the_prefix_ends_where_training_differs_from_evaluation(second: nn.Module, prefix: tuple[str, ...]) -> None:
    model = chain(("conv", nn.Conv2d(1, 2, 1)), ("second", second), ("flat", nn.Flatten()))
    model(torch.zeros(2, 1, 4, 4))
    found = find_frozen(Brightens(), model, (1, 4, 4))
    assert found.prefix == prefix
    assert found.shape == ((32,) if prefix[-1] == "flat" else (2, 4, 4))


def test_a_prefix_without_weights_is_not_worth_keeping() -> None:
    class OnlyFirst(Brightens):
        trained = part("conv")

    model = chain(("flat", nn.Identity()), ("conv", nn.Conv2d(1, 2, 1)), ("rest", nn.Flatten()))
    model(torch.zeros(2, 1, 4, 4))
    assert find_frozen(OnlyFirst(), model, (1, 4, 4)).prefix == ()


@pytest.mark.parametrize(("method", "last"), [(FedAdapter(), "layer1"), (FedPrototypical(prototype_dim=4), "layer4")])
def test_the_prefix_ends_at_the_first_adapter_or_prototype(method: Any, last: str, make_at: Callable[..., At]) -> None:
    model = method.build(build_model("resnet10", (3, 16, 16), 2, {"width": 4}), make_at())
    found = find_frozen(method, model, (3, 16, 16))
    assert found.prefix[-1] == last
    assert found.shape == model.feature_shape((3, 16, 16), last)
    assert set(found.recipes) == {"stem", "layer1", "layer2", "layer3", "layer4"}


def test_other_weights_in_frozen_stages_are_noticed(ready: Callable[..., Assembly]) -> None:
    context = ready("fedadapter").context
    net = Net(deepcopy(context.model))
    stages = FrozenStages(context, 0, net, feature_store(context))
    stages.install()
    assert net.shortcut is not None
    assert net.using(net.pick()).shortcut is None
    with torch.no_grad():
        net.params()["adapter1.up.bias"].add_(1)
        stages.install()
        assert net.shortcut is not None
        net.params()["layer3.0.conv1.weight"][0, 0, 0, 0].add_(1e-3)
        stages.install()
    assert net.shortcut is None


class NewHeads(FrozenBackbone):
    """Trains its last stage behind a head that is not trained, and may be another one in every round."""

    trained = part("layer4")
    separable = True

    def loss(self, net: Net, x: Tensor, y: Tensor, at: At) -> Terms:
        return {"ce": cross_entropy(net(x), y)}


def test_a_head_that_changes_without_training_spoils_nothing(ready: Callable[..., Assembly]) -> None:
    register("new_heads")(NewHeads)
    context = ready("new_heads", dtype="float64").context
    net, samples = Net(deepcopy(context.model)), context.samples("a-0")
    stages = FrozenStages(context, 0, net, feature_store(context))
    with torch.no_grad():
        for param in net.params(head).values():
            param.add_(1)
    stages.install()
    assert net.shortcut is not None
    with torch.no_grad(), net.eval():
        for x, _ in samples.batches(4):
            torch.testing.assert_close(net(x), net.model(x + 0))


def test_features_inside_the_prefix_come_from_the_images(ready: Callable[..., Assembly]) -> None:
    context = ready("fedprototypical", dtype="float64").context
    net, samples = Net(context.model), context.samples("a-0")
    FrozenStages(context, 0, net, feature_store(context)).install()
    with torch.no_grad(), net.eval():
        for x, _ in samples.batches(4):
            for cut in context.model.stage_names:
                torch.testing.assert_close(net.features(x, cut), context.model.features(x, cut))


def test_what_is_kept_lies_as_the_network_left_it(ready: Callable[..., Assembly]) -> None:
    options = {"layout": "channels-last", "dtype": "float64"}
    context = ready("fedadapter", weights=None, set={"model.width": 16}, **options).context
    net, samples = Net(context.model), context.samples("b-0")
    FrozenStages(context, 0, net, feature_store(context)).install()
    for x, _ in samples.epoch(8, torch.Generator().manual_seed(0), torch.Generator()):
        known = net.shortcut.lookup(x)  # type: ignore[union-attr]
        assert known is not None
        assert known.is_contiguous(memory_format=torch.channels_last)
        known.zero_()  # a copy: the next look is not spoilt
        again = net.shortcut.lookup(x)  # type: ignore[union-attr]
        assert again is not None
        with torch.no_grad(), net.eval():
            torch.testing.assert_close(again, context.model.features(x, "layer1"), rtol=1e-10, atol=1e-10)


def test_a_run_that_spills(frozen_run: Any, monkeypatch: pytest.MonkeyPatch, same_results: Any) -> None:
    in_memory = frozen_run("fedadapter", dtype="float32")
    monkeypatch.setattr("protofed.clients.client.feature_store", partial(feature_store, limit=0))
    on_disk = frozen_run("fedadapter", dtype="float32")
    same_results(in_memory, on_disk)
    assert sorted(path.name for path in on_disk.path.iterdir()) == sorted(p.name for p in in_memory.path.iterdir())


def test_features_that_would_not_fit(ready: Callable[..., Assembly], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protofed.clients.frozen.MEMORY_LIMIT", 0)
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 10}))
    found = ready("fedadapter")
    assert [part.prefix for part in found.context.frozen] == [()]
    assert found.context.frozen[0].recipes
    assert "disk" in str(describe_run(found)["engine"]["frozen"]["why"])
    with pytest.raises(UserError, match="would not fit on the disk"):
        ready("fedadapter", frozen="cached")


A, B = FeatureKey(SampleSet("train", "a")), FeatureKey(SampleSet("test", "b"))


def count_up(times: list[int], view: Tensor) -> None:
    times.append(1)
    view.copy_(torch.arange(view.numel()).view_as(view))


@pytest.mark.parametrize("limit", [0, 100, 10**6])
def test_blocks_are_filled_once(limit: int, tmp_path: Path) -> None:
    times: list[int] = []
    store = FeatureStore({A: FeatureBlock(3, 5), B: FeatureBlock(2, 7)}, torch.float32, tmp_path, limit)
    for _ in range(2):
        for key, shape in ((A, (3, 5)), (B, (2, 7))):
            rows = store.rows(key, partial(count_up, times))
            assert rows is not None
            assert torch.equal(rows, torch.arange(shape[0] * shape[1]).view(shape).float())
    assert len(times) == 2
    assert list(tmp_path.iterdir()) == []  # the file has no name


def test_a_failed_fill_is_tried_again(tmp_path: Path) -> None:
    store = FeatureStore({A: FeatureBlock(3, 5)}, torch.float32, tmp_path)

    def fails(_: Tensor) -> None:
        raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError, match="interrupted"):
        store.rows(A, fails)
    times: list[int] = []
    store.rows(A, partial(count_up, times))
    assert times == [1]


def test_a_full_disk(frozen_run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(features_room.os, "posix_fallocate", full)
    assert FeatureStore({A: FeatureBlock(3, 5)}, torch.float32, tmp_path, limit=0).rows(A, lambda _: None) is None
    monkeypatch.setattr("protofed.clients.client.feature_store", partial(feature_store, limit=0))
    assert_same_but_for_rounding(frozen_run("fedadapter", "plain"), frozen_run("fedadapter"))


def test_a_batch_knows_its_samples_until_it_is_changed() -> None:
    samples, rows = SampleSet("train", "a"), torch.tensor([4, 2])
    made: list[Tensor] = []

    def make(chosen: Tensor) -> Tensor:
        made.append(chosen)
        return torch.zeros(2, 3)

    x = SampleBatch(torch.empty(0, 3), rows, samples, make)
    assert (len(x), x.shape, x.dtype, x.device.type, x.source) == (2, (2, 3), torch.float32, "cpu", (samples, rows))
    assert made == []
    others = (SampleBatch(torch.empty(0, 3), rows, SampleSet("train", "b"), make), torch.zeros(2, 3))
    side_by_side = (torch.cat([x, x], 1), *(torch.cat([x, other]) for other in others))
    for computed in (
        x.clone(),
        x[:],
        x[0],
        x[None],
        x + 1,
        x.to(torch.float64),
        x.flip(0),
        x[:, rows - 2],
        *side_by_side,
    ):
        assert not isinstance(computed, SampleBatch)
    assert len(made) == 2
    assert x.source == (samples, rows)
    x.add_(1)
    assert x.source is None
    assert torch.equal(x * 1, torch.ones(2, 3))


def test_samples_of_a_batch_and_batches_in_a_row_are_samples() -> None:
    samples, images = SampleSet("train", "a"), torch.arange(30.0).view(10, 3)

    def make(rows: Tensor) -> Tensor:
        return images[rows]

    def batch(*rows: int) -> SampleBatch:
        return SampleBatch(torch.empty(0, 3), torch.tensor(rows), samples, make)

    both = torch.cat([batch(4, 2), batch(7)])
    last, masked = both[torch.tensor([-1, 0])], both[torch.tensor([False, True, True])]
    for made, rows in ((both, [4, 2, 7]), (last, [7, 4]), (masked, [2, 7])):
        assert isinstance(made, SampleBatch)
        assert made.source is not None
        assert (made.source[0], made.source[1].tolist(), made.shape) == (samples, rows, (len(rows), 3))
        assert torch.equal(made * 1, images[rows])
    changed = batch(4, 2)
    changed.add_(1)
    for plain in (torch.cat([changed, batch(7)]), changed[torch.tensor([0])]):
        assert not isinstance(plain, SampleBatch)
    assert torch.equal(changed[torch.tensor([0])], images[[4]] + 1)
    assert last.source is not None  # a copy, like any tensor that indices choose


def test_a_reference_knows_the_frozen_stages_that_it_shares(ready: Callable[..., Assembly]) -> None:
    context = ready("fedavg", train="head", dtype="float64").context
    net, samples = Net(deepcopy(context.model)), context.samples("a-0")
    FrozenStages(context, 0, net, feature_store(context)).install()
    own = net.pick()
    reference = net.using(own)
    other = Weights({name: tensor + 1 for name, tensor in own.params.items()}, {})
    assert net.using(Weights({"stem.conv.weight": torch.zeros(1)}, {})).shortcut is None
    with torch.no_grad(), net.eval():
        for x, _ in samples.batches(4):
            torch.testing.assert_close(reference.features(x), context.model.features(x + 0))
            assert not torch.equal(reference(x), net.using(other)(x))


@pytest.mark.parametrize(
    ("method", "guard"), [("moon", None), ("moon", "clip=1,noise=0.5"), ("elastic", None), ("fedga", None)]
)
def test_what_a_method_does_inside_costs_no_backbone(
    method: str, guard: str | None, frozen_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    forward = Frozen.forward

    def counted(self: Frozen, x: Tensor) -> Tensor:
        calls.append(len(x))
        return forward(self, x)

    options: dict[str, Any] = {"train": "head", "guard": guard, "set": {"data.validation": 0.2}}
    plain = frozen_run(method, "plain", **options)
    monkeypatch.setattr(Frozen, "forward", counted)
    frozen_run(method, rounds=1, **options)
    before_training = len(calls)  # with blank images, to see what messages look like
    assert_same_but_for_rounding(plain, frozen_run(method, **options))
    assert len(calls) == 2 * before_training


def test_several_batches_at_once_have_features_of_their_own(ready: Callable[..., Assembly]) -> None:
    context = ready("fedadapter", dtype="float64").context
    net = Net(context.model)
    FrozenStages(context, 0, net, feature_store(context)).install()
    batches = [
        (x, other) for x, _ in context.samples("a-0").batches(4) for other, _ in context.samples("b-0").batches(4)
    ]
    for x, other in batches:
        for images in (other, x):
            known = net.shortcut.lookup(images)  # type: ignore[union-attr]
            with torch.no_grad(), net.eval():
                torch.testing.assert_close(known, context.model.features(images + 0, "layer1"))


def test_nothing_is_reserved_where_nothing_is_kept(ready: Callable[..., Assembly]) -> None:
    plain = ready("fedadapter", frozen="plain")
    assert feature_store(plain.context) is None
    ClientSide(plain.prepared)
    assert feature_store(ready("fedadapter").context) is not None


def test_pixels_of_kept_features_are_not_copied(ready: Callable[..., Assembly]) -> None:
    context = ready("fedadapter").context
    client = context.partition.clients[0]
    samples, copied = context.samples(client), context.train_images(client)
    assert isinstance(copied.x, Tensor)
    assert isinstance(samples._pixels, StoredPixels)
    everyone = torch.arange(len(copied))
    assert torch.equal(samples.pixels(everyone), copied.x)
    assert torch.equal(samples.y, copied.y)


def test_what_is_needed_once_is_kept_until_another_is_asked_for(tmp_path: Path) -> None:
    first, second = FeatureKey(SampleSet("train", "a")), FeatureKey(SampleSet("train", "b"))
    store = FeatureStore({}, torch.float32, tmp_path, passing=dict.fromkeys((first, second), FeatureBlock(2, 3)))
    filled: list[FeatureKey] = []

    def rows(key: FeatureKey, value: float) -> Tensor | None:
        def fill(view: Tensor) -> None:
            filled.append(key)
            view.fill_(value)

        return store.rows(key, fill)

    for key, value in ((first, 1.0), (first, 9.0), (second, 2.0), (first, 1.0)):
        rows(key, value)
    assert filled == [first, second, first]
    assert torch.equal(rows(first, 9.0), torch.ones(2, 3))


def test_one_exchange_reserves_no_room_for_training_samples(ready: Callable[..., Assembly]) -> None:
    def reserved(**chosen: str) -> set[str]:
        store = feature_store(ready("protoridge", set=chosen).context)
        assert store is not None
        return {key.samples.kind for key in store._blocks}

    assert reserved() == {"test"}
    assert reserved(tune="both") == {"test", "train"}

"""FRAug: GT-10, GT-11, what each step trains, what leaves the client, every knob."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from protofed.method import At, Plan
from protofed.methods.fraug import ClassMeans, FRAug, constant_features, cyclic, entropy, sources
from protofed.models import build_model, features, head, part
from protofed.models.net import Net
from protofed.records import encode
from protofed.verbs import gaussian_mmd


def test_gt_10_class_means() -> None:
    means = ClassMeans(2, 2, rho=0.3)
    h = torch.tensor([[1.0, 0.0], [3.0, 0.0]], requires_grad=True)
    m = means(h, torch.tensor([0, 0]))
    torch.testing.assert_close(m, torch.tensor([[0.6, 0.0], [0.0, 0.0]]))
    assert not m.requires_grad
    means(h, torch.tensor([1, 0]))
    torch.testing.assert_close(means.m, torch.tensor([[0.7 * 0.6 + 0.3 * 3, 0.0], [0.3, 0.0]]))
    before = means.m.clone()
    means.eval()
    assert torch.equal(means(h, torch.tensor([0, 1])), before)


def test_gt_10_schedule(make_at: Any) -> None:
    method = FRAug(gamma=0.01)
    found = [method.schedule(make_at(round=t, rounds=300)) for t in (0, 150, 299)]
    assert [r for r, _ in found] == pytest.approx([0.049787, 0.223130, 0.990050], abs=1e-5)
    assert [w for _, w in found] == pytest.approx([0.049787, 0.223130, 0.5], abs=1e-5)


def test_gt_11() -> None:
    x, y = torch.tensor([[0.0, 0.0], [1.0, 0.0]]), torch.tensor([[0.0, 1.0], [1.0, 1.0]])
    assert gaussian_mmd(x, y).item() == pytest.approx(3.564948, abs=1e-5)
    assert gaussian_mmd(x, x).item() == pytest.approx(0, abs=1e-5)


def test_autocast_leaves_the_discrepancy_its_digits() -> None:
    x = torch.rand(6, 512, generator=torch.Generator().manual_seed(1)) + 5
    y = x + 0.01
    with torch.autocast("cpu", torch.bfloat16):
        half = gaussian_mmd(x, y)
    torch.testing.assert_close(half, gaussian_mmd(x, y))


def test_discrepancy_of_equal_points_is_zero_with_finite_gradients() -> None:
    x = torch.ones(3, 2, requires_grad=True)
    value = gaussian_mmd(x, torch.ones(4, 2))
    assert value.item() == 0
    assert torch.autograd.grad(value, x)[0].isfinite().all()


def built(method: FRAug, make_at: Any, name: str = "resnet10", **options: Any) -> tuple[Net, At]:
    """A tiny network of 4 classes with the parts of FRAug, in training mode, and where its losses stand."""
    torch.manual_seed(0)
    options = options or {"resnet10": {"width": 2}, "mlp": {"hidden": 8}}[name]
    base = build_model(name, (1, 8, 8), 4, options)
    at = make_at(classes=4, dim=base.dim, round=1)
    return Net(method.build(base, at)), replace(at, draw=method.draw(Y, at, torch.Generator().manual_seed(0)))


X = torch.rand(8, 1, 8, 8, generator=torch.Generator().manual_seed(1))
Y = torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])


def stats(net: Net) -> dict[str, Tensor]:
    return net.pick().stats


@pytest.mark.parametrize(("noise_dim", "generator", "transformer"), [(None, 401_408, 267_008), (64, 303_104, 67_904)])
def test_parameters_of_the_reference_model(noise_dim: int | None, generator: int, transformer: int) -> None:
    method = FRAug(noise_dim=noise_dim)
    at = At(plan=Plan(epochs=(1,)), classes=10, dim=512, clients={"a": 1}, client="a")
    net = Net(method.build(build_model("resnet10", (3, 8, 8), 10), at))
    count = {name: sum(p.numel() for p in net.params(part(name)).values()) for name in ("generator", "transformer")}
    assert count == {"generator": generator, "transformer": transformer}
    assert method.draw(Y, at, torch.Generator()).shape == (5, 8, noise_dim or 256)
    state = method.server_state(net, at)
    up = encode(method.upload(net, None, at)[0], "a").size  # type: ignore[arg-type]
    for size in (up, encode(state, "server").size):
        assert size.weights == 4 * (4_903_242 + generator)
    assert sum(tensor.numel() for tensor in state.shared.weights.stats.values()) == 4 * 512  # the generator's own


def test_what_travels(make_at: Any) -> None:
    method = FRAug()
    net, _ = built(method, make_at)
    shared = net.names(method.shares)
    assert {"stem.bn1.weight", "fc.bias", "generator.layers.1.running_mean"} <= shared
    private = net.names(part("stem", "layer1", "transformer", "class_means")) - shared
    assert {"stem.bn1.running_mean", "layer1.0.bn1.running_var", "class_means.m"} <= private
    assert not shared & net.names(part("transformer", "class_means"))


def test_labels_and_what_features_are_made_from() -> None:
    assert cyclic(Y, 3).tolist() == [0, 1, 2, 0, 1, 2, 0, 1]
    h, m = torch.rand(5, 2), torch.rand(3, 2)
    (mean, label), (real, own) = sources(h, Y[:5], m)
    assert torch.equal(mean, m[label])
    assert label.tolist() == [0, 1, 2, 0, 1]
    assert real is h
    assert torch.equal(own, Y[:5])


@pytest.mark.parametrize("interpolate", [True, False])
def test_made_features_train_the_head_only(interpolate: bool, make_at: Any) -> None:
    method = FRAug(interpolate=interpolate)
    net, at = built(method, make_at)
    made = method.loss(net, X, Y, at)["made"]
    assert all(g is None for g in gradients(made, net, features + part("generator", "transformer")))
    assert all(g is not None and g.abs().sum() > 0 for g in gradients(made, net, head))


def gradients(value: Tensor, net: Net, group: Any) -> list[Any]:
    params = list(net.params(group).values())
    return list(torch.autograd.grad(value, params, allow_unused=True, retain_graph=True))


def test_task_loss_by_hand(make_at: Any) -> None:
    method = FRAug(gamma=0.5, rho=0.3)
    net, at = built(method, make_at, "mlp")
    net, x, at = Net(net.model.double()), X.double(), replace(at, draw=at.draw.double())
    r, w = method.schedule(at)
    generator, transformer = (net.model.get_submodule(name) for name in ("generator", "transformer"))
    with torch.no_grad():
        h = net.features(x)
        m = torch.stack([0.3 * h[k == Y].mean(0) if (k == Y).any() else torch.zeros_like(h[0]) for k in range(4)])
        label = torch.arange(8) % 4
        generator.eval(), transformer.eval()
        expected = h.new_zeros(())
        for z, real, to in ((at.draw[0], m[label], label), (at.draw[1], h, Y)):
            u = r * transformer(generator(z, to), real, to) + (1 - r) * real
            expected += w / 2 * nn.functional.cross_entropy(net.head(u), to)
        generator.train(), transformer.train()
        expected_ce = (1 - w) * nn.functional.cross_entropy(net(x), Y)
    terms = method.loss(net, x, Y, at)
    torch.testing.assert_close(terms["made"].detach(), expected)
    torch.testing.assert_close(terms["ce"].detach(), expected_ce)
    torch.testing.assert_close(stats(net)["class_means.m"], m)


def test_interpolation_ends_where_made_features_count_fully(make_at: Any) -> None:
    values = {}
    for gamma in (0.0, 1.0):
        for interpolate in (True, False):
            method = FRAug(gamma=gamma, interpolate=interpolate)
            net, at = built(method, make_at)
            values[gamma, interpolate] = method.loss(net, X, Y, at)["made"].item()
    assert values[0.0, True] == values[0.0, False]  # r = 1
    assert values[1.0, True] != values[1.0, False]


@pytest.mark.parametrize("distance", ["mmd", "l2"])
def test_generator_step(distance: Any, make_at: Any) -> None:
    method = FRAug(generator_distance=distance, lambda_generator=3.0)
    net, at = built(method, make_at)
    method.loss(net, X, Y, at)  # the class means exist
    before = stats(net)
    terms = method.generator_loss(net, X, Y, at)
    after = stats(net)
    moved = {name for name in after if not torch.equal(before[name], after[name])}
    assert moved == {name for name in after if name.startswith("generator.")}
    h, m = constant_features(net, X, Y)
    with torch.no_grad():
        u = net.call("generator", at.draw[2], cyclic(Y, 4))
        far = gaussian_mmd(u, h) if distance == "mmd" else (u - m[cyclic(Y, 4)]).pow(2).mean()
    torch.testing.assert_close(terms["generator_distance"].detach(), -3.0 * far)
    assert all(g is not None for g in gradients(sum(terms.values()), net, part("generator")))  # type: ignore[arg-type]


@pytest.mark.parametrize("distance", ["mmd", "l2"])
def test_transformer_step(distance: Any, make_at: Any) -> None:
    method = FRAug(transformer_distance=distance, lambda_transformer=2.0)
    net, at = built(method, make_at)
    method.loss(net, X, Y, at)
    before = stats(net)
    terms = method.transformer_loss(net, X, Y, at)
    after = stats(net)
    moved = {name for name in after if not torch.equal(before[name], after[name])}
    assert moved == {name for name in after if name.startswith("transformer.")}
    total = terms["transformer_entropy"] + terms["transformer_distance"]
    assert all(g is None for g in gradients(total, net, part("generator")))
    assert all(g is not None for g in gradients(total, net, part("transformer")))
    assert terms["transformer_entropy"].item() < 0 < terms["transformer_distance"].item()


def test_entropy() -> None:
    assert entropy(torch.zeros(3, 4)).item() == pytest.approx(1.386294, abs=1e-5)
    sure = torch.tensor([[1000.0, 0.0]], requires_grad=True)
    assert entropy(sure).item() == 0
    assert torch.autograd.grad(entropy(sure), sure)[0].isfinite().all()


def test_steps_follow_their_own_rates() -> None:
    task, generator, transformer = FRAug(lr_generator=0.2, lr_transformer=0.3).steps
    assert (task.lr, generator.lr, transformer.lr) == (None, 0.2, 0.3)


@pytest.mark.parametrize("name", ["resnet10", "mlp"])
def test_run(name: str, tiny_run: Any) -> None:
    options = {"resnet10": {"model.width": 2}, "mlp": {}}[name]
    run = tiny_run("fraug", model=name, set=options, dtype="float64")
    assert run.rounds[-1]["events"] == []
    accuracy = run.rounds[-1]["accuracy"]
    assert (accuracy["global"] is None) is (name == "resnet10")  # running statistics never reach the server
    assert accuracy["personal"]["average"] > 0
    a, b = (load_file(run.path / "clients" / f"{client}-0.safetensors") for client in "ab")
    assert not torch.equal(a["model/stats/class_means.m"], b["model/stats/class_means.m"])
    transformers = [key for key in a if key.startswith("model/params/transformer.") and key.endswith(".weight")]
    assert transformers
    assert not any(torch.equal(a[key], b[key]) for key in transformers)
    seen = a["model/stats/class_means.m"].abs().sum(1) > 0
    assert seen.tolist() == [True, True, True, False]  # a holds no sample of class 3
    broadcast = load_file(run.path / "broadcast.safetensors")
    assert not [key for key in broadcast if "transformer" in key or "class_means" in key]


def test_the_mean_of_the_running_statistics_makes_a_global_model(tiny_run: Any) -> None:
    width = {"model.width": 2}
    plain, run = (tiny_run("fraug", model="resnet10", set={**width, "global_bn": each}) for each in ("none", "mean"))
    model, clients = (
        load_file(run.path / "model.safetensors"),
        [load_file(run.path / "clients" / f"{client}-0.safetensors") for client in "abc"],
    )
    name = "stem.bn1.running_var"
    mean = torch.stack([client[f"model/stats/{name}"] for client in clients]).mean(0)  # 24 images each
    torch.testing.assert_close(model[name], mean)
    assert run.rounds[-1]["accuracy"]["global"]["average"] is not None
    assert (
        load_file(run.path / "broadcast.safetensors").keys() == load_file(plain.path / "broadcast.safetensors").keys()
    )
    for client in "abc":  # nobody trains otherwise
        file = f"clients/{client}-0.safetensors"
        assert (plain.path / file).read_bytes() == (run.path / file).read_bytes()


@pytest.mark.parametrize(("unit", "samples"), [("epochs", 3 * 24 * 2), ("steps", 3 * 8 * 2)])
def test_local_unit(unit: str, samples: int, tiny_run: Any) -> None:
    run = tiny_run("fraug", rounds=1, epochs=2, set={"local_unit": unit})
    assert run.rounds[0]["samples"] == samples
    assert run.config["plan"]["unit"] == unit


def test_steps_go_on_over_the_end_of_the_data(tiny_run: Any) -> None:
    run = tiny_run("fraug", rounds=1, epochs=7, set={"local_unit": "steps"})
    assert run.rounds[0]["samples"] == 3 * 7 * 8  # 24 samples are three batches


@pytest.mark.parametrize("preset", ["authors", "digits"])
def test_presets(preset: str, tiny_run: Any) -> None:
    run = tiny_run("fraug", preset=preset, set={"noise_dim": 3})
    used = run.config["method"]["knobs"]
    expected = {**FRAug.presets[preset], "noise_dim": 3}
    assert {key: used[key] for key in expected} == expected
    assert run.rounds[-1]["events"] == []

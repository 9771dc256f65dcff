"""DP-SGD: gradients of single samples are autograd's, clipped; methods that say so have losses that are means."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from protofed.guards import PrivateGradients, parse_guard
from protofed.method import At, Plan, Step
from protofed.models import Split, build_model
from protofed.models.net import Net
from protofed.records import ClassTable, PrototypeSet
from protofed.registry import find_method, method_names

CLASSES = 3
METHODS = [name for name in method_names() if find_method(name)().separable]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def plain_net() -> Net:
    layers = {"hidden": nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Tanh()), "fc": nn.Linear(8, CLASSES)}
    return Net(Split(layers, cut="hidden", dim=8, classes=CLASSES).double())


def batch(size: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    rng = torch.Generator().manual_seed(1)
    return torch.randn(size, 1, 4, 4, generator=rng, dtype=torch.float64), torch.arange(size) % CLASSES


def value(method: Any, step: Step, net: Net, x: torch.Tensor, y: torch.Tensor, at: At) -> torch.Tensor:
    outcome = getattr(method, step.loss)(net, x, y, at)
    return torch.stack(list((outcome[0] if isinstance(outcome, tuple) else outcome).values())).sum()


def standing(name: str, net: Net, make_at: Any) -> tuple[Any, Net, At]:
    """A method in its second round, with every prototype there, on a model it can use."""
    method = find_method(name)()
    at = make_at(classes=CLASSES, dim=8, clients={"a": 20, "b": 10}, image_shape=(1, 4, 4), round=1)
    server = method.server_state(net, replace(at, client=None))
    down = method.broadcast(server, at)
    rows, labels = torch.randn(CLASSES + 1, 8, dtype=torch.float64), torch.tensor([0, 1, 2, 0])
    fillings = {
        ClassTable: ClassTable(rows[:CLASSES], torch.ones(CLASSES, dtype=torch.float64)),
        PrototypeSet: PrototypeSet(rows, labels, CLASSES),
    }
    known = {key: fillings[type(value)] for key, value in vars(down).items() if type(value) in fillings}
    start = net.pick()
    for param in net.params().values():
        param.data += 0.1 * torch.randn_like(param)
    return method, net, replace(at, down=replace(down, **known), memory=method.client_state(net, at), start=start)


@pytest.mark.parametrize("name", [name for name in METHODS if not name.startswith("fedadapter")])
def test_the_loss_of_a_batch_is_the_mean_over_its_samples(name: str, make_at) -> None:
    method, net, at = standing(name, plain_net(), make_at)
    x, y = batch()
    assert method.draw(y, at, torch.Generator()) is None
    for step in method.steps:
        singles = torch.stack([value(method, step, net, x[i : i + 1], y[i : i + 1], at) for i in range(len(y))])
        assert value(method, step, net, x, y, at).item() == pytest.approx(singles.mean().item(), rel=1e-9)


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "moon", "scaffold", "conffedproto", "fedproc", "fpl", "copa"])
def test_gradients_are_clipped_one_by_one(name: str, make_at) -> None:
    method, net, at = standing(name, plain_net(), make_at)
    at = replace(at, plan=Plan(epochs=(1, 1), batch=5))
    x, y = batch()
    clip = 0.7
    expected = [torch.zeros_like(param) for param in net.params().values()]
    for i in range(len(y)):
        loss = value(method, Step(), net, x[i : i + 1], y[i : i + 1], at)
        own = torch.autograd.grad(loss, list(net.params().values()))
        norm = torch.cat([part.flatten() for part in own]).norm()
        for total, part in zip(expected, own, strict=True):
            total += part * min(1.0, clip / norm)
    private = PrivateGradients(parse_guard(f"clip={clip},noise=1e-12"), at)
    found = private.of(method, Step(), net, x, y, at)
    for total, mine in zip(expected, found, strict=True):
        assert torch.allclose(mine, total / 5, atol=1e-9)  # divided by the expected batch, not the one drawn


def test_noise_is_what_was_asked_for_also_when_nobody_is_drawn(make_at) -> None:
    method, net, at = standing("fedavg", plain_net(), make_at)
    at = replace(at, plan=Plan(epochs=(1, 1), batch=4))
    x, y = batch()
    private = PrivateGradients(parse_guard("clip=0.5,noise=3"), at)
    noise = torch.cat([part.flatten() for part in private.of(method, Step(), net, x[:0], y[:0], at)])
    assert noise.std() == pytest.approx(3 * 0.5 / 4, rel=0.2)


def test_every_sample_is_drawn_by_itself(make_at) -> None:
    at = make_at(clients={"a": 1000}, plan=Plan(epochs=(2, 2), batch=100), round=1)
    private = PrivateGradients(parse_guard("clip=1,noise=1"), at)
    assert private.steps == 20
    sizes = [len(private.draw(1000)) for _ in range(50)]
    assert 95 < sum(sizes) / 50 < 105
    assert len(set(sizes)) > 10


def test_batch_normalisation_can_be_replaced() -> None:
    model = build_model("resnet10", (1, 8, 8), CLASSES, {"width": 6, "norm": "group"})
    assert not [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]
    model.double().train()
    x = torch.randn(4, 1, 8, 8, dtype=torch.float64)
    assert torch.allclose(model(x)[:1], model(x[:1]), atol=1e-10)  # each image by itself
    plain = build_model("resnet10", (1, 8, 8), CLASSES, {"width": 6})
    assert {name for name, _ in model.named_parameters()} == {name for name, _ in plain.named_parameters()}


def test_private_training_learns(tiny_run) -> None:
    """With little noise DP-SGD is SGD with clipped gradients."""
    pytest.importorskip("opacus")
    run = tiny_run("fedavg", rounds=6, epochs=4, lr=0.1, guard="clip=1,noise=0.01", set={"model.hidden": 32})
    plain = tiny_run("fedavg", rounds=6, epochs=4, lr=0.1, set={"model.hidden": 32})
    reached, possible = (one.summary["accuracy_final"]["global"]["average"] for one in (run, plain))
    assert reached > 0.6 * possible > 0.3


def test_adapters_are_trained_privately_in_a_frozen_backbone(tiny_run) -> None:
    """Batch normalisation that is not trained uses what it knows, so it does not mix samples."""
    pytest.importorskip("opacus")
    run = tiny_run("fedadapter", model="resnet10", set={"model.width": 2}, rounds=1, guard="clip=1,noise=1")
    assert run.summary["privacy"]["epsilon"] > 0

"""Local optimisers: the arithmetic of torch.optim, state that can be kept, and what FedNova needs to know."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from protofed.clients.optimizers import Adam, Sgd, kept_state, make_optimizers, restore_state
from protofed.errors import UserError
from protofed.method import Method, Plan, Step
from protofed.models import Split, head
from protofed.models.net import Net
from protofed.runs.options import make_options
from protofed.seeding import generator

ROUNDS, STEPS = 3, 4
KINDS: dict[str, Any] = {"sgd": (Sgd, torch.optim.SGD), "adam": (Adam, torch.optim.Adam)}


def model() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def loss_of(net: nn.Module, step: int) -> Tensor:
    x = torch.randn(5, 3, generator=generator(step, "x"), dtype=torch.float64)
    return (net(x) ** 2).sum() + net(x).sum()


@pytest.mark.parametrize("name", ["sgd", "adam"])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("kept", [False, True])
def test_equal_to_torch(name: str, weight_decay: float, momentum: float, kept: bool) -> None:
    """Several rounds of several steps, with the state carried over or begun afresh."""
    ours, theirs = model(), model()
    kind, reference = KINDS[name]
    plan = Plan(epochs=(1,), optimizer=name, momentum=momentum, weight_decay=weight_decay)
    options: dict[str, Any] = {"lr": 0.05, "weight_decay": weight_decay}
    if name == "sgd":
        options["momentum"] = momentum
    torch_optimizer = reference(theirs.parameters(), **options)
    state: dict[str, Tensor] = {}
    for round in range(ROUNDS):
        optimizer = kind(dict(ours.named_parameters()), plan, Step(), 0.05)
        if state and kept:
            optimizer.restore(state)
        elif not kept:
            torch_optimizer = reference(theirs.parameters(), **options)
        for step in range(STEPS):
            optimizer.step(loss_of(ours, round * STEPS + step))
            torch_optimizer.zero_grad()
            loss_of(theirs, round * STEPS + step).backward()
            torch_optimizer.step()
        state = optimizer.state()
        assert optimizer.taken == STEPS
        for mine, its in zip(ours.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(mine, its, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("most", [0.01, 1.0, 1e6])
def test_clip_is_that_of_torch(most: float) -> None:
    ours, theirs = model(), model()
    plan = Plan(epochs=(1,), momentum=0.0, weight_decay=0.1)
    optimizer = Sgd(dict(ours.named_parameters()), plan, Step(clip=most), 0.1)
    reference = torch.optim.SGD(theirs.parameters(), lr=0.1, weight_decay=0.1)
    for step in range(3):
        optimizer.step(loss_of(ours, step))
        reference.zero_grad()
        loss_of(theirs, step).backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), most)
        reference.step()
    for mine, its in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-10, atol=1e-12)


def test_a_parameter_outside_the_loss_stays() -> None:
    """Also under weight decay: as in torch, where it has no gradient."""
    net = nn.ModuleDict({"used": nn.Linear(2, 1), "unused": nn.Linear(2, 1)})
    before = net["unused"].weight.detach().clone()
    for kind in (Sgd, Adam):
        optimizer = kind(dict(net.named_parameters()), Plan(epochs=(1,), weight_decay=0.5), Step(), 0.1)
        optimizer.step(net["used"](torch.ones(1, 2)).sum())
    assert torch.equal(net["unused"].weight, before)


@pytest.mark.parametrize(("momentum", "steps", "a"), [(0.9, 2, 2.9), (0.9, 4, 9.049), (0.0, 4, 4.0), (0.0, 2, 2.0)])
def test_gt_05_reach(momentum: float, steps: int, a: float) -> None:
    weight = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    plan = Plan(epochs=(1,), momentum=momentum, weight_decay=0.0)
    optimizer = Sgd({"w": weight}, plan, Step(), 0.1)
    for _ in range(steps):
        optimizer.step(weight.sum())  # a gradient of 1
    assert optimizer.reach == pytest.approx(0.1 * a)
    assert optimizer.taken == steps
    assert 1 - weight.item() == pytest.approx(optimizer.reach)


def test_adam_has_no_reach() -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = Adam({"w": weight}, Plan(epochs=(1,)), Step(), 0.1)
    optimizer.step(weight.sum())
    assert optimizer.reach is None


class TwoSteps(Method):
    """Trains the head with its own rate, then everything."""

    steps = (Step(trains=head, lr=0.5, momentum=0.0, clip=2.0), Step())


def net() -> Net:
    stages = {"hidden": nn.Linear(2, 3), "fc": nn.Linear(3, 2)}
    return Net(Split(stages, cut="hidden", dim=3, classes=2))


def test_steps_have_their_own_parameters_and_rates() -> None:
    first, second = make_optimizers(TwoSteps(), net(), Plan(epochs=(1,), momentum=0.8), 0.01)
    assert first.names == ["fc.weight", "fc.bias"]
    assert (first.lr, first.momentum, first.clip) == (0.5, 0.0, 2.0)
    assert second.names == ["hidden.weight", "hidden.bias", "fc.weight", "fc.bias"]
    assert (second.lr, second.momentum, second.clip) == (0.01, 0.8, None)


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_state_is_kept_per_step(kind: Any) -> None:
    method, plan = TwoSteps(persist_optimizer=True), Plan(epochs=(1,), optimizer=kind)
    one = net()
    optimizers = make_optimizers(method, one, plan, 0.01)
    for optimizer in optimizers:
        optimizer.step((one(torch.ones(1, 2)) ** 2).sum())
    state = kept_state(method, optimizers)
    again = make_optimizers(method, net(), plan, 0.01)
    restore_state(method, again, state)
    assert kept_state(method, again).keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in kept_state(method, again).items())
    assert kept_state(TwoSteps(), optimizers) == {}


@pytest.mark.parametrize("schedule", ["none", "cosine"])
def test_learning_rate_over_rounds(schedule: Any) -> None:
    plan = Plan(epochs=(1,) * 4, lr=0.1, schedule=schedule)
    rates = [plan.lr_at(round) for round in range(4)]
    if schedule == "none":
        assert rates == [0.1] * 4
    else:
        assert rates == pytest.approx([0.1, 0.0853553, 0.05, 0.0146447], abs=1e-6)


def test_cosine_changes_a_run(tiny_run: Callable[..., Any]) -> None:
    plain, cosine = tiny_run("fedavg"), tiny_run("fedavg", schedule="cosine")
    assert plain.rounds[0]["train_loss"] == cosine.rounds[0]["train_loss"]
    assert (plain.path / "model.safetensors").read_bytes() != (cosine.path / "model.safetensors").read_bytes()


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_gradient_may_lie_otherwise_than_its_parameter(layout: torch.memory_format) -> None:
    """Expanded, transposed or channels last: what counts is which number belongs to which weight."""
    weight = torch.randn(3, 4, 2, 2, dtype=torch.float64).to(memory_format=layout).requires_grad_()
    start, by = weight.detach().clone(), torch.randn(4, 3, 2, 2, dtype=torch.float64)
    optimizer = Sgd({"weight": weight}, Plan(epochs=(1,), momentum=0.0, weight_decay=0.0), Step(), 0.1)
    optimizer.follow([by.transpose(0, 1)])
    optimizer.follow([torch.ones(1, dtype=torch.float64).expand(3, 4, 2, 2)])
    torch.testing.assert_close(weight.detach(), start - 0.1 * by.transpose(0, 1) - 0.1)


def test_a_cosine_may_be_longer_than_the_run() -> None:
    plan = Plan(epochs=(1,) * 4, lr=1.0, schedule="cosine=8")
    assert [plan.lr_at(round) for round in (0, 2, 4)] == pytest.approx([1.0, 0.5 + 0.5 * 0.5**0.5, 0.5])
    with pytest.raises(UserError, match="cosine=N"):
        make_options({"schedule": "cosine=0"})


def test_what_a_unit_gradient_does_goes_on_with_a_kept_velocity() -> None:
    """lr 1, momentum .9: weights under a unit gradient move by `reach`, in the second round as in the first."""
    plan = Plan(epochs=(1,), momentum=0.9, weight_decay=0.0)
    weight, state = torch.zeros(1, requires_grad=True), None
    for _ in range(3):
        optimizer = Sgd({"w": weight}, plan, Step(), 1.0)
        if state is not None:
            optimizer.restore(state)
        before = weight.item()
        for _ in range(2):
            optimizer.step(weight.sum())
        assert before - weight.item() == pytest.approx(optimizer.reach, rel=1e-5)
        state = optimizer.state()

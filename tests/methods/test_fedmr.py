"""FedMR: GT-14, GT-15, means and margins on the server, invariants, every knob."""

from itertools import combinations
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from protofed.methods.fedmr import (
    FedMR,
    ModelAndMargins,
    decorrelation,
    global_means,
    hinges,
    margin_loss,
    margins,
    pair_index,
)
from protofed.methods.fpl import SeparatePrototypeUpload
from protofed.models import build_model
from protofed.models.net import Net
from protofed.records import ClassTable, Weights, encode

NO_WEIGHTS = Weights({}, {})
H14 = torch.tensor([[1.0, 2, 0], [3, 6, 1], [5, 10, 0], [0, 1, 1], [2, 0, 3]])
Y14 = torch.tensor([0, 0, 0, 1, 1])
G15 = ClassTable(torch.tensor([[2.0, 0.0], [0.0, 0.0], [1.0, 3.0]]), torch.ones(3))
D15 = ClassTable(torch.tensor([[1.5], [2.0], [0.0]]), torch.tensor([1.0, 1.0, 0.0]))


def test_gt_14() -> None:
    assert decorrelation(H14, Y14, 2).item() == pytest.approx(0.466667, abs=1e-5)
    assert decorrelation(H14[:3], Y14[:3], 2).item() == pytest.approx(1.333333 / 3, abs=1e-5)
    assert decorrelation(H14[3:], Y14[3:], 2).item() == pytest.approx(1.0 / 2, abs=1e-5)


def literal(h: Tensor, y: Tensor) -> Tensor:
    """L_intra with the d x d matrices, class by class."""
    d, total, used = h.shape[1], torch.zeros(()), 0
    for k in y.unique():
        own = h[y == k]
        if len(own) > 1:
            z = (own - own.mean(0)) / (own.var(0) + 1e-8).sqrt()
            off = (z.T @ z) * (1 - torch.eye(d))
            total = total + off.pow(2).sum() / (d * (d - 1))
            used += len(own)
    return total / max(used, 1)


@pytest.mark.parametrize("dim", [2, 7, 40])
def test_decorrelation_is_that_of_the_matrices_and_so_is_its_gradient(dim: int) -> None:
    torch.manual_seed(dim)
    h = torch.rand(12, dim, dtype=torch.float64, requires_grad=True)
    y = torch.tensor([0, 1, 0, 2, 1, 0, 2, 4, 1, 1, 0, 0])
    ours, theirs = decorrelation(h, y, 6), literal(h, y)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(*(torch.autograd.grad(value, h)[0] for value in (ours, theirs)))


def test_single_samples_and_dead_features_are_harmless() -> None:
    h = torch.tensor([[1.0, 2.0, 0.0], [4.0, 1.0, 0.0], [5.0, 5.0, 0.0]], requires_grad=True)
    nobody = decorrelation(h, torch.tensor([0, 1, 2]), 3)
    assert nobody.item() == 0
    for y in ([0, 1, 2], [0, 0, 1], [0, 0, 0]):
        (gradient,) = torch.autograd.grad(decorrelation(h, torch.tensor(y), 3), h)
        assert gradient.isfinite().all()


def test_gt_15() -> None:
    terms, known = hinges(torch.tensor([[1.0, 0.0]]), torch.tensor([0]), G15, D15)
    assert known.tolist() == [[False, True, True]]
    torch.testing.assert_close(terms[known], torch.tensor([1.5, 0.0]), atol=1e-5, rtol=0)
    assert margin_loss(torch.tensor([[1.0, 0.0]]), torch.tensor([0]), G15, D15).item() == pytest.approx(0.75, abs=1e-5)


def test_a_pair_counts_only_with_both_means_and_a_margin() -> None:
    h, y = torch.rand(3, 2), torch.tensor([0, 1, 2])
    _, known = hinges(h, y, G15, D15)  # nobody owns 1 and 2 together
    assert known.tolist() == [[False, True, True], [True, False, False], [True, False, False]]
    _, known = hinges(h, y, ClassTable(G15.rows, torch.tensor([1.0, 1.0, 0.0])), D15)
    assert known.tolist() == [[False, True, False], [True, False, False], [False, False, False]]


def test_without_means_the_margin_loss_is_exactly_zero_with_finite_gradients() -> None:
    h = torch.zeros(2, 2, requires_grad=True)
    none, no_margins = ClassTable.empty(3, 2, like=h), ClassTable.empty(3, 1, like=h)
    value = margin_loss(h, torch.tensor([0, 1]), none, no_margins)
    assert value.item() == 0
    assert torch.equal(torch.autograd.grad(value, h)[0], torch.zeros(2, 2))
    at_the_mean = G15.rows.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(margin_loss(at_the_mean, torch.arange(3), G15, D15), at_the_mean)
    assert gradient.isfinite().all()


@pytest.mark.parametrize("classes", [2, 3, 7])
def test_pairs_stand_in_the_order_of_combinations(classes: int) -> None:
    a, b = torch.tensor(list(combinations(range(classes), 2))).T
    expected = torch.arange(len(a))
    assert torch.equal(pair_index(a, b, classes), expected)
    assert torch.equal(pair_index(b, a, classes), expected)
    assert torch.equal(torch.stack([a, b]), torch.triu_indices(classes, classes, 1))


TABLES = [
    ClassTable(torch.tensor([[0.0, 0.0], [3.0, 4.0], [0.0, 0.0]]), torch.tensor([1.0, 2.0, 0.0])),
    ClassTable(torch.tensor([[4.0, 0.0], [4.0, 1.0], [0.0, 0.0]]), torch.tensor([3.0, 2.0, 0.0])),
    ClassTable(torch.tensor([[0.0, 0.0], [6.0, 8.0], [6.0, 7.0]]), torch.tensor([0.0, 4.0, 1.0])),
]


@pytest.mark.parametrize("tables", [TABLES, TABLES[::-1]])
def test_server_means_and_margins(tables: list[ClassTable]) -> None:
    G, D = global_means(tables), margins(tables)
    torch.testing.assert_close(G.rows, torch.tensor([[3.0, 0.0], [4.75, 5.25], [6.0, 7.0]]))
    assert G.count.tolist() == [4.0, 8.0, 1.0]
    torch.testing.assert_close(D.rows, torch.tensor([[3.0], [0.0], [1.0]]))  # (5 + 1) / 2 over the owners of both
    assert D.count.tolist() == [2.0, 0.0, 1.0]


@pytest.mark.parametrize(("stale", "held"), [("keep", [True, True, False]), ("drop", [True, False, False])])
def test_what_becomes_of_what_nobody_sent(stale: Any, held: list[bool], make_at: Any) -> None:
    total = SeparatePrototypeUpload(weights=NO_WEIGHTS, P={"a": TABLES[0]})
    state = FedMR(stale_protos=stale).aggregate(ModelAndMargins(NO_WEIGHTS, G15, D15), total, make_at())
    assert state.D.held.tolist() == held
    assert state.G.held.tolist() == [True, True, stale == "keep"]


@pytest.mark.parametrize(("mu_intra", "mu_inter"), [(1e-5, 0.5), (0.1, 2.0), (0.0, 0.0)])
def test_weights_of_the_terms(mu_intra: float, mu_inter: float, make_at: Any, identity_net: Any) -> None:
    h, y = torch.tensor([[1.0, 0.0], [2.0, 3.0]]), torch.tensor([0, 0])
    at = make_at(classes=3, down=ModelAndMargins(NO_WEIGHTS, G15, D15))
    terms, _ = FedMR(mu_intra=mu_intra, mu_inter=mu_inter).loss(identity_net(classes=3), h, y, at)
    torch.testing.assert_close(terms["intra"], mu_intra * decorrelation(h, y, 3))
    torch.testing.assert_close(terms["inter"], mu_inter * margin_loss(h, y, G15, D15))


def test_payload(make_at: Any, samples_of: Any) -> None:
    net = Net(build_model("resnet10", (3, 8, 8), 10))
    at = make_at(classes=10, dim=512)
    upload, _ = FedMR().upload(net, samples_of(torch.rand(10, 3, 8, 8), torch.arange(10)), at)
    size = encode(upload, "a").size
    assert (size.weights, size.prototypes) == (4 * 4_903_242, 4 * 5_120)
    state = FedMR().aggregate(
        FedMR().server_state(net, at), SeparatePrototypeUpload(weights=net.pick(), P={"a": upload.P.value}), at
    )
    down = encode(state, "server").size
    assert (down.weights, down.prototypes) == (4 * 4_903_242, 4 * (5_120 + 45))


def test_intra_only_sends_exactly_what_fedavg_sends(tiny_run: Any) -> None:
    base, ours = tiny_run("fedavg"), tiny_run("fedmr", set={"variant": "intra_only"})
    assert [record["bytes"] for record in ours.rounds] == [record["bytes"] for record in base.rounds]
    assert set(ours.rounds[0]["loss_parts"]) == {"ce", "intra"}


@pytest.mark.parametrize("variant", ["full", "intra_only"])
def test_without_weights_it_is_fedavg(variant: str, tiny_run: Any) -> None:
    base, ours = tiny_run("fedavg"), tiny_run("fedmr", set={"variant": variant, "mu_intra": 0, "mu_inter": 0})
    left, right = (load_file(run.path / "model.safetensors") for run in (ours, base))
    assert all(torch.equal(left[name], right[name]) for name in right)


@pytest.mark.parametrize("settings", [{}, {"mu_intra": 0.01, "proto_pass": "last_epoch", "stale_protos": "drop"}])
def test_run(settings: Any, tiny_run: Any) -> None:
    run = tiny_run("fedmr", set=settings)
    assert run.rounds[0]["loss_parts"]["inter"] == 0
    assert run.rounds[1]["loss_parts"]["inter"] > 0 < run.rounds[1]["loss_parts"]["intra"]
    assert run.rounds[-1]["events"] == []
    assert run.prototypes()["rows"].shape == (4, 16)

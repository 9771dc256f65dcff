"""FedPLVM: GT-22, clusters on both levels, invariants, every knob."""

from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from protofed.methods.fedplvm import FedPLVM, FedPLVMUpload, correction
from protofed.methods.fpl import ModelAndClusters
from protofed.models import build_model
from protofed.models.net import Net
from protofed.records import PrototypeSet, Weights, encode
from protofed.verbs import cluster_means, finch_centres

NO_WEIGHTS = Weights({}, {})
H = torch.tensor([[2.0, 0.0]])
Y = torch.tensor([0])


def at_cosines(*cosines: float) -> torch.Tensor:
    """Vectors with these cosines to H."""
    c = torch.tensor(cosines)
    return torch.stack([c, (1 - c**2).sqrt()], 1)


C = PrototypeSet(at_cosines(0.81, 0.0625), torch.tensor([0, 1]), 2)


@pytest.mark.parametrize(("alpha", "expected"), [(0.25, 0.341916), (1.0, 0.202327)])
@pytest.mark.parametrize("lam", [1.0, 100.0, 0.0])
def test_gt_22(alpha: float, expected: float, lam: float, make_at: Any, identity_net: Any) -> None:
    method = FedPLVM(alpha=alpha, tau=0.5, lam=lam)
    terms, _ = method.loss(identity_net(), H, Y, make_at(down=ModelAndClusters(NO_WEIGHTS, C)))
    assert terms["alpha"].item() == pytest.approx(lam * expected, rel=1e-4, abs=1e-5)
    assert terms["corr"].item() == pytest.approx(lam * 0.0722, rel=1e-4, abs=1e-5)


def test_correction_uses_the_mean_of_the_clusters_and_counts_every_sample() -> None:
    two = PrototypeSet(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 0]), 2)
    expected = 2 * (0.5**0.5 - 1) ** 2
    assert correction(H, two, Y).item() == pytest.approx(expected, abs=1e-6)
    assert correction(H.expand(2, 2), two, torch.tensor([0, 1])).item() == pytest.approx(expected / 2, abs=1e-6)


@pytest.mark.parametrize("floor", [1e-6, 1e-2])
def test_negative_cosines_are_held_at_the_floor(floor: float) -> None:
    h = torch.tensor([[-1.0, 0.0], [0.0, 0.0], [1e-9, 1.0]], requires_grad=True)
    axes = PrototypeSet(torch.eye(2), torch.tensor([0, 1]), 2)
    value = FedPLVM(cos_floor=floor).contrast(h[:1], axes, Y)
    assert value.item() == pytest.approx(0.693147, abs=1e-5)  # both cosines are at the floor
    (gradient,) = torch.autograd.grad(FedPLVM(cos_floor=floor).contrast(h, axes, torch.tensor([0, 1, 0])), h)
    assert gradient.isfinite().all()


def test_without_prototypes_both_terms_are_exactly_zero_with_finite_gradients() -> None:
    h = torch.randn(3, 2, requires_grad=True)
    none = PrototypeSet.empty(2, 2, like=h)
    y = torch.tensor([0, 1, 0])
    for term in (FedPLVM().contrast(h, none, y), correction(h, none, y)):
        assert term.item() == 0
        (gradient,) = torch.autograd.grad(term, h)
        assert torch.equal(gradient, torch.zeros(3, 2))


def test_a_client_sends_the_clusters_of_its_features(make_at: Any, identity_net: Any, samples_of: Any) -> None:
    rad = torch.deg2rad(torch.tensor([0.0, 6, 11, 15, 90, 95, 45]))
    x, y = torch.stack([rad.cos(), rad.sin()], 1), torch.tensor([1, 1, 1, 1, 1, 1, 0])
    upload, _ = FedPLVM().upload(identity_net(classes=3), samples_of(x, y), make_at(classes=3))
    sent = upload.C.value
    assert sent.labels.tolist() == [0, 1, 1]  # class 2 is not held
    torch.testing.assert_close(sent.rows[0], x[6])
    torch.testing.assert_close(sent.rows[1:], finch_centres(x[:6]))


def aggregated(sets: list[PrototypeSet], make_at: Any, method: FedPLVM | None = None, before: Any = None) -> Any:
    total = FedPLVMUpload(weights=NO_WEIGHTS, C={str(i): s for i, s in enumerate(sets)})
    before = before or PrototypeSet.empty(2, 2, like=torch.ones(1))
    return (method or FedPLVM()).aggregate(ModelAndClusters(NO_WEIGHTS, before), total, make_at()).C


def test_server_clusters_the_centres_of_all_clients_in_any_order(make_at: Any) -> None:
    rad = torch.deg2rad(torch.tensor([0.0, 6, 90, 11, 15, 95]))
    rows = torch.stack([rad.cos(), rad.sin()], 1)
    sets = [PrototypeSet(part, torch.zeros(3, dtype=torch.long), 2) for part in rows.split(3)]
    found, turned = aggregated(sets, make_at), aggregated(sets[::-1], make_at)
    expected = torch.tensor([[0.985519, 0.138539], [-0.043578, 0.998097]])  # GT-19
    torch.testing.assert_close(found.rows, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(cluster_means(found).rows, cluster_means(turned).rows)
    torch.testing.assert_close(found.rows, turned.rows[turned.rows[:, 0].argsort(descending=True)])


@pytest.mark.parametrize(("stale", "labels"), [("keep", [0, 1]), ("drop", [0])])
def test_what_becomes_of_a_class_nobody_sent(stale: Any, labels: list[int], make_at: Any) -> None:
    sent = PrototypeSet(torch.ones(1, 2), torch.tensor([0]), 2)
    assert aggregated([sent], make_at, FedPLVM(stale_protos=stale), C).labels.tolist() == labels


def test_payload(make_at: Any, samples_of: Any) -> None:
    net = Net(build_model("resnet10", (3, 8, 8), 10))
    samples = samples_of(torch.rand(30, 3, 8, 8), torch.arange(30) % 10)
    upload, _ = FedPLVM().upload(net, samples, make_at(classes=10, dim=512))
    size = encode(upload, "a").size
    assert size.weights == 4 * 4_903_242
    assert size.prototypes == 4 * 512 * len(upload.C.value.labels) == 4 * 512 * 10  # three vectors are one cluster


def test_round_0_and_no_weight_are_fedavg(tiny_run: Any) -> None:
    base = tiny_run("fedavg", rounds=2)
    ours = tiny_run("fedplvm", rounds=2, set={"lam": 0})
    first = tiny_run("fedplvm", rounds=1)
    assert first.rounds[0]["train_loss"] == base.rounds[0]["train_loss"]
    left, right = (load_file(run.path / "model.safetensors") for run in (ours, base))
    assert all(torch.equal(left[name], right[name]) for name in right)


@pytest.mark.parametrize("settings", [{}, {"alpha": 0.5, "tau": 0.2, "lam": 1, "cos_floor": 1e-3}])
@pytest.mark.parametrize("preset", [None, "authors"])
@pytest.mark.parametrize("proto_pass", ["extra_eval", "last_epoch"])
def test_run(settings: Any, preset: str | None, proto_pass: str, tiny_run: Any) -> None:
    run = tiny_run("fedplvm", preset=preset, set={**settings, "proto_pass": proto_pass})
    assert run.rounds[0]["loss_parts"]["alpha"] == 0
    assert run.rounds[1]["loss_parts"]["alpha"] > 0 < run.rounds[1]["loss_parts"]["corr"]
    assert run.rounds[-1]["events"] == []
    assert run.prototypes()["rows"].shape == (4, 16)

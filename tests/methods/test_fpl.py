"""FPL: GT-21, clusters per class on the server, invariants, every knob."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from protofed.methods.fpl import FPL, ModelAndClusters, SeparatePrototypeUpload
from protofed.models import build_model
from protofed.models.net import Net
from protofed.records import ClassTable, PrototypeSet, Weights, encode
from protofed.verbs import class_clusters, cluster_means, cosine, set_contrast

C = PrototypeSet(torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]]), torch.tensor([0, 0, 1]), 2)
NO_WEIGHTS = Weights({}, {})


@pytest.mark.parametrize(("reduction", "upcr"), [("mean", 0.25), ("sum", 0.5)])
def test_gt_21(reduction: Any, upcr: float, make_at: Any, identity_net: Any) -> None:
    method = FPL(tau=0.5, upcr_reduction=reduction)
    at = make_at(down=ModelAndClusters(NO_WEIGHTS, C))
    terms, notes = method.loss(identity_net(), torch.ones(1, 2), torch.tensor([0]), at)
    assert terms["cpcl"].item() == pytest.approx(0.029125, abs=1e-5)
    assert terms["upcr"].item() == pytest.approx(upcr, abs=1e-5)
    assert torch.equal(notes["h"], torch.ones(1, 2))


def test_contrast_by_hand() -> None:
    h, y = torch.tensor([[1.0, 2.0], [-3.0, 1.0], [0.5, -1.0]]), torch.tensor([0, 1, 0])
    e = (cosine(h, C.rows) / 0.1).double().exp()
    own = torch.stack([e[0, :2].sum(), e[1, 2], e[2, :2].sum()])
    expected = -(own / e.sum(1)).log().mean()
    torch.testing.assert_close(set_contrast(cosine(h, C.rows) / 0.1, C, y), expected.float())


def test_samples_without_prototype_add_nothing_and_are_counted() -> None:
    h = torch.tensor([[1.0, 1.0], [2.0, 5.0]])
    method = FPL(tau=0.5)
    C3 = replace(C, classes=3)
    for term in (method.contrast, method.regularisation):
        alone, both = term(h[:1], C3, torch.tensor([0])), term(h, C3, torch.tensor([0, 2]))
        torch.testing.assert_close(both, alone / 2)


def test_without_prototypes_both_terms_are_exactly_zero_with_finite_gradients() -> None:
    h = torch.randn(3, 2, requires_grad=True)
    none = PrototypeSet.empty(2, 2, like=h)
    y = torch.tensor([0, 1, 0])
    method = FPL()
    for term in (method.contrast(h, none, y), method.regularisation(h, none, y)):
        assert term.item() == 0
        (gradient,) = torch.autograd.grad(term, h)
        assert torch.equal(gradient, torch.zeros(3, 2))


def test_contrast_is_finite_at_the_smallest_temperature() -> None:
    h = torch.tensor([[-1.0, 0.0]], requires_grad=True)
    value = FPL(tau=1e-3).contrast(h, C, torch.tensor([0]))
    (gradient,) = torch.autograd.grad(value, h)
    assert value.isfinite()
    assert gradient.isfinite().all()


def table(*angles: float | None) -> ClassTable:
    """A client's prototypes as unit vectors; None: the class is not held."""
    rad = torch.deg2rad(torch.tensor([0.0 if angle is None else angle for angle in angles]))
    held = torch.tensor([angle is not None for angle in angles])
    return ClassTable(torch.stack([rad.cos(), rad.sin()], 1) * held[:, None], held.float() * 5)


def aggregated(tables: list[ClassTable], make_at: Any, method: FPL | None = None, before: Any = None) -> PrototypeSet:
    total = SeparatePrototypeUpload(weights=NO_WEIGHTS, P={str(i): t for i, t in enumerate(tables)})
    before = before or PrototypeSet.empty(2, 2, like=torch.ones(1))
    return (method or FPL()).aggregate(ModelAndClusters(NO_WEIGHTS, before), total, make_at()).C


def test_server_clusters_each_class_by_itself(make_at: Any) -> None:
    tables = [table(angle, None) for angle in (0, 6, 11, 15, 90)] + [table(95, 30)]
    found = aggregated(tables, make_at)
    assert found.labels.tolist() == [0, 0, 1]
    expected = [[0.985519, 0.138539], [-0.043578, 0.998097], [0.866025, 0.5]]  # GT-19, and the only one that was sent
    torch.testing.assert_close(found.rows, torch.tensor(expected), atol=1e-5, rtol=0)
    torch.testing.assert_close(cluster_means(found).rows[0], torch.tensor([0.470970, 0.568318]), atol=1e-5, rtol=0)


def test_order_of_clients_does_not_matter(make_at: Any) -> None:
    tables = [table(angle, angle + 40) for angle in (0, 6, 11, 15, 90, 95)]
    found, turned = aggregated(tables, make_at), aggregated(tables[::-1], make_at)
    torch.testing.assert_close(cluster_means(found).rows, cluster_means(turned).rows)
    for k in (0, 1):
        rows, other = (s.rows[s.labels == k] for s in (found, turned))
        torch.testing.assert_close(rows[rows[:, 0].argsort()], other[other[:, 0].argsort()])


@pytest.mark.parametrize(("stale", "labels"), [("keep", [0, 1, 1]), ("drop", [0])])
def test_what_becomes_of_a_class_nobody_sent(stale: Any, labels: list[int], make_at: Any) -> None:
    before = PrototypeSet(torch.tensor([[5.0, 5.0], [1.0, 2.0], [3.0, 4.0]]), torch.tensor([0, 1, 1]), 2)
    found = aggregated([table(0, None)], make_at, FPL(stale_protos=stale), before)
    assert found.labels.tolist() == labels
    assert found.rows[0].tolist() == [1.0, 0.0]
    assert torch.equal(found.rows[1:], before.rows[1:][: len(labels) - 1])


def test_clusters_of_nothing() -> None:
    none = class_clusters(torch.zeros(0, 3), torch.zeros(0, dtype=torch.long), 4)
    assert (none.rows.shape, none.labels.shape, none.classes) == ((0, 3), (0,), 4)


def test_payload(make_at: Any, samples_of: Any) -> None:
    net = Net(build_model("resnet10", (3, 8, 8), 10))
    at = make_at(classes=10, dim=512)
    upload, _ = FPL().upload(net, samples_of(torch.rand(10, 3, 8, 8), torch.arange(10)), at)
    size = encode(upload, "a").size
    assert (size.weights, size.prototypes) == (4 * 4_903_242, 4 * 5_120)
    down = ModelAndClusters(net.pick(), PrototypeSet(torch.rand(13, 512), torch.arange(13) % 10, 10))
    assert encode(down, "server").size.prototypes == 4 * 512 * 13


def test_round_0_is_fedavg(tiny_run: Any) -> None:
    ours, base = tiny_run("fpl", rounds=1), tiny_run("fedavg", rounds=1)
    assert ours.rounds[0]["train_loss"] == base.rounds[0]["train_loss"]
    left, right = (load_file(run.path / "model.safetensors") for run in (ours, base))
    assert all(torch.equal(left[name], right[name]) for name in right)


@pytest.mark.parametrize("settings", [{}, {"tau": 0.2, "upcr_reduction": "sum"}])
@pytest.mark.parametrize("preset", [None, "authors"])
def test_run(settings: Any, preset: str | None, tiny_run: Any) -> None:
    run = tiny_run("fpl", rounds=3, preset=preset, set=settings)
    parts = [record["loss_parts"] for record in run.rounds]
    assert parts[0]["cpcl"] == parts[0]["upcr"] == 0
    assert parts[1]["cpcl"] > 0 < parts[1]["upcr"]
    assert run.rounds[-1]["events"] == []
    assert run.prototypes()["rows"].shape == (4, 16)


def test_partial_participation_keeps_or_drops(make_data: Any, tiny_run: Any) -> None:
    data = make_data(("a", "b"), absent={"a": [3], "b": [0]})
    for stale in ("keep", "drop"):
        run = tiny_run("fpl", data, rounds=4, participation=0.5, seed=1, set={"stale_protos": stale})
        assert {tuple(record["participants"]) for record in run.rounds} == {("a-0",), ("b-0",)}
        assert bool((run.prototypes()["count"] > 0).all()) is (stale == "keep")

"""FedProto in both forms: GT-16, GT-17, invariants, every knob."""

from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from protofed.data import load
from protofed.inference import Classifier
from protofed.methods.fedproto import (
    FedProto,
    FedProtoAveraged,
    GlobalPrototypes,
    ModelAndPrototypes,
    ModelAndPrototypeUpload,
    PrototypeUpload,
)
from protofed.models import build_model
from protofed.models.net import Net
from protofed.records import ClassTable, Mean, Tally, Weights

H = torch.tensor([[1.0, 1.0], [0.0, 2.0], [5.0, 5.0]])
Y = torch.tensor([0, 0, 1])
NO_WEIGHTS = Weights({}, {})
G = ClassTable(torch.tensor([[2.0, 1.0], [0.0, 0.0]]), torch.tensor([1.0, 0.0]))


@pytest.mark.parametrize("form", [FedProto, FedProtoAveraged])
@pytest.mark.parametrize(("reduction", "expected"), [("mse", 1.0), ("sq_l2", 3.0)])
@pytest.mark.parametrize("lam", [1.0, 0.1, 0.0])
def test_gt_17(form: Any, reduction: str, expected: float, lam: float, make_at: Any, identity_net: Any) -> None:
    method = form(lam=lam, align_reduction=reduction)
    terms, notes = method.loss(identity_net(), H, Y, make_at(down=GlobalPrototypes(G)))
    assert terms["align"].item() == pytest.approx(lam * expected, abs=1e-5)
    assert terms["ce"].item() == pytest.approx(torch.tensor(2.0).log().item())  # a head of zeros
    assert torch.equal(notes["h"], H)


def aggregated(method: Any, tables: list[ClassTable], before: ClassTable, make_at: Any) -> ClassTable:
    tally, personal = Tally(), isinstance(method, FedProto)
    for i, table in enumerate(tables):
        P = Mean(table, table.count if method.proto_weighting == "count" else 1.0)
        tally.add(str(i), PrototypeUpload(P) if personal else ModelAndPrototypeUpload(Mean(NO_WEIGHTS, 1.0), P))
    state = GlobalPrototypes(before) if personal else ModelAndPrototypes(NO_WEIGHTS, before)
    return method.aggregate(state, tally.total(), make_at(client=None)).G


@pytest.mark.parametrize("form", [FedProto, FedProtoAveraged])
@pytest.mark.parametrize(("weighting", "expected"), [("uniform", [2.0, 1.0]), ("count", [2.5, 1.5])])
def test_gt_16(form: Any, weighting: str, expected: list[float], make_at: Any) -> None:
    tables = [
        ClassTable(torch.tensor([[1.0, 0.0], [0.0, 0.0]]), torch.tensor([10.0, 0.0])),
        ClassTable(torch.tensor([[3.0, 2.0], [0.0, 0.0]]), torch.tensor([30.0, 0.0])),
    ]
    none = ClassTable.empty(2, 2, torch.ones(1))
    G = aggregated(form(proto_weighting=weighting), tables, none, make_at)
    torch.testing.assert_close(G.rows[0], torch.tensor(expected))
    assert G.held.tolist() == [True, False]


@pytest.mark.parametrize(("stale", "rows"), [("keep", [[1.0, 1.0], [8.0, 9.0]]), ("drop", [[1.0, 1.0], [0.0, 0.0]])])
def test_what_becomes_of_a_class_nobody_sent(stale: str, rows: list[list[float]], make_at: Any) -> None:
    sent = ClassTable(torch.tensor([[1.0, 1.0], [0.0, 0.0]]), torch.tensor([4.0, 0.0]))
    before = ClassTable(torch.tensor([[6.0, 7.0], [8.0, 9.0]]), torch.tensor([1.0, 2.0]))
    G = aggregated(FedProto(stale_protos=stale), [sent], before, make_at)
    assert G.rows.tolist() == rows
    assert G.held.tolist() == [True, stale == "keep"]


@pytest.mark.parametrize("weighting", ["uniform", "count"])
def test_uploaded_prototypes_are_class_means(weighting: str, make_at: Any, identity_net: Any, samples_of: Any) -> None:
    upload, _ = FedProto(proto_weighting=weighting).upload(identity_net(), samples_of(H, Y), make_at())
    torch.testing.assert_close(upload.P.value.rows, torch.tensor([[0.5, 1.5], [5.0, 5.0]]))
    assert upload.P.value.count.tolist() == [2, 1]
    assert torch.as_tensor(upload.P.weight).tolist() == ([2, 1] if weighting == "count" else 1)


def test_last_epoch_takes_what_training_saw(make_at: Any, identity_net: Any, samples_of: Any) -> None:
    seen = make_at(notes={"h": H + 1, "y": Y})
    upload, _ = FedProto(proto_pass="last_epoch").upload(identity_net(), samples_of(H, Y), seen)
    torch.testing.assert_close(upload.P.value.rows, torch.tensor([[1.5, 2.5], [6.0, 6.0]]))


@pytest.mark.parametrize("form", [FedProto, FedProtoAveraged])
def test_inference(form: Any, make_at: Any, identity_net: Any) -> None:
    net = identity_net(head=torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    both = ClassTable(torch.tensor([[5.0, 5.0], [0.0, 0.0]]), torch.ones(2))
    at = make_at(down=GlobalPrototypes(both), held=torch.ones(2))
    x = torch.tensor([[1.0, 2.0]])
    assert form(inference="head").predict(net, x, at).argmax(1).tolist() == [1]
    assert form(inference="nearest").predict(net, x, at).argmax(1).tolist() == [1]
    assert form(inference="nearest").predict(net, x + 3, at).argmax(1).tolist() == [0]
    only_first = make_at(down=GlobalPrototypes(both), held=torch.tensor([3.0, 0.0]))
    assert form(inference="nearest").predict(net, x, only_first).argmax(1).tolist() == [0]


def test_without_alignment_the_averaged_form_is_fedavg(tiny_run: Any) -> None:
    plain, without = tiny_run("fedavg"), tiny_run("fedproto_avg", set={"lam": 0})
    assert (plain.path / "model.safetensors").read_bytes() == (without.path / "model.safetensors").read_bytes()
    assert [record["accuracy"] for record in plain.rounds] == [record["accuracy"] for record in without.rounds]


def test_without_alignment_clients_train_alone(tiny_run: Any) -> None:
    together = tiny_run("fedproto", set={"lam": 0})
    assert together.rounds[-1]["accuracy"]["global"] is None
    alone = tiny_run("fedproto", domains="c", set={"lam": 0})
    # The same client in a federation of its own: nothing that others do reaches it.
    assert (together.path / "clients/c-0.safetensors").read_bytes() == (
        alone.path / "clients/c-0.safetensors"
    ).read_bytes()


@pytest.mark.parametrize("method", ["fedproto", "fedproto_avg"])
def test_the_first_round_equals_the_base_method(method: str, tiny_run: Any) -> None:
    with_lam, without = tiny_run(method, rounds=1), tiny_run(method, rounds=1, set={"lam": 0})
    for name in ("a-0", "b-0", "c-0"):
        file = f"clients/{name}.safetensors"
        assert (with_lam.path / file).read_bytes() == (without.path / file).read_bytes()
    assert with_lam.rounds[0]["loss_parts"]["align"] == 0
    later = tiny_run(method, rounds=2)
    assert later.rounds[1]["loss_parts"]["align"] > 0


def test_bytes_are_the_closed_form(tiny_run: Any) -> None:
    run = tiny_run("fedproto")
    first, second = run.rounds
    held = 3 + 3 + 4  # classes that a, b, c hold
    assert first["bytes"]["up"]["prototypes"] == second["bytes"]["up"]["prototypes"] == held * 16 * 4
    assert first["bytes"]["down"]["prototypes"] == 0
    assert second["bytes"]["down"]["prototypes"] == 3 * 4 * 16 * 4
    for record in run.rounds:
        assert record["bytes"]["up"]["weights"] == record["bytes"]["down"]["weights"] == 0
    averaged = tiny_run("fedproto_avg").rounds[1]["bytes"]
    assert averaged["up"]["prototypes"] == held * 16 * 4
    assert averaged["up"]["weights"] == 3 * 4 * (64 * 16 + 16 + 16 * 4 + 4)


def test_prototypes_are_written(tiny_run: Any) -> None:
    run = tiny_run("fedproto")
    found = load_file(run.path / "prototypes.safetensors")
    assert found["rows"].shape == (4, 16)
    assert found["count"].tolist() == [8 + 6, 8 + 8 + 6, 8 + 8 + 6, 8 + 6]
    assert not (run.path / "model.safetensors").exists()


@pytest.mark.parametrize("method", ["fedproto", "fedproto_avg"])
@pytest.mark.parametrize(
    "settings",
    [
        {"lam": 0.1, "align_reduction": "sq_l2"},
        {"proto_weighting": "count", "stale_protos": "drop"},
        {"inference": "nearest"},
        {"proto_pass": "last_epoch", "persist_optimizer": "on"},
        {"weighting": "uniform", "drop_singleton_batch": "off"},
    ],
)
def test_every_knob_runs(method: str, settings: dict[str, str], tiny_run: Any) -> None:
    run = tiny_run(method, set=settings, batch=7)
    assert run.complete
    assert run.rounds[-1]["train_loss"] is not None


@pytest.mark.parametrize("inference", ["head", "nearest"])
def test_the_personal_view_is_what_each_client_predicts(inference: str, tiny_run: Any, tiny_data: str) -> None:
    run = tiny_run("fedproto_avg", set={"inference": inference})
    scored = run.rounds[-1]["accuracy"]["personal"]
    for client in ("a-0", "b-0", "c-0"):
        test = load(tiny_data).domains[client[0]].test
        predicted = Classifier(run, client=client)(test.x).argmax(1)
        assert scored[client] == pytest.approx((predicted == test.y).double().mean().item())


def test_knobs_change_what_is_learnt(tiny_run: Any) -> None:
    choices: list[dict[str, Any]] = [
        {},
        {"align_reduction": "sq_l2"},
        {"proto_weighting": "count"},
        {"proto_pass": "last_epoch"},
        {"lam": 0.1},
    ]
    files = [(tiny_run("fedproto", set=each).path / "prototypes.safetensors").read_bytes() for each in choices]
    assert len(set(files)) == len(choices)


def test_prototypes_come_from_a_pass_in_evaluation_mode(make_at: Any, samples_of: Any) -> None:
    net = Net(build_model("resnet10", (1, 8, 8), 2, {"width": 4}))
    x, y = torch.randn(6, 1, 8, 8), torch.tensor([0, 0, 0, 1, 1, 1])
    net.model.train()
    upload, _ = FedProto().upload(net, samples_of(x, y), make_at(classes=2, dim=net.dim))
    net.model.eval()
    expected = net.features(x).detach().view(2, 3, -1).mean(1)
    torch.testing.assert_close(upload.P.value.rows, expected)

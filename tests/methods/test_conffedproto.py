"""ConfFedProto: GT-28 to GT-30, invariants, every knob and the preset."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from protofed.methods.conffedproto import ConfFedProto
from protofed.methods.fedproto import FedProto, GlobalPrototypes, PrototypeUpload
from protofed.records import ClassTable, Mean, Tally

H = torch.tensor([[1.0, 1.0], [0.0, 2.0], [5.0, 5.0]])
Y = torch.tensor([0, 0, 1])
G = ClassTable(torch.tensor([[2.0, 1.0], [0.0, 0.0]]), torch.tensor([1.0, 0.0]))


@pytest.mark.parametrize(("normaliser", "expected"), [("count", [0.9, 0.8]), ("confidence", [1.5, 1.333333])])
def test_gt_28(normaliser: str, expected: list[float], make_at: Any, identity_net: Any, samples_of: Any) -> None:
    h = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 3.0]])
    c = torch.tensor([[0.9], [0.3], [0.6]])
    y = torch.zeros(3, dtype=torch.int64)
    # Notes of the last epoch stand in for a network that would have these confidences.
    method = ConfFedProto(conf_normaliser=normaliser, proto_pass="last_epoch")
    upload, _ = method.upload(identity_net(), samples_of(h, y), make_at(notes={"h": h, "c": c, "y": y}))
    torch.testing.assert_close(upload.P.value.rows[0], torch.tensor(expected), atol=1e-5, rtol=0)
    assert upload.P.value.count.tolist() == [3, 0]


def test_confidence_normaliser_ignores_its_scale(make_at: Any, identity_net: Any, samples_of: Any) -> None:
    h, y = torch.randn(6, 2), torch.tensor([0, 1, 0, 1, 0, 0])
    c = torch.rand(6, 1) + 0.1
    method = ConfFedProto(conf_normaliser="confidence", proto_pass="last_epoch")
    tables = [
        method.upload(identity_net(), samples_of(h, y), make_at(notes={"h": h, "c": scale * c, "y": y}))[0].P.value
        for scale in (1.0, 0.25)
    ]
    torch.testing.assert_close(tables[0].rows, tables[1].rows)


def test_gt_29(make_at: Any) -> None:
    tally = Tally()
    for i, (row, count) in enumerate((([0.9, 0.8], 3.0), ([0.2, 0.8], 50.0), ([0.0, 0.0], 0.0))):
        tally.add(str(i), PrototypeUpload(Mean(ClassTable(torch.tensor([row]), torch.tensor([count])), 1.0)))
    empty = GlobalPrototypes(ClassTable.empty(1, 2, torch.ones(1)))
    G = ConfFedProto().aggregate(empty, tally.total(), make_at(client=None)).G
    torch.testing.assert_close(G.rows[0], torch.tensor([0.55, 0.80]), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("missing", "expected"), [("skip", 1.0), ("zero", 9.333333)])
def test_gt_30(missing: str, expected: float, make_at: Any, identity_net: Any) -> None:
    method = ConfFedProto(lam=1.0, align_on="raw", missing_target=missing)
    terms, _ = method.loss(identity_net(), H, Y, make_at(down=GlobalPrototypes(G)))
    assert terms["align"].item() == pytest.approx(expected, abs=1e-5)


def test_scaled_alignment(make_at: Any, identity_net: Any) -> None:
    # A head of zeros gives every label the confidence one half.
    terms, seen = ConfFedProto(lam=1.0).loss(identity_net(), H, Y, make_at(down=GlobalPrototypes(G)))
    expected = ((0.5 * H[:2] - G.rows[0]) ** 2).sum() / 6
    torch.testing.assert_close(terms["align"], expected)
    assert seen["c"].tolist() == [[0.5]] * 3


def test_the_confidence_is_that_in_the_label_also_where_the_prediction_is_another(identity_net: Any) -> None:
    net = identity_net(head=torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    seen = ConfFedProto().observe(net, torch.tensor([[0.0, 3.0], [0.0, 3.0]]), torch.tensor([0, 1]))
    assert seen["c"][:, 0].tolist() == pytest.approx([1 / (1 + math.exp(3)), 1 / (1 + math.exp(-3))])


@pytest.mark.parametrize("detach", [True, False])
def test_gradient_through_the_confidence(detach: bool, make_at: Any, identity_net: Any) -> None:
    net = identity_net(head=torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    terms, _ = ConfFedProto(conf_detach=detach).loss(net, H, Y, make_at(down=GlobalPrototypes(G)))
    # The features are the input here, so the head is reached through the confidence only.
    assert terms["align"].requires_grad is not detach


def test_linear_ramp(make_at: Any, identity_net: Any) -> None:
    def align(ramp: str, round: int) -> float:
        at = make_at(down=GlobalPrototypes(G), rounds=4, round=round)
        return ConfFedProto(lambda_ramp=ramp).loss(identity_net(), H, Y, at)[0]["align"].item()

    assert align("linear", 0) == 0
    assert align("linear", 1) == pytest.approx(align("none", 1) / 4)
    assert align("linear", 3) == pytest.approx(align("none", 0) * 3 / 4)


class Certain(ConfFedProto):
    """Trusts every label completely."""

    def observe(self, net: Any, x: Any, y: Any) -> Any:
        """Confidence 1."""
        seen = super().observe(net, x, y)
        return {**seen, "c": torch.ones_like(seen["c"])}


@pytest.mark.parametrize("normaliser", ["count", "confidence"])
def test_full_confidence_is_fedproto(normaliser: str, make_at: Any, identity_net: Any, samples_of: Any) -> None:
    net = identity_net(head=torch.tensor([[1.0, -1.0], [0.5, 1.0]]))
    certain, plain = Certain(lam=0.7, conf_normaliser=normaliser), FedProto(lam=0.7)
    at = make_at(down=GlobalPrototypes(G))
    left, right = certain.loss(net, H, Y, at)[0], plain.loss(net, H, Y, at)[0]
    assert all(torch.equal(left[name], right[name]) for name in ("ce", "align"))
    ours, theirs = (method.upload(net, samples_of(H, Y), at)[0].P for method in (certain, plain))
    assert torch.equal(ours.value.rows, theirs.value.rows)
    assert ours.weight == theirs.weight == 1.0


def test_a_client_without_the_class_changes_nothing(make_at: Any) -> None:
    def G(*tables: ClassTable) -> Any:
        tally = Tally()
        for i, table in enumerate(tables):
            tally.add(str(i), PrototypeUpload(Mean(table, 1.0)))
        empty = GlobalPrototypes(ClassTable.empty(2, 2, torch.ones(1)))
        return ConfFedProto().aggregate(empty, tally.total(), make_at(client=None)).G

    owner = ClassTable(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.ones(2))
    lacking = ClassTable(torch.tensor([[9.0, 9.0], [0.0, 0.0]]), torch.tensor([5.0, 0.0]))
    assert torch.equal(G(owner).rows[1], G(owner, lacking).rows[1])
    torch.testing.assert_close(G(owner, lacking).rows, G(lacking, owner).rows)


def test_inference(make_at: Any, identity_net: Any) -> None:
    at = make_at(down=SimpleNamespace(G=ClassTable(torch.tensor([[0.0, 0.0], [4.0, 4.0]]), torch.ones(2))))
    net = identity_net(head=torch.tensor([[9.0, 9.0], [0.0, 0.0]]))
    x = torch.tensor([[3.0, 3.0]])
    assert ConfFedProto().predict(net, x, at).argmax(1).tolist() == [0]
    assert ConfFedProto(inference="nearest").predict(net, x, at).argmax(1).tolist() == [1]


def test_the_first_round_equals_local_training(tiny_run: Any) -> None:
    ours, alone = tiny_run("conffedproto", rounds=1), tiny_run("fedproto", rounds=1, set={"lam": 0})
    for name in ("a-0", "b-0", "c-0"):
        file = f"clients/{name}.safetensors"
        assert (ours.path / file).read_bytes() == (alone.path / file).read_bytes()


@pytest.mark.parametrize(
    "settings",
    [
        {"lam": 0.1, "conf_normaliser": "confidence", "align_on": "raw"},
        {"conf_detach": "on", "missing_target": "zero"},
        {"lambda_ramp": "linear", "inference": "nearest"},
        {"proto_pass": "last_epoch", "stale_protos": "drop", "persist_optimizer": "on"},
    ],
)
def test_every_knob_runs(settings: dict[str, str], tiny_run: Any) -> None:
    run = tiny_run("conffedproto", set=settings)
    assert run.complete
    assert run.rounds[-1]["train_loss"] is not None


def test_knobs_change_what_is_learnt(tiny_run: Any) -> None:
    choices: list[dict[str, Any]] = [
        {},
        {"conf_normaliser": "confidence"},
        {"align_on": "raw"},
        {"conf_detach": "on"},
        {"lambda_ramp": "linear"},
        {"proto_pass": "last_epoch"},
    ]
    files = [(tiny_run("conffedproto", set=each).path / "prototypes.safetensors").read_bytes() for each in choices]
    assert len(set(files)) == len(choices)


def test_a_class_that_nobody_has_sent_yet_may_be_pulled_to_zero(tiny_run: Any) -> None:
    skipped, pulled = (
        tiny_run("conffedproto", participation=0.3, seed=21, set={"missing_target": missing})
        for missing in ("skip", "zero")
    )
    # Class 3, which a lacks, has no prototype when another client trains after it.
    assert [record["participants"] for record in skipped.rounds] == [["a-0"], ["c-0"]]
    assert [record["loss_parts"]["align"] for record in (skipped.rounds[0], pulled.rounds[0])] == [0, 0]
    assert skipped.rounds[1]["loss_parts"]["align"] != pulled.rounds[1]["loss_parts"]["align"]


def test_the_authors_preset(tiny_run: Any) -> None:
    knobs = tiny_run("conffedproto", preset="authors").config["method"]["knobs"]
    assert (knobs["missing_target"], knobs["lambda_ramp"], knobs["proto_pass"]) == ("zero", "linear", "last_epoch")


def test_bytes_are_the_closed_form(tiny_run: Any) -> None:
    run = tiny_run("conffedproto")
    assert run.rounds[1]["bytes"]["up"]["prototypes"] == (3 + 3 + 4) * 16 * 4
    assert run.rounds[1]["bytes"]["down"]["prototypes"] == 3 * 4 * 16 * 4
    assert run.rounds[1]["bytes"]["up"]["weights"] == 0
    assert load_file(run.path / "prototypes.safetensors")["rows"].shape == (4, 16)

"""FedProc: GT-18, the schedule, exact class means, invariants, every knob."""

from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

from protofed.methods.fedproc import FedProc
from protofed.methods.fedproto import ModelAndPrototypes, ModelAndPrototypeUpload
from protofed.models import build_model
from protofed.models.net import Net
from protofed.records import ClassTable, Mean, Tally, Weights, encode
from protofed.registry import knobs

NO_WEIGHTS = Weights({}, {})
G = ClassTable(torch.tensor([[3.0, 0.0], [0.0, 0.2]]), torch.ones(2))  # G[k] / |G[k]| is the identity


@pytest.mark.parametrize(("label", "expected"), [(1, 0.598139), (0, 0.798139)])
@pytest.mark.parametrize("length", [1.0, 7.0])
def test_gt_18(label: int, expected: float, length: float, make_at: Any, identity_net: Any) -> None:
    h = length * torch.tensor([[0.6, 0.8]])
    at = make_at(down=ModelAndPrototypes(NO_WEIGHTS, G), round=1, rounds=4)
    terms, notes = FedProc().loss(identity_net(), h, torch.tensor([label]), at)
    assert terms["con"].item() == pytest.approx(0.75 * expected, abs=1e-5)
    assert terms["ce"].item() == pytest.approx(0.25 * 0.693147, abs=1e-5)
    torch.testing.assert_close(notes["h"], torch.tensor([[0.6, 0.8]]))


def test_round_0_is_pure_cross_entropy_even_with_prototypes(make_at: Any, identity_net: Any) -> None:
    terms, _ = FedProc().loss(
        identity_net(), torch.ones(1, 2), torch.tensor([0]), make_at(down=ModelAndPrototypes(NO_WEIGHTS, G))
    )
    assert terms["con"].item() == 0
    assert terms["ce"].item() == pytest.approx(0.693147, abs=1e-5)


@pytest.mark.parametrize(("ramp", "shares"), [(None, [1.0, 0.25, 0.5, 0.75]), (2, [1.0, 0.5, 1.0, 1.0])])
def test_schedule(ramp: int | None, shares: list[float], make_at: Any) -> None:
    assert [FedProc(ramp_rounds=ramp).ce_share(make_at(round=t, rounds=4)) for t in range(4)] == shares


def test_ramp_rounds_is_a_whole_number() -> None:
    assert {item.name: item.values for item in knobs(FedProc)}["ramp_rounds"] == "a whole number >= 1"


def test_a_class_without_mean_is_no_negative(make_at: Any, identity_net: Any) -> None:
    one = ClassTable(G.rows, torch.tensor([1.0, 0.0]))
    at = make_at(down=ModelAndPrototypes(NO_WEIGHTS, one), round=1)
    terms, _ = FedProc().loss(identity_net(), torch.rand(3, 2), torch.tensor([0, 0, 1]), at)
    assert terms["con"].item() == pytest.approx(0, abs=1e-6)


def upload_of(
    h: torch.Tensor, y: torch.Tensor, make_at: Any, identity_net: Any, samples_of: Any
) -> ModelAndPrototypeUpload:
    return FedProc().upload(identity_net(), samples_of(h, y), make_at())[0]


@pytest.mark.parametrize("turned", [False, True])
def test_means_are_those_of_all_samples(turned: bool, make_at: Any, identity_net: Any, samples_of: Any) -> None:
    h, y = torch.rand(9, 2) + 0.1, torch.tensor([0, 0, 1, 1, 1, 0, 0, 0, 0])
    tally = Tally()
    for part in [slice(5, 9), slice(0, 5)] if turned else [slice(0, 5), slice(5, 9)]:
        tally.add(str(part), upload_of(h[part], y[part], make_at, identity_net, samples_of))
    table = FedProc().aggregate(ModelAndPrototypes(NO_WEIGHTS, G), tally.total(), make_at()).G
    unit = functional.normalize(h, dim=1)
    torch.testing.assert_close(table.rows, torch.stack([unit[y == k].mean(0) for k in (0, 1)]))
    assert table.count.tolist() == [6.0, 3.0]


@pytest.mark.parametrize(("stale", "held"), [("keep", [True, True]), ("drop", [True, False])])
def test_what_becomes_of_a_class_nobody_sent(stale: Any, held: list[bool], make_at: Any) -> None:
    tally = Tally()
    sent = ClassTable(torch.ones(2, 2), torch.tensor([2.0, 0.0]))
    tally.add("a", ModelAndPrototypeUpload(Mean(NO_WEIGHTS, 1.0), Mean(sent, sent.count)))
    state = FedProc(stale_protos=stale).aggregate(ModelAndPrototypes(NO_WEIGHTS, G), tally.total(), make_at())
    assert state.G.held.tolist() == held


@pytest.mark.parametrize("projection", ["none", "256"])
def test_payload(projection: Any, make_at: Any, samples_of: Any) -> None:
    method = FedProc(projection=projection)
    net = Net(method.build(build_model("resnet10", (3, 8, 8), 10), make_at()))
    samples = samples_of(torch.rand(10, 3, 8, 8), torch.arange(10))
    upload, _ = method.upload(net, samples, make_at(classes=10, dim=net.dim))
    size = encode(upload, "a").size
    extra = 0 if projection == "none" else (512 * 512 + 512) + (512 * 256 + 256) - 256 * 10  # the head is shorter
    assert size.weights == 4 * (4_903_242 + extra)
    assert size.prototypes == 4 * 10 * {"none": 512, "256": 256}[projection]


def test_projected_features_have_unit_length(make_at: Any) -> None:
    net = Net(FedProc(projection="256").build(build_model("mlp", (1, 4, 4), 3), make_at()))
    h = net.features(torch.rand(5, 1, 4, 4))
    torch.testing.assert_close(h.norm(dim=1), torch.ones(5))
    assert (h.shape, net(torch.rand(5, 1, 4, 4)).shape) == ((5, 256), (5, 3))


def test_round_0_and_no_ramp_are_fedavg(tiny_run: Any) -> None:
    base = tiny_run("fedavg", rounds=2)
    ours = tiny_run("fedproc", rounds=2, set={"ramp_rounds": 1})
    assert ours.rounds[0]["train_loss"] == base.rounds[0]["train_loss"]
    left, right = (load_file(run.path / "model.safetensors") for run in (ours, base))
    assert all(torch.equal(left[name], right[name]) for name in right)


@pytest.mark.parametrize("settings", [{}, {"projection": "256"}, {"proto_pass": "last_epoch", "ramp_rounds": 5}])
def test_run(settings: Any, tiny_run: Any) -> None:
    run = tiny_run("fedproc", rounds=3, set=settings)
    assert [record["loss_parts"]["con"] > 0 for record in run.rounds] == [False, True, True]
    assert run.rounds[-1]["events"] == []
    width = 256 if "projection" in settings else 16
    assert run.prototypes()["rows"].shape == (4, width)


def test_authors_preset(tiny_run: Any) -> None:
    knobs_used = tiny_run("fedproc", rounds=1, preset="authors").config["method"]["knobs"]
    assert (knobs_used["projection"], knobs_used["ramp_rounds"]) == ("256", 100)

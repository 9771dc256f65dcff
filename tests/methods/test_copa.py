import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional

from protofed.methods.copa import Copa, CopaServer, HybridNorm
from protofed.models import head
from protofed.records import Weights

OWN, FOREIGN = [2.0, 0.0], {"b": [0.0, 1.0], "c": [1.0, 1.0]}


@pytest.fixture
def at_a(identity_net, make_at):
    """GT-08: client a with its own head, and the heads of b and c; one feature, which is 1."""
    heads = {c: Weights({"fc.weight": torch.tensor(z)[:, None]}, {}) for c, z in {"a": OWN, **FOREIGN}.items()}
    net = identity_net(1, 2, torch.tensor(OWN)[:, None])
    return net, make_at(clients=dict.fromkeys("abc", 1), client="a", down=CopaServer(Weights({}, {}), heads))


def test_gt08_loss(at_a):
    net, at = at_a
    terms = Copa().loss(net, torch.ones(1, 1), torch.tensor([0]), at)
    assert terms["ce"].item() == pytest.approx(0.126928, abs=1e-5)
    assert terms["foreign"].item() == pytest.approx(1.313262 + 0.693147, abs=1e-5)
    half = Copa(foreign_weight=0.5).loss(net, torch.ones(1, 1), torch.tensor([0]), at)
    assert half["foreign"].item() == pytest.approx((1.313262 + 0.693147) / 2, abs=1e-5)


@pytest.mark.parametrize(("ensemble", "expected"), [("softmax", [0.549913, 0.450087]), ("logits", [0.58257, 0.41743])])
def test_gt08_prediction(ensemble, expected, at_a):
    net, at = at_a
    probabilities = Copa(ensemble=ensemble).predict(net, torch.ones(1, 1), at)
    assert probabilities[0].tolist() == pytest.approx(expected, abs=1e-5)


def test_foreign_heads_teach_the_extractor_only(at_a):
    net, at = at_a
    x = torch.ones(1, 1, requires_grad=True)
    terms = Copa().loss(net, x, torch.tensor([0]), at)
    to_input, to_head = torch.autograd.grad(
        terms["foreign"], [x, net.params(head)["fc.weight"]], allow_unused=True, retain_graph=True
    )
    assert to_input.abs().item() > 0
    assert to_head is None


def test_heads_are_collected_and_never_averaged(tiny_run):
    run = tiny_run("copa", model="resnet10", set={"model.width": 4})
    broadcast = load_file(run.path / "broadcast.safetensors")
    for client in ("a-0", "b-0", "c-0"):
        own = load_file(run.path / "clients" / f"{client}.safetensors")["model/params/fc.weight"]
        assert torch.equal(broadcast[f"heads/{client}/params/fc.weight"], own)
    saved = load_file(run.path / "model.safetensors")
    mean = torch.stack([broadcast[f"heads/{c}/params/fc.weight"] for c in ("a-0", "b-0", "c-0")]).mean(0)
    torch.testing.assert_close(saved["fc.weight"], mean)


def test_a_head_of_class_means_is_where_every_client_starts(tiny_run):
    """Its own head comes to a client with the broadcast; else it would start at random among heads that know."""
    hardly = {"rounds": 1, "head": "closed-form", "lr": 1e-9}
    run, fedavg = (tiny_run(name, **hardly) for name in ("copa", "fedavg"))
    broadcast = load_file(run.path / "broadcast.safetensors")
    start = load_file(fedavg.path / "model.safetensors")["fc.weight"]
    for client in ("a-0", "b-0", "c-0"):
        torch.testing.assert_close(broadcast[f"heads/{client}/params/fc.weight"], start)


def test_who_sits_out_keeps_its_head_in_the_ensemble(tiny_run):
    run = tiny_run("copa", rounds=1, participation=0.6)
    absent = ({"a-0", "b-0", "c-0"} - set(run.rounds[0]["participants"])).pop()
    present = run.rounds[0]["participants"][0]
    broadcast = load_file(run.path / "broadcast.safetensors")
    assert not torch.equal(
        broadcast[f"heads/{absent}/params/fc.weight"], broadcast[f"heads/{present}/params/fc.weight"]
    )


def test_traffic(tiny_run):
    run, fedavg = (tiny_run(name, rounds=1) for name in ("copa", "fedavg"))
    up = fedavg.rounds[0]["bytes"]["up"]["weights"]
    one_head = 4 * (16 * 4 + 4)
    assert run.rounds[0]["bytes"]["up"]["weights"] == up
    assert run.rounds[0]["bytes"]["down"]["weights"] == up + 3 * 2 * one_head
    assert run.config["method"]["kind"] == "global"
    personal, domains = run.rounds[0]["accuracy"]["personal"], run.rounds[0]["accuracy"]["global"]
    assert [personal[f"{d}-0"] for d in "abc"] == [domains[d] for d in "abc"]


def test_hybrid_norm_lies_between_batch_and_instance():
    torch.manual_seed(0)
    x, batch = torch.randn(4, 3, 5, 5), nn.BatchNorm2d(3)
    nn.init.normal_(batch.weight)
    hybrid = HybridNorm(batch)
    by_instance = functional.instance_norm(x, weight=batch.weight, bias=batch.bias)
    by_batch = batch(x)
    for gate, expected in [(50.0, by_batch), (-50.0, by_instance), (0.0, (by_batch + by_instance) / 2)]:
        nn.init.constant_(hybrid.gate, gate)
        torch.testing.assert_close(hybrid(x), expected)
    assert torch.equal(hybrid(x[:, :, :1, :1]), nn.BatchNorm2d.forward(hybrid.train(), x[:, :, :1, :1]))


def test_hybrid_norm_is_learnt(tiny_run):
    run = tiny_run("copa", model="resnet10", set={"model.width": 4, "hybrid_norm": "on"})
    saved = load_file(run.path / "model.safetensors")
    assert saved["stem.bn1.gate"].abs().sum() > 0
    assert run.model()(torch.zeros(2, 1, 8, 8)).shape == (2, 4)

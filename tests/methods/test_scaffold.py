import logging

import pytest
import torch
from by_hand import take_steps, total
from safetensors.torch import load_file

from protofed.method import Plan
from protofed.methods import scaffold
from protofed.methods.scaffold import Scaffold

PLAIN = Plan(epochs=(1, 1), lr=0.1, momentum=0.0, weight_decay=0.0)


def play(net, at_of, monkeypatch, method, steps, targets=(("a", 0.0), ("b", 4.0)), participants=("a", "b")):
    """Rounds on the losses (w - target)^2 / 2: what each leaves behind."""
    at = at_of(clients={"a": 1, "b": 1}, client=None)
    server = method.server_state(net, at)
    memory = {client: method.client_state(net, at) for client, _ in targets}
    while True:
        uploads, y = {}, {}
        for client, target in targets:
            if client not in participants:
                continue
            monkeypatch.setattr(scaffold, "cross_entropy", lambda z, _, goal=target: (z - goal).pow(2).mean() / 2)
            net.load(server.weights)
            done = take_steps(method, net, at_of(client=client, down=server, memory=memory[client]), steps)
            y[client] = net.pick().params["fc.weight"].item()
            uploads[client], memory[client] = method.upload(net, None, done)
        server = method.aggregate(server, total(uploads), at_of(clients={"a": 1, "b": 1}, participants=participants))
        yield y, {c: m.c.params["fc.weight"].item() for c, m in memory.items()}, server


@pytest.fixture
def at_of(make_at):
    return lambda **given: make_at(**{"plan": PLAIN, "clients": {"a": 1, "b": 1}, **given})


def test_gt03(identity_net, at_of, monkeypatch):
    rounds = play(identity_net(1, 1, torch.ones(1, 1)), at_of, monkeypatch, Scaffold(), steps=2)
    for y, c_i, theta, c in [
        ([0.81, 1.57], [0.95, -2.85], 1.19, -0.95),
        ([1.3249, 1.3629], [1.2255, -2.7645], 1.3439, -0.7695),
    ]:
        got_y, got_c, server = next(rounds)
        assert list(got_y.values()) == pytest.approx(y, abs=1e-5)
        assert list(got_c.values()) == pytest.approx(c_i, abs=1e-5)
        assert server.weights.params["fc.weight"].item() == pytest.approx(theta, abs=1e-5)
        assert server.c.params["fc.weight"].item() == pytest.approx(c, abs=1e-5)


def test_server_lr_scales_the_step(identity_net, at_of, monkeypatch):
    _, _, server = next(play(identity_net(1, 1, torch.ones(1, 1)), at_of, monkeypatch, Scaffold(server_lr=0.5), 2))
    assert server.weights.params["fc.weight"].item() == pytest.approx(1.095, abs=1e-5)


def test_c_is_the_mean_of_all_clients_also_when_some_sit_out(identity_net, at_of, monkeypatch):
    net = identity_net(1, 1, torch.ones(1, 1))
    _, c_i, server = next(play(net, at_of, monkeypatch, Scaffold(), 2, participants=("a",)))
    assert server.c.params["fc.weight"].item() == pytest.approx(c_i["a"] / 2, abs=1e-6)


def test_momentum_does_not_inflate_the_control_variate(identity_net, make_at, monkeypatch):
    plan = Plan(epochs=(1,), lr=0.1, momentum=0.9, weight_decay=0.0)
    monkeypatch.setattr(scaffold, "cross_entropy", lambda z, _: 3 * z.mean())
    net, method = identity_net(1, 1), Scaffold()
    at = make_at(plan=plan, memory=method.client_state(net, make_at()), down=method.server_state(net, make_at()))
    _, memory = method.upload(net, None, take_steps(method, net, at, 5))
    assert memory.c.params["fc.weight"].item() == pytest.approx(3.0, abs=1e-5)


def test_momentum_that_is_kept_over_rounds_does_not_inflate_it_either(identity_net, make_at, monkeypatch):
    plan = Plan(epochs=(1,), lr=0.1, momentum=0.9, weight_decay=0.0)
    net, method, kept = identity_net(1, 1), Scaffold(persist_optimizer=True), {}
    monkeypatch.setattr(Scaffold, "loss", lambda *_: {"ce": 3 * net.params()["fc.weight"].sum()})
    for _ in range(4):  # the gradient is always 3
        memory, down = method.client_state(net, make_at()), method.server_state(net, make_at())
        at = take_steps(method, net, make_at(plan=plan, memory=memory, down=down), 2, kept)
        _, memory = method.upload(net, None, at)
        assert memory.c.params["fc.weight"].item() == pytest.approx(3.0, abs=1e-4)


def test_dc_is_a_plain_mean_whatever_clients_hold(identity_net, make_at):
    net, method, sizes = identity_net(1, 1), Scaffold(), {"a": 1, "b": 9}
    server = method.server_state(net, make_at())
    uploads = {}
    for client, moved in (("a", 1.0), ("b", 3.0)):
        start = net.pick()
        start.params["fc.weight"].add_(moved)  # lr x steps = 1: c_i = moved
        memory = method.client_state(net, make_at())
        at = make_at(clients=sizes, client=client, down=server, memory=memory, start=start, taken=1, reach=1.0)
        uploads[client], _ = method.upload(net, None, at)
    after = method.aggregate(server, total(uploads), make_at(clients=sizes, participants=("a", "b")))
    assert after.c.params["fc.weight"].item() == pytest.approx(2.0)


def test_a_client_without_a_step_keeps_its_control_variate(identity_net, make_at):
    net, method = identity_net(), Scaffold()
    memory = method.client_state(net, make_at())
    at = make_at(down=method.server_state(net, make_at()), memory=memory, start=net.pick(), taken=0, reach=0.0)
    upload, after = method.upload(net, None, at)
    assert torch.equal(after.c.params["fc.weight"], memory.c.params["fc.weight"])
    assert torch.equal(upload.dc.value.params["fc.weight"], torch.zeros(2, 2))


def test_first_round_is_fedavg_with_the_plain_mean(make_data, tiny_run):
    data = make_data(train={"a": 24, "b": 16, "c": 40})
    options = {"rounds": 1, "model": "resnet10", "dtype": "float64"}
    ours = tiny_run("scaffold", data, **options, set={"model.width": 4})
    fedavg = tiny_run("fedavg", data, **options, set={"model.width": 4, "weighting": "uniform"})
    left, right = (load_file(run.path / "model.safetensors") for run in (ours, fedavg))
    for name in right:
        torch.testing.assert_close(left[name], right[name], atol=1e-12, rtol=1e-12)


def test_control_variates_travel_as_weights_both_ways(tiny_run):
    ours, fedavg = tiny_run("scaffold"), tiny_run("fedavg")
    for way in ("up", "down"):
        assert ours.summary["bytes"][way]["weights"] == 2 * fedavg.summary["bytes"][way]["weights"]


def test_runs_with_adam_but_warns(tiny_run, caplog):
    with caplog.at_level(logging.WARNING, logger="protofed"):
        run = tiny_run("scaffold", optimizer="adam", lr=0.001, participation=0.6)
    assert "scaffold: Adam" in caplog.text
    assert run.summary["status"] == "complete"

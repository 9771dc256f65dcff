import logging

import pytest
import torch
from by_hand import take_steps, total
from safetensors.torch import load_file

from protofed.method import Plan
from protofed.methods import fednova
from protofed.methods.fednova import FedNova


@pytest.fixture
def play(identity_net, make_at, monkeypatch):
    """One round on constant gradients 1 and -2, 2 and 4 steps, 1 and 3 samples, from theta = 1."""

    def start(method, momentum=0.0, server=None, round=0):
        sizes = {"a": 1, "b": 3}
        plan = Plan(epochs=(1, 1), lr=0.1, momentum=momentum, weight_decay=0.0)
        net = identity_net(1, 1, torch.ones(1, 1))
        server = server or method.server_state(net, make_at())
        uploads, theta = {}, []
        for client, gradient, steps in [("a", 1.0, 2), ("b", -2.0, 4)]:
            monkeypatch.setattr(fednova, "cross_entropy", lambda z, _, g=gradient: g * z.mean())
            net.load(server.model.weights)
            at = take_steps(method, net, make_at(plan=plan, clients=sizes, client=client, round=round), steps)
            theta.append(net.pick().params["fc.weight"].item())
            uploads[client], _ = method.upload(net, None, at)
        a = [float(upload.steps.value) for upload in uploads.values()]
        d = [upload.d.value.params["fc.weight"].item() for upload in uploads.values()]
        server = method.aggregate(server, total(uploads), make_at(plan=plan, clients=sizes, client=None, round=round))
        return theta, a, d, server

    return start


def new_theta(server):
    return server.model.weights.params["fc.weight"].item()


def test_gt04_plain_sgd(play):
    theta, a, d, server = play(FedNova())
    assert theta == pytest.approx([0.8, 1.8], abs=1e-5)
    assert a == pytest.approx([2, 4], abs=1e-5)
    assert d == pytest.approx([0.1, -0.2], abs=1e-5)
    assert new_theta(server) == pytest.approx(1.4375, abs=1e-5)


def test_gt05_momentum(play):
    theta, a, _, server = play(FedNova(), momentum=0.9)
    assert a == pytest.approx([2.9, 9.049], abs=1e-5)
    assert theta == pytest.approx([0.71, 2.8098], abs=1e-5)
    assert new_theta(server) == pytest.approx(1.93896875, abs=1e-5)


def test_gt05_proximal(make_at):
    method = FedNova(mu=1.0)  # e = lr x mu = 0.1
    plan = Plan(epochs=(1,), lr=0.1, momentum=0.0)
    a = [method.effective_steps(steps, make_at(plan=plan)) for steps in (2, 4)]
    assert a == pytest.approx([1.9, 3.439], abs=1e-5)


@pytest.mark.parametrize("mu", [0.0, 1.0])
def test_a_client_s_model_follows_from_its_change_and_its_term_of_tau_eff(mu, make_at):
    method, at = FedNova(mu=mu), make_at(plan=Plan(epochs=(1,), lr=0.1, momentum=0.9))
    assert method.tau_eff_term(4, at) == (4 if mu else method.effective_steps(4, at))
    assert method.divisor(method.tau_eff_term(4, at), at) == method.effective_steps(4, at)


def test_a_proximal_term_divides_by_what_the_steps_really_amount_to(play):
    theta, steps, d, _ = play(FedNova(mu=1.0), momentum=0.9)
    assert steps == [2, 4]  # rescaled by the plain number of steps
    assert d == pytest.approx([0.1, -0.2], abs=1e-5)  # lr x gradient, whatever the momentum and the proximal term
    assert theta != pytest.approx([0.8, 1.8])


def test_server_momentum(play):
    method = FedNova(server_momentum=0.5)
    *_, first = play(method)
    *_, second = play(method, server=first, round=1)
    assert new_theta(first) == pytest.approx(1.4375, abs=1e-5)
    assert new_theta(second) == pytest.approx(1.4375 + 1.5 * 0.4375, abs=1e-5)


def test_a_client_without_a_step_sends_no_change(identity_net, make_at):
    net = identity_net(1, 1)
    for reach in (0.0, None):
        upload, _ = FedNova().upload(net, None, make_at(start=net.pick(), taken=0, reach=reach))
        assert upload.d.value.params["fc.weight"].item() == 0
        assert upload.steps.value.item() == 0  # it took no part in the steps that are averaged


@pytest.mark.parametrize("domains", ["a", "abc"])
def test_equal_steps_make_it_fedavg(domains, make_data, tiny_run):
    data = make_data(tuple(domains))
    options = {"model": "resnet10", "dtype": "float64", "set": {"model.width": 4}}
    runs = [tiny_run(name, data, **options) for name in ("fednova", "fedavg")]
    ours, fedavg = (load_file(run.path / "model.safetensors") for run in runs)
    for name in fedavg:
        torch.testing.assert_close(ours[name], fedavg[name], atol=1e-9, rtol=1e-9)


def test_unequal_steps_do_not(make_data, tiny_run):
    data = make_data(train={"a": 16, "b": 40, "c": 24})
    ours, fedavg = (load_file(tiny_run(name, data).path / "model.safetensors") for name in ("fednova", "fedavg"))
    assert not torch.allclose(ours["fc.weight"], fedavg["fc.weight"], atol=1e-5)


def test_under_adam_steps_are_counted_and_a_warning_given(tiny_run, caplog):
    with caplog.at_level(logging.WARNING, logger="protofed"):
        run = tiny_run("fednova", optimizer="adam", lr=0.001)
    assert "fednova: under Adam" in caplog.text
    assert run.summary["status"] == "complete"


def test_kept_momentum_counts(identity_net, make_at, monkeypatch):
    """A gradient of 2 in every step of three rounds: d_i is lr x 2 in each, whatever velocity came from before."""
    plan = Plan(epochs=(1,), lr=0.1, momentum=0.9, weight_decay=0.0)
    net, method, kept = identity_net(1, 1), FedNova(persist_optimizer=True), {}
    monkeypatch.setattr(FedNova, "loss", lambda *_: {"ce": 2 * net.params()["fc.weight"].sum()})
    for _ in range(3):
        at = take_steps(method, net, make_at(plan=plan), 2, kept)
        upload, _ = method.upload(net, None, at)
        assert upload.d.value.params["fc.weight"].item() == pytest.approx(0.2, abs=1e-5)

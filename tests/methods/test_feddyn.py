import pytest
import torch
from by_hand import total
from safetensors.torch import load_file
from torch import nn

from protofed.methods.feddyn import FedDyn
from protofed.models import Split
from protofed.models.net import Net
from protofed.runs.opened import OpenRun


def test_gt06(identity_net, make_at):
    method, sizes, alpha = FedDyn(alpha=0.5), {"a": 1, "b": 1}, 0.5
    net = identity_net(1, 1)
    server = method.server_state(net, make_at())
    memory = {client: method.client_state(net, make_at()) for client in sizes}
    for theta_i, lam, h, theta in [
        ([0, 2.666667], [0, -1.333333], -0.666667, 2.666667),
        ([0.888889, 2.666667], [0.888889, -1.333333], -0.222222, 2.222222),
        ([1.333333, 2.518519], [1.333333, -1.481481], -0.074074, 2.074074),
    ]:
        uploads, found = {}, []
        for client, goal in [("a", 0.0), ("b", 4.0)]:
            net.load(server.model.weights)
            at = make_at(clients=sizes, client=client, memory=memory[client], start=net.pick())
            # argmin of (w - goal)^2 / 2 - lambda w + alpha / 2 (w - theta)^2
            start = at.start.params["fc.weight"]
            best = (goal + memory[client].lam["fc.weight"] + alpha * start) / (1 + alpha)
            with torch.no_grad():
                net.params()["fc.weight"].copy_(best)
            found.append(best.item())
            uploads[client], memory[client] = method.upload(net, None, at)
        server = method.aggregate(server, total(uploads), make_at(clients=sizes, participants=("a", "b")))
        assert found == pytest.approx(theta_i, abs=1e-5)
        assert [m.lam["fc.weight"].item() for m in memory.values()] == pytest.approx(lam, abs=1e-5)
        assert server.h["fc.weight"].item() == pytest.approx(h, abs=1e-5)
        assert server.model.weights.params["fc.weight"].item() == pytest.approx(theta, abs=1e-5)


def test_the_loss_has_the_gradient_of_the_objective(identity_net, make_at):
    net, method = identity_net(head=torch.tensor([[1.0, 2.0], [3.0, 4.0]])), FedDyn(alpha=0.5)
    start, memory = net.pick(), method.client_state(net, make_at())
    start.params["fc.weight"].zero_()
    memory.lam["fc.weight"].fill_(0.25)
    terms = method.loss(net, torch.eye(2), torch.tensor([0, 1]), make_at(start=start, memory=memory))
    (gradient,) = torch.autograd.grad(terms["linear"] + terms["proximal"], list(net.params().values()))
    expected = -0.25 + 0.5 * net.pick().params["fc.weight"]
    torch.testing.assert_close(gradient, expected)


def test_absent_clients_shrink_the_change_of_h(identity_net, make_at):
    net, method, sizes = identity_net(1, 1), FedDyn(alpha=0.5), {"a": 1, "b": 1}
    server = method.server_state(net, make_at())
    with torch.no_grad():
        net.params()["fc.weight"].fill_(1.0)
    at = make_at(clients=sizes, memory=method.client_state(net, make_at()), start=server.model.weights)
    upload, _ = method.upload(net, None, at)
    after = method.aggregate(server, total({"a": upload}), make_at(clients=sizes, participants=("a",)))
    assert after.h["fc.weight"].item() == pytest.approx(-0.25)  # alpha / N, not alpha / |S|


def test_size_sets_alpha(make_at):
    at = make_at(clients={"a": 10, "b": 30}, client="a")
    assert FedDyn(alpha=0.1).alpha_of(at) == pytest.approx(0.2)
    assert FedDyn(alpha=0.1, weighting="uniform").alpha_of(at) == 0.1


def test_clip_limits_the_steps(tiny_run):
    assert FedDyn().steps[0].clip == 10.0
    start = tiny_run("feddyn", rounds=1, lr=1e-12)
    first, tight = (
        load_file(run.path / "model.safetensors")["fc.weight"]
        for run in (start, tiny_run("feddyn", rounds=1, set={"clip": 1e-6}))
    )
    torch.testing.assert_close(first, tight, atol=1e-5, rtol=0)


def test_which_model_is_scored(tiny_run):
    first = tiny_run("feddyn", rounds=1, set={"eval_model": "mean_clients", "weighting": "uniform", "clip": 1e6})
    server = tiny_run("feddyn", rounds=1, set={"weighting": "uniform", "clip": 1e6})
    mean, corrected = (load_file(run.path / "model.safetensors")["fc.weight"] for run in (first, server))
    initial = load_file(tiny_run("feddyn", rounds=1, lr=1e-12).path / "model.safetensors")["fc.weight"]
    # In the first round the correction doubles the mean change.
    torch.testing.assert_close(corrected - initial, 2 * (mean - initial), atol=1e-6, rtol=1e-4)


def test_runs_with_batch_norm_and_absent_clients_at_fedavgs_price(tiny_run):
    options = {"participation": 0.6, "model": "resnet10", "set": {"model.width": 4}}
    run, fedavg = tiny_run("feddyn", **options), tiny_run("fedavg", **options)
    assert run.summary["bytes"] == fedavg.summary["bytes"]


def test_a_large_client_has_its_own_alpha_in_loss_and_update(identity_net, make_at):
    """n = 10 and 30: alpha_a = 2 alpha, by hand."""
    net, method, sizes = identity_net(1, 1, torch.full((1, 1), 3.0)), FedDyn(alpha=0.1), {"a": 10, "b": 30}
    start, memory = net.pick(), method.client_state(net, make_at())
    start.params["fc.weight"].fill_(1.0)
    at = make_at(clients=sizes, client="a", start=start, memory=memory)
    terms = method.loss(net, torch.ones(2, 1), torch.zeros(2, dtype=torch.long), at)
    assert terms["proximal"].item() == pytest.approx(0.2 / 2 * 2.0**2)
    _, after = method.upload(net, None, at)
    assert after.lam["fc.weight"].item() == pytest.approx(-0.2 * 2.0)


def test_the_mean_is_plain_and_running_statistics_are_averaged(make_at):
    sizes, method = {"a": 1, "b": 9}, FedDyn(alpha=0.5)
    uploads = {}
    for client, value in (("a", 1.0), ("b", 4.0)):
        net = Net(Split({"bn": nn.BatchNorm1d(1), "fc": nn.Flatten()}, cut="bn", dim=1, classes=1))
        with torch.no_grad():
            net.model.bn.weight.fill_(value)
            net.model.bn.running_mean.fill_(value)
        server = method.server_state(net, make_at())
        server.model.weights.params["bn.weight"].fill_(0.0)
        at = make_at(
            clients=sizes, client=client, start=server.model.weights, memory=method.client_state(net, make_at())
        )
        uploads[client], _ = method.upload(net, None, at)
    after = method.aggregate(server, total(uploads), make_at(clients=sizes, participants=("a", "b")))
    assert after.mean.params["bn.weight"].item() == pytest.approx(2.5)
    assert after.model.weights.params["bn.weight"].item() == pytest.approx(5.0)  # 2.5 - h / alpha, h = -alpha 2.5
    assert after.model.weights.stats["bn.running_mean"].item() == pytest.approx(2.5)


def test_what_is_reported_is_what_is_saved(make_data, tiny_run):
    """Clients with hold-outs of their own are scored with the mean of the clients' models where that is asked for."""
    data = make_data(("a",), train=160, test=8)
    options = {"protocol": "iid=4", "rounds": 3, "epochs": 3, "lr": 0.1}
    run = tiny_run("feddyn", data, **options, set={"eval_model": "mean_clients", "data.holdout": 0.25, "alpha": 1e-3})
    opened = OpenRun(run.path, with_data=True)
    net, at = opened.model_of("global")
    reported = run.rounds[-1]["accuracy"]["personal"]
    with torch.no_grad(), net.eval():
        for client in opened.clients:
            samples = opened.context.test_samples(None, client)
            correct = sum(int((opened.method.predict(net, x, at).argmax(1) == y).sum()) for x, y in samples.batches())
            assert reported[client] == pytest.approx(correct / len(samples))

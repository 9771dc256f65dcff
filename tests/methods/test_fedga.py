from dataclasses import replace

import pytest
import torch
from by_hand import total
from safetensors.torch import load_file
from torch.nn import functional

from protofed.methods.fedga import FedGA
from protofed.models.net import Net
from protofed.records import Weights

THREE = {"a": 10, "b": 20, "c": 30}
ALL = torch.ones(3, dtype=torch.bool)


def adjusted(method, before, after, make_at):
    """Weights after one update from 1/3 each, T = 40, t = 1; risks are what shall be small."""
    at = make_at(rounds=40, round=2, clients=THREE)  # round 2 uses the gaps of t = 1
    gap = torch.tensor(after, dtype=torch.float64) - torch.tensor(before, dtype=torch.float64)
    return method.adjusted(torch.full((3,), 1 / 3, dtype=torch.float64), gap, ALL, at).tolist()


def errors(accuracies):
    return [1 - accuracy for accuracy in accuracies]


def test_gt09_accuracy(make_at):
    a = adjusted(FedGA(metric="accuracy"), errors([0.90, 0.80, 0.95]), errors([0.84, 0.82, 0.92]), make_at)
    assert a == pytest.approx([0.371134, 0.288660, 0.340206], abs=1e-5)


def test_gt09_loss(make_at):
    a = adjusted(FedGA(), [0.30, 0.50, 0.20], [0.42, 0.47, 0.26], make_at)
    assert a == pytest.approx([0.369231, 0.292308, 0.338462], abs=1e-5)


def test_gt09_centred(make_at):
    method = FedGA(metric="accuracy", center=True)
    a = adjusted(method, errors([0.90, 0.80, 0.95]), errors([0.84, 0.82, 0.92]), make_at)
    assert a == pytest.approx([0.389744, 0.266667, 0.343590], abs=1e-5)


def test_without_gaps_weights_stay(make_at):
    assert adjusted(FedGA(), [0.1, 0.2, 0.3], [0.1, 0.2, 0.3], make_at) == pytest.approx([1 / 3] * 3)
    at = make_at(rounds=40, round=2, clients=THREE)
    a = torch.full((3,), 1 / 3, dtype=torch.float64)
    unknown = FedGA().adjusted(a, torch.tensor([1.0, 0, 0], dtype=torch.float64), ~ALL, at)
    assert torch.equal(unknown, a)


def test_the_risk_is_loss_or_error(identity_net, samples_of):
    net = identity_net(2, 2, torch.eye(2))
    data = samples_of([[1.0, 0.0], [0.0, 1.0], [0.0, 1.0]], [0, 1, 0])
    assert FedGA(metric="accuracy").risk(net, data).item() == pytest.approx(1 / 3)
    expected = functional.cross_entropy(data.x.double(), data.y)
    assert FedGA().risk(net, data).item() == pytest.approx(expected.item(), abs=1e-6)


@pytest.mark.parametrize("metric", ["loss", "accuracy"])
def test_one_exchange_equals_the_literal_two(metric, identity_net, samples_of, make_at):
    """The paper measures the new average after a round; here the next round's clients do, with equal results."""
    torch.manual_seed(0)
    rounds, method, net = 4, FedGA(metric=metric, step=1.0), Net(identity_net(2, 3).model.double())
    data = {}
    for position, client in enumerate(THREE):
        x, seen = (torch.randn(count, 2, dtype=torch.float64) for count in (20, 30))
        y, known = (torch.randint(0, 3, (count,)) for count in (20, 30))
        data[client] = samples_of(x + position, y, samples_of(seen - position, known))

    def trained(theta: Weights, client: str) -> Weights:
        net.load(theta)
        for _ in range(3):
            loss = functional.cross_entropy(net(data[client].x), data[client].y)
            (gradient,) = torch.autograd.grad(loss, list(net.params().values()))
            with torch.no_grad():
                net.params()["fc.weight"].sub_(gradient)
        return net.pick()

    def risk(theta: Weights, client: str) -> torch.Tensor:
        return method.risk(net.using(theta), data[client].validation)

    theta, a = net.pick(), torch.full((3,), 1 / 3, dtype=torch.float64)
    server = method.server_state(net, make_at(clients=THREE))
    for t in range(rounds):
        # The literal form: train, measure, average with the old weights, measure again, adjust
        models = {client: trained(theta, client) for client in THREE}
        before = torch.stack([risk(models[client], client) for client in THREE])
        average = sum(w * m.params["fc.weight"] for w, m in zip(a, models.values(), strict=True))
        theta = Weights({"fc.weight": average}, {})
        gap = torch.stack([risk(theta, client) for client in THREE]) - before
        s = (1.0 - (t - 1) / rounds) / 3
        a_used = a
        if gap.abs().max() > 0:
            a = (a + s * gap / gap.abs().max()).clamp(0, 1)
            a = a / a.sum()

        at = make_at(rounds=rounds, round=t, clients=THREE, client=None)
        uploads = {}
        for client in THREE:
            start = method.broadcast(server, at).weights
            trained(start, client)
            uploads[client], _ = method.upload(net, data[client], replace(at, client=client, start=start))
        server = method.aggregate(server, total(uploads), at)
        torch.testing.assert_close(server.a, a_used, atol=1e-9, rtol=0)
        torch.testing.assert_close(server.model.weights.params["fc.weight"], average, atol=1e-9, rtol=0)
    assert not torch.allclose(server.a, torch.tensor(1 / 3, dtype=torch.float64))


def test_weights_adjust_in_a_run_and_first_round_is_the_plain_mean(tiny_run):
    options = {"rounds": 1, "model": "resnet10", "dtype": "float64"}
    ours = tiny_run("fedga", **options, set={"model.width": 4})
    fedavg = tiny_run("fedavg", **options, set={"model.width": 4, "weighting": "uniform", "data.validation": 0.2})
    left, right = (load_file(run.path / "model.safetensors") for run in (ours, fedavg))
    for name in right:
        torch.testing.assert_close(left[name], right[name], atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("more", [{}, {"metric": "accuracy", "center": "on"}, {"data.validation": 0}])
def test_runs_with_absent_clients(more, tiny_run):
    run = tiny_run("fedga", rounds=4, participation=0.6, set=more)
    fedavg = tiny_run("fedavg", rounds=4, participation=0.6, set={"data.validation": 0.2})
    for way in ("up", "down"):
        assert run.summary["bytes"][way]["weights"] == fedavg.summary["bytes"][way]["weights"]

import pytest
import torch
from by_hand import total
from safetensors.torch import load_file
from torch import nn

from protofed.methods.fedbn import FedBN
from protofed.models import Split, normalisation
from protofed.models.net import Net

RESNET = {"model": "resnet10", "set": {"model.width": 4}}


def client_net(weight: float, gamma: float) -> Net:
    stages = {"conv": nn.Conv2d(1, 1, 1, bias=False), "bn": nn.BatchNorm2d(1), "fc": nn.Flatten()}
    net = Net(Split(stages, cut="bn", dim=1, classes=1))
    with torch.no_grad():
        net.model.conv.weight.fill_(weight)
        for tensor in (net.model.bn.weight, net.model.bn.running_mean, net.model.bn.running_var):
            tensor.fill_(gamma)
    return net


@pytest.mark.parametrize("global_bn", ["none", "mean"])
def test_gt42(global_bn, make_at):
    method, sizes = FedBN(global_bn=global_bn), {"a": 5, "b": 5}
    nets = {"a": client_net(1.0, 1.0), "b": client_net(3.0, 5.0)}
    server = method.server_state(nets["a"], make_at())
    uploads = {c: method.upload(net, None, make_at(clients=sizes, client=c))[0] for c, net in nets.items()}
    server = method.aggregate(server, total(uploads), make_at(clients=sizes))
    down = method.broadcast(server, make_at())
    assert list(down.weights.tensors()) == ["conv.weight"]
    for client, gamma in [("a", 1.0), ("b", 5.0)]:
        nets[client].load(down.weights, method.loads)
        own = nets[client].pick().tensors()
        assert own["conv.weight"].item() == pytest.approx(2.0)
        assert [own[f"bn.{name}"].item() for name in ("weight", "running_mean", "running_var")] == [gamma] * 3
    weights = method.global_weights(server)
    if global_bn == "none":
        assert weights is None
    else:
        assert weights.tensors()["bn.weight"].item() == pytest.approx(3.0)
        assert set(weights.tensors()) == set(nets["a"].pick().tensors())


def test_one_client_is_fedavg_bit_for_bit(make_data, tiny_run):
    data = make_data(("a",))
    runs = [tiny_run("fedavg", data, **RESNET), tiny_run("fedbn", data, **RESNET)]
    runs.append(tiny_run("fedbn", data, model="resnet10", set={"model.width": 4, "global_bn": "mean"}))
    fedavg, none, mean = (load_file(run.path / "clients" / "a-0.safetensors") for run in runs)
    assert all(torch.equal(fedavg[name], none[name]) and torch.equal(fedavg[name], mean[name]) for name in fedavg)
    saved = [load_file(runs[index].path / "model.safetensors") for index in (0, 2)]
    assert all(torch.equal(saved[0][name], saved[1][name]) for name in saved[0])


def test_normalisation_stays_at_home(tiny_run):
    run = tiny_run("fedbn", **RESNET)
    clients = [load_file(path) for path in sorted((run.path / "clients").iterdir())]
    broadcast = load_file(run.path / "broadcast.safetensors")
    assert not [name for name in broadcast if "bn" in name or "running" in name or "downsample.1" in name]
    assert not torch.equal(clients[0]["model/params/stem.bn1.weight"], clients[1]["model/params/stem.bn1.weight"])


@pytest.mark.parametrize(("global_bn", "norms_travel"), [("none", False), ("mean", True)])
def test_bytes_and_views(global_bn, norms_travel, tiny_run):
    run = tiny_run("fedbn", rounds=1, model="resnet10", set={"model.width": 4, "global_bn": global_bn})
    fedavg = tiny_run("fedavg", rounds=1, **RESNET)
    net = Net(fedavg.model())
    norms = 3 * 4 * sum(param.numel() for param in net.params(normalisation).values())  # three clients
    up, down = (run.rounds[0]["bytes"][way]["weights"] for way in ("up", "down"))
    everything = fedavg.rounds[0]["bytes"]["up"]["weights"]
    assert down == everything - norms
    assert up == (everything if norms_travel else everything - norms)
    assert (run.summary["accuracy"]["global"] is not None) == norms_travel
    assert run.config["method"]["kind"] == "both"


@pytest.mark.parametrize(("weighting", "expected"), [("samples", 2.8), ("uniform", 2.0)])
def test_weighting(weighting, expected, make_at):
    method, sizes = FedBN(weighting=weighting), {"a": 1, "b": 9}
    nets = {"a": client_net(1.0, 1.0), "b": client_net(3.0, 5.0)}
    server = method.server_state(nets["a"], make_at())
    uploads = {c: method.upload(net, None, make_at(clients=sizes, client=c))[0] for c, net in nets.items()}
    after = method.aggregate(server, total(uploads), make_at(clients=sizes))
    assert method.broadcast(after, make_at()).weights.params["conv.weight"].item() == pytest.approx(expected)

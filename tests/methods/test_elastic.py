import pytest
import torch
from by_hand import total
from safetensors.torch import load_file
from torch.nn import functional

from protofed.method import Plan
from protofed.methods.elastic import Elastic, ElasticUpload, SeparateElasticUpload
from protofed.methods.fedavg import SharedModel
from protofed.records import Each, Mean, Weights

SIZES = {"a": 2, "b": 1, "c": 1}  # p = .5, .25, .25
OMEGA = {"a": [4.0, 1.0], "b": [1.0, 1.0], "c": [2.0, 0.5]}
CHANGE = {"a": [1.0, 1.0], "b": [2.0, 0.0], "c": [0.0, 4.0]}


def named(values):
    return {name: torch.tensor(value) for name, value in zip("uv", values, strict=True)}


@pytest.mark.parametrize(
    ("maximum", "zeta", "theta"),
    [("params", [0.5, 1.181818], [-0.5, -1.772727]), ("clients", [0.8125, 0.625], [-0.8125, -0.9375])],
)
def test_gt12(maximum, zeta, theta, make_at):
    method, start = Elastic(maximum=maximum), SharedModel(Weights(named([0.0, 0.0]), {"mean": torch.tensor(7.0)}))
    uploads = {}
    for client, size in SIZES.items():
        theta_i = Weights(
            {name: -change for name, change in named(CHANGE[client]).items()}, {"mean": torch.tensor(3.0)}
        )
        omega = named(OMEGA[client])
        if maximum == "params":
            uploads[client] = ElasticUpload(Mean(theta_i, size), Mean(omega, size))
        else:
            uploads[client] = SeparateElasticUpload(Mean(theta_i, size), Each(omega))
    arrived = total(uploads)
    got = method.zeta(*method.mean_and_maximum(arrived, make_at(clients=SIZES)))
    assert [value.item() for value in got.values()] == pytest.approx(zeta, abs=1e-5)
    after = method.aggregate(start, arrived, make_at(clients=SIZES)).weights
    assert [value.item() for value in after.params.values()] == pytest.approx(theta, abs=1e-5)
    assert after.stats["mean"].item() == 3.0  # averaged, not stretched


def test_gt13(identity_net, samples_of, make_at):
    """|F|^2 = w^2 x^2 has the gradient 2 x^2 at w = 1: batches of one with gradients 4 and 2."""
    net = identity_net(1, 1, torch.ones(1, 1))
    at = make_at(plan=Plan(epochs=(1,), batch=1), start=net.pick(), clients={"a": 2})
    data = samples_of([[2.0**0.5], [1.0]], [0, 0])
    first = torch.randperm(2, generator=at.rng("sensitivity"))[0].item()
    expected = 0.29 if first == 0 else 0.95 * 0.1 + 0.05 * 4
    for level in ("tensor", "element"):
        omega = Elastic(sample=1, level=level).sensitivity(net, data, at)["fc.weight"]
        assert omega.shape == (() if level == "tensor" else (1, 1))
        assert omega.item() == pytest.approx(expected, abs=1e-5)
    alone = samples_of([[2.0**0.5]], [0])
    assert Elastic().sensitivity(net, alone, at)["fc.weight"].item() == pytest.approx(0.2, abs=1e-5)


def test_sensitivity_is_that_of_the_received_model_to_the_chosen_signal(identity_net, samples_of, make_at):
    net = identity_net(2, 2, torch.tensor([[1.0, 2.0], [0.0, 1.0]]))
    at, x, y = make_at(start=net.pick()), torch.tensor([[1.0, -1.0], [0.5, 2.0]]), torch.tensor([0, 1])
    with torch.no_grad():
        net.params()["fc.weight"].zero_()  # training has moved on
    for signal, of in [
        ("output_norm", lambda z: z.pow(2).sum(1).mean()),
        ("ce", lambda z: functional.cross_entropy(z, y)),
    ]:
        w = at.start.params["fc.weight"].clone().requires_grad_()
        of(x @ w.T).backward()
        omega = Elastic(sample=1, signal=signal, level="element").sensitivity(net, samples_of(x, y), at)["fc.weight"]
        torch.testing.assert_close(omega, 0.05 * w.grad.abs())


def test_part_of_the_samples(identity_net, make_at):
    seen = []

    class Counted:
        y = torch.zeros(10, dtype=torch.long)

        def batches(self, size=256):
            yield torch.ones(10, 2), self.y

    net = identity_net()
    counting = net.using(net.pick())
    net.using = lambda weights: lambda x: seen.append(len(x)) or type(counting)(net.model, weights)(x)
    Elastic(sample=0.25).sensitivity(net, Counted(), make_at(plan=Plan(epochs=(1,), batch=2), start=net.pick()))
    assert seen == [2, 1]  # ceil(2.5) samples


def test_where_nothing_is_sensitive_it_is_fedavg():
    zeta = Elastic().zeta(named([0.0, 0.0]), maximum=named([0.0, 0.0]))
    assert [value.item() for value in zeta.values()] == [1.0, 1.0]
    same = Elastic(tau=1.0).zeta(named([3.0, 3.0]), maximum=named([3.0, 3.0]))
    assert [value.item() for value in same.values()] == [1.0, 1.0]


def test_one_client_with_zeta_one_is_fedavg_to_rounding(make_data, tiny_run, monkeypatch):
    data = make_data(("a",))
    monkeypatch.setattr(Elastic, "zeta", lambda _self, omega, _maximum: {name: torch.ones(()) for name in omega})
    options = {"model": "resnet10", "dtype": "float64", "set": {"model.width": 4}}
    ours, fedavg = (
        load_file(tiny_run(name, data, **options).path / "model.safetensors") for name in ("elastic", "fedavg")
    )
    for name in fedavg:
        torch.testing.assert_close(ours[name], fedavg[name], atol=1e-9, rtol=1e-9)


def test_traffic(tiny_run):
    resnet = {"rounds": 1, "model": "resnet10"}
    fedavg, tensor, element = (
        tiny_run(name, **resnet, set={"model.width": 4, **more}).rounds[0]["bytes"]
        for name, more in [("fedavg", {}), ("elastic", {}), ("elastic", {"level": "element"})]
    )
    assert tensor["up"]["weights"] == fedavg["up"]["weights"]
    assert tensor["down"] == element["down"] == fedavg["down"]
    extra = element["up"]["total"] - tensor["up"]["total"]
    assert extra >= fedavg["up"]["weights"] - 3 * 38 * 4  # three clients, 38 tensors


@pytest.mark.parametrize(
    "more", [{"level": "element"}, {"maximum": "clients"}, {"signal": "ce", "weighting": "uniform"}]
)
def test_runs(more, tiny_run):
    assert tiny_run("elastic", participation=0.6, set=more).summary["status"] == "complete"

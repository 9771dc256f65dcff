import math

import pytest
import torch
from safetensors.torch import load_file

from protofed.methods.moon import Moon
from protofed.models import build_model
from protofed.models.net import Net

RESNET = {"model": "resnet10", "set": {"model.width": 4}}
SEEN = torch.tensor([True])


def test_gt07():
    zc, zg, zp = torch.tensor([[1.0, 0]]), torch.tensor([[1.0, 1]]), torch.tensor([[[0.0, 1]]])
    assert Moon().contrast(zc, zg, zp, SEEN).item() == pytest.approx(0.217622, abs=1e-5)
    assert Moon().contrast(zc, zg, zg[None], SEEN).item() == pytest.approx(0.693147, abs=1e-5)


def test_no_gradient_where_past_and_global_agree():
    zc = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    z = torch.randn(5, 3, dtype=torch.float64)
    Moon().contrast(zc, z, z[None], SEEN).backward()
    torch.testing.assert_close(zc.grad, torch.zeros_like(zc), atol=1e-12, rtol=0)


def test_a_client_without_a_past_has_no_contrast():
    zc = torch.randn(5, 3, requires_grad=True)
    value = Moon(buffer=2).contrast(zc, torch.randn(5, 3), torch.randn(2, 5, 3), torch.tensor([False, False]))
    value.backward()
    assert value.item() == 0
    assert torch.equal(zc.grad, torch.zeros(5, 3))


def test_previous_models_queue_up_newest_first(identity_net, make_at):
    method, net = Moon(buffer=2), identity_net()
    memory = method.client_state(net, make_at())
    for value in (1.0, 2.0, 3.0):
        with torch.no_grad():
            net.params()["fc.weight"].fill_(value)
        _, memory = method.upload(net, None, make_at(memory=memory))
        assert memory.previous["0"].params["fc.weight"][0, 0] == value
    assert memory.previous["1"].params["fc.weight"][0, 0] == 2.0
    assert memory.seen.tolist() == [True, True]


def test_references_are_in_evaluation_mode_and_the_trained_model_is_not(make_at):
    torch.manual_seed(0)
    net = Net(build_model("resnet10", (1, 8, 8), 3, {"width": 4}))
    method, x, y = Moon(), torch.randn(6, 1, 8, 8), torch.tensor([0, 1, 2, 0, 1, 2])
    at = make_at(start=net.pick(), memory=method.client_state(net, make_at()), classes=3)
    kept = {name: tensor.clone() for name, tensor in at.start.stats.items()}
    net.model.train()
    terms = method.loss(net, x, y, at)
    assert all(module.training for module in net.model.modules())
    assert not torch.equal(net.pick().stats["stem.bn1.running_mean"], kept["stem.bn1.running_mean"])
    assert all(torch.equal(at.start.stats[name], kept[name]) for name in kept)
    (gradient,) = torch.autograd.grad(terms["ce"] + terms["contrast"], [net.params()["stem.conv1.weight"]])
    assert gradient.abs().sum() > 0


def test_first_round_is_fedavg_bit_for_bit(tiny_run):
    ours, fedavg = (
        load_file(tiny_run(name, rounds=1, epochs=2, **RESNET).path / "model.safetensors")
        for name in ("moon", "fedavg")
    )
    assert all(torch.equal(ours[name], fedavg[name]) for name in fedavg)


def test_later_rounds_contrast(tiny_run):
    parts = [record["loss_parts"]["contrast"] for record in tiny_run("moon", rounds=2, **RESNET).rounds]
    assert parts[0] == 0
    assert parts[1] > 0


def test_projection_replaces_the_head(tiny_run):
    run = tiny_run("moon", model="resnet10", dtype="float64", set={"model.width": 4, "projection": 256, "buffer": 2})
    model = run.model()
    assert (model.cut, model.dim) == ("projection", 256)
    assert model(torch.zeros(2, 1, 8, 8, dtype=torch.float64)).shape == (2, 4)


def test_the_global_model_attracts_and_the_own_past_repels(make_at):
    """The contrast by hand, with features of three different models, the two references in evaluation mode."""
    net = Net(build_model("resnet10", (1, 8, 8), 3, {"width": 4}))
    past, server = (Net(build_model("resnet10", (1, 8, 8), 3, {"width": 4})) for _ in range(2))
    method, x, y = Moon(mu=1.0), torch.randn(6, 1, 8, 8), torch.tensor([0, 1, 2, 0, 1, 2])
    for other in (past, server):  # statistics unlike those of the batch, and features that are not all zero
        for name, stat in other.model.named_buffers():
            if name.endswith("running_mean"):
                stat.sub_(0.3)
    memory = method.client_state(past, make_at())
    memory.seen[:] = True
    net.model.train()
    found = method.loss(net, x, y, make_at(start=server.pick(), memory=memory, classes=3))["contrast"]
    past.model.eval()
    server.model.eval()
    zc = net.features(x)
    cosine = torch.nn.functional.cosine_similarity
    to_server, to_past = (cosine(zc, other.features(x)) / 0.5 for other in (server, past))
    expected = -(to_server.exp() / (to_server.exp() + to_past.exp())).log().mean()
    assert found.item() == pytest.approx(expected.item(), abs=1e-5)
    assert abs(expected.item() - math.log(2)) > 1e-2  # as it would be if both references were the same


def test_memory_stays_on_its_device(identity_net, make_at):
    """`meta` stands for an accelerator: a tensor made elsewhere cannot be joined with one of it."""
    method, net = Moon(buffer=2), identity_net()
    memory = method.client_state(net, make_at())
    elsewhere = type(memory)(memory.previous, memory.seen.to("meta"))
    _, after = method.upload(net, None, make_at(memory=elsewhere))
    assert after.seen.device.type == "meta"

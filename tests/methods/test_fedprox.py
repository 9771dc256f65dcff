import pytest
import torch
from safetensors.torch import load_file
from torch.nn import functional

from protofed.methods.fedprox import FedProx
from protofed.models import laid_out
from protofed.registry import make_method
from protofed.runs.assembly import assemble
from protofed.runs.options import make_options
from protofed.verbs import proximal

RESNET = {"model": "resnet10", "set": {"model.width": 4}}


def test_gt02_penalty_and_gradient():
    theta = torch.tensor([1.0, 2.0], requires_grad=True)
    penalty = proximal({"w": theta}, {"w": torch.zeros(2)}, 0.01)
    penalty.backward()
    assert penalty.item() == pytest.approx(0.025, abs=1e-5)
    torch.testing.assert_close(theta.grad, torch.tensor([0.01, 0.02]), atol=1e-5, rtol=0)


def test_the_loss_counts_from_the_broadcast_weights(identity_net, make_at):
    net = identity_net(head=torch.tensor([[1.0, 2.0], [0.0, 0.0]]))
    start = net.using(net.pick()).pick()
    start.params["fc.weight"].fill_(1.0)
    terms = FedProx(mu=0.01).loss(net, torch.eye(2), torch.tensor([0, 1]), make_at(start=start))
    assert terms["proximal"].item() == pytest.approx(0.015, abs=1e-5)  # 0 + 1 + 1 + 1


def test_one_client_without_penalty_is_local_sgd_bit_for_bit(make_data, tiny_run, tmp_path):
    data = make_data(("a",), train=16)
    options = {"rounds": 2, "epochs": 2, "batch": 8, **RESNET}
    fedavg, fedprox = (
        load_file(tiny_run(name, data, **{**options, "set": {**RESNET["set"], **more}}).path / "model.safetensors")
        for name, more in [("fedavg", {}), ("fedprox", {"mu": 0})]
    )

    context = assemble(make_options({"method": "fedavg", "data": data, **options}), tmp_path / "none").context
    model = laid_out(context.model, context.layout)
    for round in range(2):
        at = context.at(round, "a-0")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-5, fused=True)
        order, chance = at.rng("order"), at.rng("augment")
        model.train()
        for _ in range(2):
            for x, y in context.samples("a-0").epoch(8, order, chance):
                optimizer.zero_grad()
                functional.cross_entropy(model(x), y).backward()
                optimizer.step()
    local = model.state_dict()
    for name, tensor in fedavg.items():
        assert torch.equal(tensor, local[name]), name
        assert torch.equal(tensor, fedprox[name]), name


def test_the_penalty_holds_clients_back(tiny_run):
    def moved(mu: float) -> float:
        run = tiny_run("fedprox", rounds=1, set={"mu": mu})
        return run.rounds[-1]["loss_parts"]["proximal"] / mu

    assert moved(1.0) < moved(1e-3)


def test_presets():
    assert make_method(FedProx, {}).mu == 0.01
    assert make_method(FedProx, {}, "rethinkfl").mu == 1e-4

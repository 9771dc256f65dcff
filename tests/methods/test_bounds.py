import pytest
import torch
from by_hand import total
from safetensors.torch import load_file

from protofed.method import Plan
from protofed.methods.bounds import Centralized, Single


def test_gt01_the_one_average(identity_net, make_at):
    method, sizes, net = Single(), {"a": 1, "b": 3}, identity_net(2, 1)
    server, uploads = method.server_state(net, make_at()), {}
    for client, theta in [("a", [1.0, 2.0]), ("b", [5.0, -2.0])]:
        with torch.no_grad():
            net.params()["fc.weight"].copy_(torch.tensor([theta]))
        uploads[client], _ = method.upload(net, None, make_at(clients=sizes, client=client))
    after = method.aggregate(server, total(uploads), make_at(clients=sizes))
    assert after.weights.params["fc.weight"][0].tolist() == pytest.approx([4.0, -1.0], abs=1e-5)


def test_single_is_one_round_of_all_epochs(tiny_run, same_results):
    assert Single().plan(Plan(epochs=(2, 3, 1))).epochs == (6,)
    single = tiny_run("single", rounds=3, epochs=2, model="resnet10", set={"model.width": 4})
    fedavg = tiny_run("fedavg", rounds=1, epochs=6, model="resnet10", set={"model.width": 4})
    assert len(single.rounds) == 1
    same_results(single, fedavg)


def test_centralized_pools_the_data_and_sends_nothing(tiny_run):
    assert Centralized().persist_optimizer
    run = tiny_run("centralized", rounds=2)
    assert [record["participants"] for record in run.rounds] == [["pool-0"]] * 2
    assert [record["samples"] for record in run.rounds] == [72, 72]
    assert run.summary["bytes"]["up"]["total"] == run.summary["bytes"]["down"]["total"] == 0
    assert set(run.summary["accuracy"]["global"]) == {"a", "b", "c", "average", "pooled"}


def test_centralized_goes_on_with_its_momentum(tiny_run):
    kept, fresh = (
        load_file(tiny_run("centralized", rounds=2, set={"persist_optimizer": on}).path / "model.safetensors")
        for on in ("on", "off")
    )
    assert not torch.equal(kept["fc.weight"], fresh["fc.weight"])

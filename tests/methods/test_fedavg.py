"""FedAvg: GT-01, its knobs, and what it reduces to."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from protofed.methods.fedavg import FedAvg, ModelUpload
from protofed.records import Mean, Tally, Weights
from protofed.runs.assembly import assemble
from protofed.runs.options import make_options


def averaged(method: FedAvg, make_at: Any, clients: dict[str, tuple[list[float], int]]) -> torch.Tensor:
    tally = Tally()
    for client, (values, _) in clients.items():
        at = make_at(client=client, clients={name: size for name, (_, size) in clients.items()})
        weights = Weights({"w": torch.tensor(values)}, {"bn.running_mean": torch.tensor(values)})
        tally.add(client, ModelUpload(Mean(weights, method.weight(at))))
    model = method.aggregate(None, tally.total(), make_at(client=None))
    assert torch.equal(model.weights.params["w"], model.weights.stats["bn.running_mean"])
    return model.weights.params["w"]


def test_gt_01(make_at: Any) -> None:
    clients = {"a": ([1.0, 2.0], 1), "b": ([5.0, -2.0], 3)}
    assert averaged(FedAvg(), make_at, clients).tolist() == [4, -1]
    assert averaged(FedAvg(weighting="uniform"), make_at, clients).tolist() == [3, 0]


def test_permuting_clients_changes_nothing(make_at: Any) -> None:
    clients = {"a": ([1.0, 0.3], 1), "b": ([5.0, -2.0], 3), "c": ([0.1, 7.0], 5)}
    shuffled = {name: clients[name] for name in ("c", "a", "b")}
    torch.testing.assert_close(averaged(FedAvg(), make_at, clients), averaged(FedAvg(), make_at, shuffled))


def test_one_client_is_local_training(make_data: Any, tiny_run: Any, tmp_path: Any) -> None:
    """Two rounds of one client are two epochs of torch.optim.SGD, started afresh in between."""
    data = make_data(["only"], train=20)
    run = tiny_run("fedavg", data, rounds=2, batch=7, lr=0.05, dtype="float64")
    context = assemble(make_options(run.options), tmp_path / "none").context
    model = deepcopy(context.model)
    samples = context.samples("only-0")
    for round in range(2):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-5)
        at = context.at(round, "only-0")
        for x, y in samples.epoch(7, at.rng("order"), at.rng("augment")):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    found = load_file(run.path / "model.safetensors")
    for name, param in model.named_parameters():
        torch.testing.assert_close(found[name], param.detach(), rtol=1e-12, atol=1e-13)


def test_it_learns(tiny_run: Any) -> None:
    run = tiny_run("fedavg", rounds=15, epochs=2, lr=0.05)
    assert run.summary["accuracy_final"]["global"]["average"] > 0.9
    losses = [record["train_loss"] for record in run.rounds]
    assert losses[-1] < losses[0] / 4
    assert run.rounds[0]["loss_parts"].keys() == {"ce"}


def test_bytes_are_the_closed_form(tiny_run: Any) -> None:
    run = tiny_run("fedavg")
    learnable = 64 * 16 + 16 + 16 * 4 + 4
    for record in run.rounds:
        for way in ("up", "down"):
            assert record["bytes"][way]["weights"] == 3 * 4 * learnable
            assert record["bytes"][way]["prototypes"] == record["bytes"][way]["features"] == 0
    assert run.config["model"]["parameters"] == [learnable]


def test_running_statistics_travel_as_other(tiny_run: Any) -> None:
    run = tiny_run("fedavg", model="resnet10", set={"model.width": 4}, rounds=1)
    up = run.rounds[0]["bytes"]["up"]
    (learnable,) = run.config["model"]["parameters"]
    assert up["weights"] == 3 * 4 * learnable
    stats = [tensor for name, tensor in load_file(run.path / "model.safetensors").items() if "running" in name]
    assert up["other"] > 3 * sum(tensor.nbytes for tensor in stats)


@pytest.mark.parametrize(
    "settings",
    [
        {"weighting": "uniform"},
        {"proto_pass": "last_epoch"},
        {"stale_protos": "drop"},
        {"persist_optimizer": "on"},
        {"drop_singleton_batch": "off"},
    ],
)
def test_every_knob_runs(tiny_run: Any, settings: dict[str, str]) -> None:
    assert tiny_run("fedavg", set=settings, batch=7).complete


def test_knobs_that_concern_prototypes_change_nothing(tiny_run: Any, same_results: Any) -> None:
    same_results(tiny_run("fedavg"), tiny_run("fedavg", set={"proto_pass": "last_epoch", "stale_protos": "drop"}))


def test_weighting_and_persistence_change_the_model(make_data: Any, tiny_run: Any) -> None:
    data = make_data(["a", "b"], train={"a": 8, "b": 40})
    models = [
        (tiny_run("fedavg", data, set=settings).path / "model.safetensors").read_bytes()
        for settings in ({}, {"weighting": "uniform"}, {"persist_optimizer": "on"})
    ]
    assert len(set(models)) == 3

"""ProtoTune: who trains and who judges, the contrast, the choice, and a run whose left-out sites decide."""

from dataclasses import replace
from math import log
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import protofed
from protofed.closed_form.rotation import Turn, fold_of, rotation
from protofed.errors import UserError
from protofed.methods.prototune import ProtoTune, TrainedRow, contrast, flattened, most_liked, own_class, restored
from protofed.records import ClassTable, Weights, encode


def test_every_fold_scores_every_model_that_was_trained_without_it() -> None:
    exchanges = rotation(2, 2)
    first = [exchange for exchange in exchanges if exchange.fold == 0]
    assert first == [
        Turn(0, "statistics", 0),
        Turn(0, "training", 0),
        Turn(0, "statistics", 1),
        Turn(0, "training", 1),
        Turn(0, "statistics", 2),
        Turn(0, "scores", 2),
    ]
    # A judge scores what it receives for training and at the end: each number of rounds once.
    scored = [exchange.trained for exchange in first if exchange.part != "statistics"]
    assert scored == [0, 1, 2]
    assert exchanges[-1] == Turn(None, "statistics", 2)
    assert rotation(0, 1) == (
        Turn(None, "statistics", 0),
        Turn(None, "training", 0),
        exchanges[-1]._replace(trained=1),
    )


def test_a_domain_is_left_out_as_a_whole_and_single_sites_where_there_is_one_domain(make_at: Any) -> None:
    clients = {"a": 1, "b": 1, "c": 1, "d": 1}
    two = make_at(clients=clients, domains={"a": "x", "b": "y", "c": "x", "d": "y"})
    assert [fold_of(client, 3, two) for client in clients] == [0, 1, 0, 1]
    one = make_at(clients=clients, domains=dict.fromkeys(clients, "x"))
    assert [fold_of(client, 3, one) for client in clients] == [0, 1, 2, 0]


def test_contrast_is_the_mean_over_the_domains_prototypes_of_the_own_class() -> None:
    rows = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.6, 0.8], [9.0, 9.0]])
    table = ClassTable(rows, torch.tensor([2.0, 1.0, 1.0, 0.0]))  # the second domain lacks class 1
    h, y, tau = torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1]), 0.5
    e = torch.tensor([[1.0, 0.0, 0.6], [0.0, 1.0, 0.8]]).div(tau).exp()
    first = -(log(e[0, 0] / e[0].sum()) + log(e[0, 2] / e[0].sum())) / 2
    second = -log(e[1, 1] / e[1].sum())
    torch.testing.assert_close(contrast(h, table, y, 2, tau), torch.tensor((first + second) / 2))


def test_values_of_the_own_class_are_averaged_over_the_domains_that_hold_it() -> None:
    table = ClassTable(torch.zeros(4, 2), torch.tensor([2.0, 1.0, 1.0, 0.0]))  # rows of two domains with two classes
    values = torch.tensor([[1.0, 2.0, 4.0, 8.0], [1.0, 2.0, 4.0, 8.0]])
    torch.testing.assert_close(own_class(values, table, torch.tensor([0, 1]), 2), torch.tensor([2.5, 2.0]))


def _terms(make_at: Any, net: Any, h: torch.Tensor, y: torch.Tensor, **settings: Any) -> dict[str, torch.Tensor]:
    """The loss of features h where one domain has the prototypes (1, 0) and (0, 1)."""
    prototypes = SimpleNamespace(sums=ClassTable(torch.eye(2), torch.ones(2)))
    method = ProtoTune(**settings)
    at = make_at(down=prototypes)
    at = replace(at, draw=method.draw(y, at, torch.Generator().manual_seed(0)))
    return method.loss(net, h, y, at)


def test_alignment_turns_features_towards_the_prototypes_of_their_class(make_at: Any, identity_net: Any) -> None:
    h, y = torch.tensor([[0.6, 0.8], [0.0, 2.0]]), torch.tensor([0, 1])
    terms = _terms(make_at, identity_net(), h, y, target="alignment")
    assert list(terms) == ["alignment"]
    torch.testing.assert_close(terms["alignment"], torch.tensor((0.4 + 0.0) / 2))


def test_mixup_counts_by_its_weight(make_at: Any, identity_net: Any) -> None:
    h, y = torch.tensor([[0.6, 0.8], [0.0, 1.0], [1.0, 0.0]]), torch.tensor([0, 1, 0])
    once, thrice = (_terms(make_at, identity_net(), h, y, mixup=weight)["mixup"] for weight in (1.0, 3.0))
    assert once > 0
    torch.testing.assert_close(thrice, 3 * once)
    assert "mixup" not in _terms(make_at, identity_net(), h, y)


def test_a_class_without_a_prototype_adds_nothing() -> None:
    table = ClassTable(torch.eye(2), torch.tensor([1.0, 0.0]))
    h = torch.randn(3, 2, requires_grad=True)
    loss = contrast(h, table, torch.ones(3, dtype=torch.long), 2, 0.1)
    assert loss == 0
    assert torch.isfinite(torch.autograd.grad(loss, h)[0]).all()


@pytest.mark.parametrize(
    ("right", "images", "expected"),
    [
        ([[5, 8, 9], [5, 4, 3]], [10, 10], 1),
        ([[5, 8, 9], [50, 60, 40]], [10, 100], 1),  # folds count equally, however many images they have
        ([[5, 4, 3], [5, 6, 6]], [10, 10], 0),  # no gain: of equals the fewest
        ([[5, 5, 6], [0, 0, 0]], [10, 0], 2),  # nobody scored in the second fold
    ],
)
def test_the_fewest_rounds_that_left_out_folds_like_best(right: Any, images: Any, expected: int) -> None:
    scores = torch.tensor([[(one, total) for one in row] for row, total in zip(right, images, strict=True)])
    assert most_liked(scores.double()) == expected


def test_a_model_survives_its_row_and_travels_only_where_it_was_trained() -> None:
    weights = Weights({"a": torch.randn(3, 2), "b": torch.randn(4)}, {"s": torch.randn(2)})
    again = restored(flattened(weights, 5.0).rows[0], weights)
    for name, tensor in weights.tensors().items():
        torch.testing.assert_close(again.tensors()[name], tensor)
    sent, kept = (encode(flattened(weights, count), "x").size for count in (5.0, 0.0))
    assert sent.as_dict()["weights"] == 12 * 4
    assert kept.as_dict()["weights"] == 0
    assert TrainedRow.kinds["rows"] == "weights"


def _domains(path: Any, shifts: Any) -> str:
    """Two classes told apart by a bar; domains differ in brightness."""
    rng = np.random.default_rng(0)
    for name, shift in shifts.items():
        y = np.arange(40) % 2
        x = rng.integers(0, 40, (40, 16, 16, 1)) + shift
        x[y == 1, 4:8] += 90
        np.savez(path / f"{name}.npz", x_train=x.astype(np.uint8), y_train=y, x_test=x.astype(np.uint8), y_test=y)
    return str(path)


@pytest.mark.parametrize(
    "setting",
    [{"target": "prototypes"}, {"target": "head"}, {"target": "both"}, {"target": "alignment"}, {"mixup": 1.0}],
    ids=lambda setting: "-".join(map(str, setting.values())),
)
def test_a_run_ends_with_as_many_rounds_as_left_out_sites_like(tmp_path: Any, setting: dict[str, Any]) -> None:
    data = _domains(tmp_path, {"a": 0, "b": 60, "c": 120})
    result = protofed.run(
        "prototune", data, model="cnn", out=tmp_path / "run", set={"refine": 1, **setting}, image_size=16
    )
    assert [line["train_loss"] is not None for line in result.rounds][:4] == [False, True, False, False]
    state = load_file(next((tmp_path / "run" / "checkpoint").glob("server-*.safetensors")))
    scores = next(tensor for name, tensor in state.items() if name.endswith("scores"))
    kept = next(tensor for name, tensor in state.items() if name.endswith("kept"))
    assert scores.shape == (3, 2, 2)
    assert bool((scores[..., 1] == 40).all())
    assert int(kept) == most_liked(scores)
    model = load_file(tmp_path / "run" / "model.safetensors")
    start = {name: state[f"start/params/{name}"] for name in model if not name.startswith("fc.")}
    moved = any(not torch.equal(model[name], tensor) for name, tensor in start.items())
    assert moved == (int(kept) > 0)


def test_the_mean_of_stages_that_hardly_moved_is_where_they_were(tmp_path: Any) -> None:
    data = _domains(tmp_path, {"a": 0, "b": 60})
    settings = {"refine": 1, "folds": 1}
    protofed.run("prototune", data, model="cnn", out=tmp_path / "run", set=settings, image_size=16, lr=1e-12)
    state = load_file(next((tmp_path / "run" / "checkpoint").glob("server-*.safetensors")))
    model = load_file(tmp_path / "run" / "model.safetensors")
    stages = [name for name in model if not name.startswith("fc.") and f"start/params/{name}" in state]
    assert stages
    for name in stages:
        torch.testing.assert_close(model[name], state[f"start/params/{name}"], atol=1e-6, rtol=1e-5)


def _stages_after_one_round(path: Any, data: str, **settings: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is trained, before and after."""
    own = {"refine": 1, "folds": 1, **settings.pop("set", {})}
    protofed.run("prototune", data, out=path, set=own, image_size=16, **settings)
    state = load_file(next((path / "checkpoint").glob("server-*.safetensors")))
    before = {name.removeprefix("start/params/"): tensor for name, tensor in state.items() if "start/params" in name}
    after = load_file(path / "model.safetensors")
    return before, {name: after[name] for name in before}


def test_the_server_goes_a_part_of_the_way(tmp_path: Any) -> None:
    data = _domains(tmp_path, {"a": 0, "b": 60})
    start, whole = _stages_after_one_round(tmp_path / "whole", data, model="cnn")
    _, half = _stages_after_one_round(tmp_path / "half", data, model="cnn", set={"server_lr": 0.5})
    assert any(not torch.equal(whole[name], start[name]) for name in start)
    for name in start:
        torch.testing.assert_close(half[name], (start[name] + whole[name]) / 2)


def test_adapters_are_trained_instead_of_the_stages_they_follow(tmp_path: Any) -> None:
    data = _domains(tmp_path, {"a": 0, "b": 60})
    network = {"model": "resnet10", "train": "head"}
    start, after = _stages_after_one_round(
        tmp_path / "run", data, set={"adapters": 2, "model.width": 8, "model.norm": "group"}, **network
    )
    assert {name.split(".")[0] for name in start} == {"adapter3", "adapter4"}
    assert any(not torch.equal(after[name], start[name]) for name in start)


@pytest.mark.parametrize("setting", [{"gram": "sketch"}, {"tune": "both"}, {"rho": 0.5}])
def test_what_follows_one_exchange_only_is_refused(tmp_path: Any, setting: dict[str, Any]) -> None:
    data = _domains(tmp_path, {"a": 0, "b": 60})
    with pytest.raises(UserError, match="neither tune nor rho"):
        protofed.run("prototune", data, model="cnn", set=setting, image_size=16, out=tmp_path / "x")


def test_without_stages_to_train_it_is_refused(tmp_path: Any) -> None:
    data = _domains(tmp_path, {"a": 0, "b": 60})
    with pytest.raises(UserError, match="use --train last"):
        protofed.run("prototune", data, model="cnn", train="head", image_size=16, out=tmp_path / "x")


def test_a_guard_is_refused(tmp_path: Any) -> None:
    data = _domains(tmp_path, {"a": 0, "b": 60})
    with pytest.raises(UserError, match="not training; use protoridge"):
        protofed.run("prototune", data, model="cnn", guard="epsilon=3,delta=1e-5", image_size=16, out=tmp_path / "x")

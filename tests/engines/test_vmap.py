"""Clients that step together: equal to the loop up to rounding, in groups of any size, refused where they cannot."""

import logging
from math import prod
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from protofed import At
from protofed.engines import vmap
from protofed.errors import UserError
from protofed.method import Step
from protofed.methods.fedavg import FedAvg
from protofed.models import ImageShape, Split, everything
from protofed.models.catalog import register_model
from protofed.registry import registered

MISBEHAVING = f"{Path(__file__).parents[1] / 'federation' / 'misbehaving.py'}"
FLOAT64: dict[str, Any] = {"dtype": "float64", "epochs": 2}
SIZES = {"a": 24, "b": 21, "c": 17}


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": "adam", "set": {"persist_optimizer": "on"}, "participation": 0.6, "rounds": 3},
        {"set": {"persist_optimizer": "on"}},
        {"set": {"drop_singleton_batch": "off"}},
        {"set": {"data.augment": "flip"}},
        {"balanced": True},
    ],
    ids=["adam is kept", "momentum is kept", "batches of one", "augmented", "balanced"],
)
def test_all_that_a_client_draws_and_keeps(
    options: dict[str, Any], make_data: Any, tiny_run: Any, close_results: Any
) -> None:
    options = {**FLOAT64, **options, "data": make_data(train=SIZES)}
    close_results(tiny_run("fedavg", **options), tiny_run("fedavg", engine="vmap", **options), 1e-9)


def test_with_batch_normalisation_notes_and_mixup(make_data: Any, tiny_run: Any, close_results: Any) -> None:
    settings = {"model.width": 4, "proto_pass": "last_epoch", "apa_source": "input_mixup"}
    options = {**FLOAT64, "model": "resnet10", "set": settings, "data": make_data(train=SIZES)}
    close_results(tiny_run("i2pfl", **options), tiny_run("i2pfl", engine="vmap", **options), 1e-6)


def test_gradients_are_clipped_for_each_client(make_data: Any, tiny_run: Any, close_results: Any) -> None:
    class Clipped(FedAvg):
        """FedAvg with a short leash."""

        steps = (Step("loss", everything, clip=0.05),)

    options = {**FLOAT64, "data": make_data(train=SIZES)}
    with registered(Clipped) as name:
        runs = tiny_run(name, **options), tiny_run(name, engine="vmap", **options)
    close_results(*runs, 1e-9)
    free = tiny_run("fedavg", **options)
    assert (free.path / "model.safetensors").read_bytes() != (runs[0].path / "model.safetensors").read_bytes()


def test_dropout_is_drawn_client_by_client(make_data: Any, tiny_run: Any, close_results: Any) -> None:
    @register_model("dropping", description="a perceptron with dropout")
    def dropping(image_shape: ImageShape, classes: int) -> Split:
        hidden = nn.Sequential(nn.Flatten(), nn.Linear(prod(image_shape), 16), nn.ReLU(), nn.Dropout(0.5))
        return Split({"hidden": hidden, "fc": nn.Linear(16, classes)}, cut="hidden", dim=16, classes=classes)

    options = {**FLOAT64, "model": "dropping", "data": make_data(train=SIZES)}
    close_results(tiny_run("fedavg", **options), tiny_run("fedavg", engine="vmap", **options), 1e-9)


def test_groups_are_as_large_as_memory_allows(tiny_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[int] = []
    original = vmap.train_stacked

    def counting(method: Any, net: Any, group: Any, precision: Any) -> Any:
        groups.append(len(group))
        return original(method, net, group, precision)

    monkeypatch.setattr(vmap, "train_stacked", counting)
    tiny_run("fedavg", engine="vmap", rounds=1, protocol="equal=2")
    assert groups == [6]
    groups.clear()
    monkeypatch.setattr(vmap, "_MEMORY", 0)
    tiny_run("fedavg", engine="vmap", rounds=1, protocol="equal=2")
    assert groups == [1] * 6


def test_several_architectures(tiny_run: Any, close_results: Any) -> None:
    options = {**FLOAT64, "model": "cnn,mlp", "set": {"model.hidden": 16}}
    close_results(tiny_run("fedproto", **options), tiny_run("fedproto", engine="vmap", **options), 1e-9)


def test_the_same_run_twice_gives_the_same_bits(tiny_run: Any, same_results: Any) -> None:
    same_results(tiny_run("i2pfl", engine="vmap"), tiny_run("i2pfl", engine="vmap"))


def test_a_method_that_asks_who_it_is_is_refused(tiny_run: Any) -> None:
    with pytest.raises(
        UserError, match=r"engine=vmap.*Breaks cannot be trained together.*at\.client.*--engine workers"
    ):
        tiny_run(f"{MISBEHAVING}:Breaks", engine="vmap")


def test_a_method_that_looks_at_numbers_is_refused(tiny_run: Any) -> None:
    class Peeks(FedAvg):
        """Decides by the value of a tensor."""

        def loss(self, net: Any, x: Any, y: Any, at: At) -> Any:
            """Cross-entropy of a batch that has a zero."""
            return super().loss(net, x, y, at) if float(y.sum()) >= 0 else {}

    with registered(Peeks) as name, pytest.raises(UserError, match="Peeks cannot be trained together"):
        tiny_run(name, engine="vmap")


def test_a_client_that_fails_in_a_group_costs_only_itself(tiny_run: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Choosy(FedAvg):
        """Breaks in a later round, where the batch is that of domain c."""

        def draw(self, y: Any, at: At, rng: Any) -> Any:
            """Nothing, or an error."""
            if at.round == 1 and at.client == "c-0":
                raise ValueError("no luck")
            return

    with registered(Choosy) as name, caplog.at_level(logging.WARNING, "protofed"):
        run, loop = tiny_run(name, engine="vmap", dtype="float64"), tiny_run(name, dtype="float64")
    for each in (run, loop):
        assert [[event["client"] for event in record["events"]] for record in each.rounds] == [[], ["c-0"]]
    assert any("one by one" in message for message in caplog.messages)

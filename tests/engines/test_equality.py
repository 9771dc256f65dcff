"""Engines: the same results bit for bit, whatever the number of processes, and a killed worker costs one client."""

import os
from pathlib import Path
from typing import Any

import pytest

METHODS = ["fedavg", "fedproto", "fedproto_avg", "conffedproto", "i2pfl"]


MISBEHAVING = f"{Path(__file__).parents[1] / 'federation' / 'misbehaving.py'}"


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_workers_equal_the_loop(method: str, workers: int, tiny_run: Any, same_results: Any) -> None:
    options: dict[str, Any] = {"protocol": "equal=2", "participation": 0.7}
    loop = tiny_run(method, **options)
    several = tiny_run(method, engine="workers", workers=workers, **options)
    assert several.config["engine"]["name"] == "workers"
    assert several.config["engine"]["workers"] == workers
    same_results(loop, several)


def test_equal_with_everything_that_is_random(tiny_run: Any, same_results: Any) -> None:
    options: dict[str, Any] = {
        "model": "resnet10",
        "protocol": "dirichlet=0.5,clients=4",
        "set": {
            "model.width": 4,
            "data.augment": "flip",
            "persist_optimizer": "on",
            "proto_pass": "last_epoch",
            "apa_source": "input_mixup",
        },
    }
    same_results(tiny_run("i2pfl", **options), tiny_run("i2pfl", engine="workers", workers=2, **options))


def test_more_workers_than_clients(tiny_run: Any) -> None:
    assert tiny_run("fedavg", engine="workers", workers=64).config["engine"]["workers"] == 3


@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_worker_costs_one_client(workers: int, tiny_run: Any) -> None:
    run = tiny_run(f"{MISBEHAVING}:Dies", engine="workers", workers=workers, rounds=3)
    assert [[event["client"] for event in record["events"]] for record in run.rounds] == [[], ["b-0"], []]
    assert "ended with code -9" in run.rounds[1]["events"][0]["reason"]
    assert run.complete


def test_after_a_death_the_run_is_as_if_the_client_had_failed(tiny_run: Any) -> None:
    """The same client, left out by an exception in the reference engine."""
    died = tiny_run(f"{MISBEHAVING}:Dies", engine="workers", workers=2, rounds=3)
    failed = tiny_run(f"{MISBEHAVING}:Breaks", rounds=3, set={"since": 1, "until": 2})
    assert (died.path / "model.safetensors").read_bytes() == (failed.path / "model.safetensors").read_bytes()


def test_no_process_is_left_behind(tiny_run: Any) -> None:
    before = children()
    tiny_run("fedavg", engine="workers", workers=3)
    with pytest.raises(RuntimeError, match="every client failed"):
        tiny_run(f"{MISBEHAVING}:Dies", engine="workers", workers=2, domains="b", set={"since": 0})
    assert children() == before


def children() -> set[str]:
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())

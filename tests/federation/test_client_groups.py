"""Many clients are added up in groups, wherever they are trained: the same bits, and a failure stays a small one."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from protofed.clients import ClientSide, TrainGroup
from protofed.federation import federation

PLUGIN = """
import os
from protofed.methods.fedavg import FedAvg


class Failing(FedAvg):
    def upload(self, net, samples, at):
        if at.client == "client-1" and at.round == 1:
            raise RuntimeError("no power")
        return super().upload(net, samples, at)


class Dying(FedAvg):
    def upload(self, net, samples, at):
        if at.client == "client-1" and at.round == 1:
            os._exit(9)
        return super().upload(net, samples, at)
"""
OPTIONS: dict[str, Any] = {"protocol": "iid=8", "rounds": 3}


@pytest.fixture(autouse=True)
def _groups_of_few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of three among the eight clients of the tiny data."""
    monkeypatch.setattr(federation, "_GROUPS", 3)
    monkeypatch.setattr(federation, "_SMALLEST_GROUP", 2)


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """The groups that are trained together in this process."""
    seen: list[tuple[str, ...]] = []
    perform = ClientSide.perform

    def noted(self: ClientSide, job: Any, message: Any) -> Any:
        if isinstance(job, TrainGroup):
            seen.append(job.clients)
        return perform(self, job, message)

    monkeypatch.setattr(ClientSide, "perform", noted)
    return seen


def lines(run: Any) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key != "seconds"} for line in run.rounds]


@pytest.mark.parametrize("method", ["fedavg", "i2pfl", "scaffold"])
def test_the_same_bits_wherever_clients_are_added_up(method: str, tiny_run: Any, groups: list[Any]) -> None:
    whole = tiny_run(method, **OPTIONS)
    together = len(groups)
    others = [
        tiny_run(method, keep_messages=True, **OPTIONS),  # every upload is looked at
        tiny_run(method, engine="workers", workers=2, **OPTIONS),
        tiny_run(method, engine="workers", workers=3, **OPTIONS),
    ]
    assert len(groups) == together  # the workers' are trained in other processes
    assert bool(together) == (method != "i2pfl")  # whose server sees prototypes client by client
    for other in others:
        assert lines(other) == lines(whole)
        for file in ("model.safetensors", "clients/client-1.safetensors"):
            one, two = (load_file(run.path / file) for run in (whole, other))
            assert one.keys() == two.keys()
            assert all((tensor == two[name]).all() for name, tensor in one.items())


def test_groups_follow_the_order_of_clients(tiny_run: Any, groups: list[tuple[str, ...]]) -> None:
    run = tiny_run("fedavg", **{**OPTIONS, "rounds": 1})
    clients = run.rounds[0]["participants"]
    assert [client for group in groups for client in group] == clients
    assert {len(group) for group in groups} == {2, 3}


@pytest.mark.parametrize(
    "options",
    [{"guard": "quantise=8"}, {"robust": "median"}, {"guard": "secure=on"}, {"ensemble": True, "rounds": 1}],
)
def test_where_single_uploads_are_needed_there_are_no_groups(
    options: dict[str, Any], tiny_run: Any, groups: list[Any]
) -> None:
    tiny_run("fedavg", **{**OPTIONS, **options})
    assert not groups


def test_a_client_that_fails_costs_only_itself(tiny_run: Any, tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(PLUGIN)
    runs = [tiny_run(f"{tmp_path / 'failing.py'}:Failing", **OPTIONS, **more) for more in ({}, {"keep_messages": True})]
    (event,) = runs[0].rounds[1]["events"]
    assert event["client"] == "client-1"
    assert "no power" in event["reason"]
    assert lines(runs[0]) == lines(runs[1])
    assert not list((runs[0].path / "clients").glob("*.round-*"))


def test_a_process_that_dies_costs_its_group(tiny_run: Any, tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(PLUGIN)
    run = tiny_run(f"{tmp_path / 'failing.py'}:Dying", engine="workers", workers=2, **OPTIONS)
    events = run.rounds[1]["events"]
    assert "client-1" in {event["client"] for event in events}
    assert len(events) == 3
    assert all("its process ended with code 9" in event["reason"] for event in events)
    assert run.rounds[2]["events"] == []
    assert len(run.rounds) == 3

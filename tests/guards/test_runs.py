"""Whole runs with guards: what is recorded, that engines agree and runs resume, and that others are not disturbed."""

import json
from typing import Any

import pytest

import protofed

pytest.importorskip("opacus")

PRIVATE = "clip=1,noise=1,row_noise=3"


class Stop(Exception):
    pass


class StopAfter:
    """A callback that ends a run as a crash would."""

    def __init__(self, round: int) -> None:
        self._round = round

    def round_end(self, run: protofed.Run, record: dict[str, Any]) -> None:
        if record["round"] == self._round:
            raise Stop


@pytest.mark.parametrize(
    ("method", "guard", "unit"),
    [
        ("conffedproto", PRIVATE, "sample"),
        ("fedproto_avg", PRIVATE, "sample"),
        ("i2pfl", "unit=client,clip=1,noise=0.1", "client"),
        ("scaffold", "unit=client,clip=1,noise=0.1", "client"),
    ],
)
def test_epsilon_is_written_for_every_round_and_in_total(method: str, guard: str, unit: str, tiny_run) -> None:
    run = tiny_run(method, guard=guard, rounds=3)
    spent = [record["privacy"]["epsilon"] for record in run.rounds]
    assert 0 < spent[0] < spent[1] < spent[2]
    total = run.summary["privacy"]
    assert (total["epsilon"], total["unit"], total["delta"]) == (spent[2], unit, 1e-5)
    assert set(total["clients"]) == set(run.config["partition"]["clients"])
    assert run.config["guard"]["noise"] > 0
    assert run.rounds[0]["train_loss"] is None  # a loss tells of the samples, too


def test_a_run_without_guard_says_nothing_of_privacy(tiny_run) -> None:
    run = tiny_run("fedavg", rounds=1)
    assert "privacy" not in run.summary
    assert "privacy" not in run.rounds[0]
    assert run.rounds[0]["train_loss"] > 0


@pytest.mark.parametrize("guard", [f"{PRIVATE},subsample=0.7,quantise=6", "unit=client,clip=1,noise=0.1,quantise=8"])
def test_engines_agree_and_a_run_resumes(guard: str, tiny_run, same_results) -> None:
    straight = tiny_run("fedproto_avg", guard=guard, rounds=2, name="straight")
    same_results(straight, tiny_run("fedproto_avg", guard=guard, rounds=2, engine="workers", workers=2))
    with pytest.raises(Stop):
        tiny_run("fedproto_avg", guard=guard, rounds=2, name="broken", callbacks=[StopAfter(1)])
    resumed = protofed.run(out=straight.path.parent / "broken", resume=True)
    same_results(straight, resumed)
    assert resumed.summary["privacy"] == straight.summary["privacy"]


def test_quantised_uploads_are_smaller_and_counted(tiny_run) -> None:
    plain, few = tiny_run("fedavg", rounds=1), tiny_run("fedavg", rounds=1, guard="quantise=8")
    whole, small = (run.summary["bytes"]["up"]["weights"] for run in (plain, few))
    assert small == whole / 4
    assert few.summary["bytes"]["up"]["total"] < 0.6 * plain.summary["bytes"]["up"]["total"]


def test_secure_aggregation_gives_the_plain_result(tiny_run) -> None:
    pytest.importorskip("flwr")
    plain = tiny_run("fedproto_avg", dtype="float64")
    secure = tiny_run("fedproto_avg", dtype="float64", guard="secure=on")
    for mine, theirs in zip(plain.rounds, secure.rounds, strict=True):
        assert mine["train_loss"] == pytest.approx(theirs["train_loss"], abs=1e-4)
    assert secure.rounds[0]["privacy"]["epsilon"] is None


def test_secure_aggregation_survives_a_client_that_fails(tiny_run, monkeypatch) -> None:
    pytest.importorskip("flwr")
    upload = protofed.registry.find_method("fedavg").upload

    def failing(self: Any, net: Any, data: Any, at: Any) -> Any:
        if at.client == "b-0" and at.taken > 1:
            raise RuntimeError("out of memory")
        return upload(self, net, data, at)

    monkeypatch.setattr(protofed.registry.find_method("fedavg"), "upload", failing)
    plain = tiny_run("fedavg", rounds=2, dtype="float64", protocol="equal=2", participation=1.0)
    secure = tiny_run("fedavg", rounds=2, dtype="float64", protocol="equal=2", guard="secure=on")
    assert [event["client"] for event in secure.rounds[0]["events"]] == ["b-0"]
    assert secure.rounds[1]["train_loss"] == pytest.approx(plain.rounds[1]["train_loss"], abs=1e-4)


@pytest.mark.parametrize("rule", ["median", "trimmed=0.34", "norm-bound=1"])
def test_robust_runs(rule: str, tiny_run) -> None:
    run = tiny_run("fedproto_avg", robust=rule)
    assert run.config["robust"] == rule
    assert run.summary["accuracy_final"]["global"]["average"] > 0


def test_what_a_robust_rule_does_not_reach_is_said(tiny_run) -> None:
    run = tiny_run("fedmp", robust="median", rounds=1)
    assert any("U of fedmp is used client by client" in warning for warning in run.config["warnings"])


def test_rows_are_noised_without_a_promise(tiny_run) -> None:
    run = tiny_run("fedmp", guard="clip=1,noise=0.5,train=plain", rounds=1)
    written = json.loads((run.path / "summary.json").read_text())["privacy"]
    assert written["epsilon"] is None
    assert written["epsilon_of_rows"] > 0
    assert run.rounds[0]["train_loss"] > 0

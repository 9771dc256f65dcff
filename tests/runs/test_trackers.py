"""Trackers get every figure of every round; real ones, with stores on this disk."""

import json
import logging
import time
from pathlib import Path
from typing import Any

import pytest

import protofed
from protofed import UserError
from protofed.cli import main
from protofed.runs.trackers import MLflow, Tracker, WandB, make_tracker


class Stops:
    """Callback that ends a run after its first round."""

    def round_end(self, run: protofed.Run, record: dict[str, Any]) -> None:
        raise KeyboardInterrupt


@pytest.fixture
def mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A client of a store in files; the small package has no database."""
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlflow").as_uri())
    return MlflowClient()


def tracked_runs(client: Any) -> list[Any]:
    return list(client.search_runs([client.get_experiment_by_name("protofed").experiment_id]))


def test_mlflow_has_every_round(mlflow: Any, tiny_run: Any) -> None:
    run = tiny_run("fedavg", rounds=3, callbacks=[MLflow()])
    (tracked,) = tracked_runs(mlflow)
    assert tracked.info.status == "FINISHED"
    assert tracked.data.params["method"] == "fedavg"
    assert tracked.data.params["model.hidden"] == "16"
    history = mlflow.get_metric_history(tracked.info.run_id, "accuracy/global/average")
    expected = [(record["round"], record["accuracy"]["global"]["average"]) for record in run.rounds]
    assert [(point.step, point.value) for point in history] == expected
    assert tracked.data.metrics["bytes/up/total"] == run.rounds[-1]["bytes"]["up"]["total"]
    assert tracked.data.metrics["summary/accuracy/global/average"] == run.summary["accuracy"]["global"]["average"]


def test_a_resumed_run_goes_on_in_its_own(mlflow: Any, tiny_run: Any, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        tiny_run("fedavg", rounds=3, name="stopped", callbacks=[MLflow(), Stops()])
    run = protofed.run(out=tmp_path / "stopped", resume=True, callbacks=[MLflow()])
    (tracked,) = tracked_runs(mlflow)
    assert json.loads((run.path / "trackers.json").read_text()) == {"mlflow": tracked.info.run_id}
    history = mlflow.get_metric_history(tracked.info.run_id, "train_loss")
    assert [point.step for point in history] == [1, 2, 3]
    assert tracked.info.status == "FINISHED"


def test_a_comparison_has_one_for_each_run(
    mlflow: Any, tiny_data: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["--data", tiny_data, "--model", "mlp", "--rounds", "1", "--batch", "8", "--engine", "loop", "--quiet"]
    assert main(["compare", "fedavg", "fedprox", *words, "--track", "mlflow", "--out", "pair"]) == 0
    assert {each.data.params["method"] for each in tracked_runs(mlflow)} == {"fedavg", "fedprox"}


def test_wandb_has_every_round(tiny_run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    run = tiny_run("fedavg", rounds=2, callbacks=[WandB()])
    (store,) = (tmp_path / "wandb").glob("offline-run-*/*.wandb")
    # W&B's own process closes the file, which may be after the run has ended here.
    deadline = time.monotonic() + 60
    while (written := store.read_bytes()).count(b"accuracy/global/average") < 2:
        assert time.monotonic() < deadline, "a record of each round"
        time.sleep(0.05)
    assert str(run.rounds[0]["bytes"]["up"]["total"]).encode() in written
    assert json.loads((run.path / "trackers.json").read_text())["wandb"] in store.name


class Broken(Tracker):
    """A tracker whose server is away."""

    name = "broken"

    def begin(self, run: protofed.Run, id: str | None) -> Any:
        raise ConnectionError("no route to host")


def test_a_tracker_that_fails_does_not_stop_a_run(tiny_run: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        run = tiny_run("fedavg", callbacks=[Broken()])
    assert run.complete
    said = [record.getMessage() for record in caplog.records if "broken" in record.getMessage()]
    assert said == ["broken: no route to host; the run continues without it"]


def test_unknown_trackers_are_refused() -> None:
    with pytest.raises(UserError, match="did you mean mlflow"):
        make_tracker("mlflo")

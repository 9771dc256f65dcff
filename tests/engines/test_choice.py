"""Which engine `auto` takes, why, and that a resumed run stays with it."""

import json
from typing import Any

import pytest

import protofed
from protofed.engines import choice, choose_engine
from protofed.errors import UserError
from protofed.runs.assembly import assemble
from protofed.runs.options import make_options


@pytest.fixture
def ready(tiny_data: str, tmp_path: Any) -> Any:
    """Setting and templates of a tiny run."""

    def make(**options: Any) -> tuple[Any, Any]:
        given = {"method": "fedavg", "data": tiny_data, "model": "mlp", "engine": "loop", "rounds": 4, **options}
        assembly = assemble(make_options(given), tmp_path / "none")
        return assembly.prepared

    return make


def timed(monkeypatch: pytest.MonkeyPatch, alone: float, together: float = 1e9, cores: int = 2) -> None:
    """Let the trial find these seconds for a batch."""
    monkeypatch.setattr(choice.Trial, "step_seconds", lambda _: alone)
    monkeypatch.setattr(choice.Trial, "stacked_step_seconds", lambda _: together)
    monkeypatch.setattr(choice, "cores", lambda: cores)


@pytest.mark.parametrize(
    ("alone", "together", "cores", "expected"),
    [
        (1e-3, 1e-9, 2, ("loop", 1)),
        (0.2, 1e-9, 2, ("workers", 2)),
        (0.2, 1e-9, 1, ("loop", 1)),
        (0.045, 1e-9, 2, ("workers", 2)),
    ],
    ids=["short", "heavy", "heavy on one core", "too short for vmap"],
)
def test_auto(
    alone: float, together: float, cores: int, expected: tuple[str, int], ready: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed(monkeypatch, alone, together, cores)
    chosen = choose_engine("auto", None, 3, ready())
    assert (chosen.name, chosen.workers) == expected
    assert "a batch takes" in chosen.reason


@pytest.mark.parametrize(("together", "expected"), [(0.001, "vmap"), (0.005, "workers")])
def test_auto_takes_vmap_where_it_clearly_wins_a_long_run(
    together: float, expected: str, ready: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed(monkeypatch, 0.008, together)
    chosen = choose_engine("auto", None, 3, ready(rounds=10_000))
    assert chosen.name == expected
    assert "in vmap" in chosen.reason
    assert choose_engine("auto", None, 3, ready(rounds=10_000, method="copa")).name == "workers"


def test_one_sensible_choice_needs_no_trial(ready: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "Trial", None)
    prepared = ready()
    assert choose_engine("auto", None, 1, prepared).name == "loop"
    assert choose_engine("auto", 3, 3, prepared) == choice.EngineChoice("workers", 3, "a number of processes was given")


@pytest.mark.usefixtures("no_garbage_collection")
def test_the_trial_itself(ready: Any) -> None:
    prepared = ready()
    trial = choice.Trial(prepared)
    assert 0 < trial.step_seconds() < 10
    assert 0 < trial.stacked_step_seconds() < 10
    assert not prepared.context.clients_folder.exists()
    assert trial.steps_each == 1  # 24 samples in batches of 32


def test_run_json_says_why_and_resuming_stays(
    tiny_run: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, same_results: Any
) -> None:
    class Stop(Exception):
        """Ends a run."""

    class AfterOne:
        """Stops."""

        def round_end(self, run: Any, record: Any) -> None:
            """After the first round."""
            raise Stop

    monkeypatch.setattr("protofed.runs.assembly.choose_engine", lambda *_: choice.EngineChoice("vmap", 1, "a test"))
    straight = tiny_run("fedavg", engine="auto")
    with pytest.raises(Stop):
        tiny_run("fedavg", engine="auto", name="stopped", callbacks=[AfterOne()])
    monkeypatch.undo()
    config = json.loads((tmp_path / "stopped/run.json").read_text())
    assert config["engine"]["name"] == "vmap"
    assert config["engine"]["reason"] == "a test"
    resumed = protofed.run(out=tmp_path / "stopped", resume=True)
    assert resumed.summary["engine"] == "vmap"
    same_results(straight, resumed)


def test_autocast_computes_in_half_precision_and_stays_near(tiny_run: Any) -> None:
    options: dict[str, Any] = {"rounds": 3, "epochs": 2, "set": {"proto_pass": "last_epoch"}}
    full, half = tiny_run("i2pfl", **options), tiny_run("i2pfl", autocast=True, **options)
    assert half.config["options"]["autocast"] is True
    assert (full.path / "model.safetensors").read_bytes() != (half.path / "model.safetensors").read_bytes()
    ce = [run.rounds[-1]["loss_parts"]["ce"] for run in (full, half)]
    assert ce[1] == pytest.approx(ce[0], rel=0.1)
    with pytest.raises(UserError, match="bfloat16"):
        tiny_run("fedavg", autocast=True, dtype="float64")


def test_autocast_on_every_engine(tiny_run: Any, same_results: Any) -> None:
    loop = tiny_run("fedavg", autocast=True)
    same_results(loop, tiny_run("fedavg", autocast=True, engine="workers", workers=2))
    together = tiny_run("fedavg", autocast=True, engine="vmap")
    assert together.rounds[-1]["train_loss"] == pytest.approx(loop.rounds[-1]["train_loss"], rel=0.05)

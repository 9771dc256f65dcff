"""A run that has ended, or was stopped, goes on: as if it had been begun with more rounds, or it says why not."""

import inspect
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import protofed
from protofed.cli.app import main
from protofed.method import Method
from protofed.registry import find_method, method_names


class Stop:
    """Ends a run after some of its rounds."""

    def __init__(self, after: int) -> None:
        self.after = after

    def round_end(self, _run: protofed.Run, record: dict[str, Any]) -> None:
        if record["round"] == self.after:
            raise KeyboardInterrupt


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "fedproto", "i2pfl", "centralized"])
def test_a_finished_run_goes_on_as_the_straight_one(method: str, tiny_run: Any, same_results: Any) -> None:
    straight = tiny_run(method, rounds=5, participation=0.7)
    begun = tiny_run(method, rounds=2, participation=0.7)
    model = (begun.path / "broadcast.safetensors").read_bytes()
    extended = protofed.run(out=begun.path, resume=True, rounds=5)
    same_results(straight, extended)
    assert (begun.path / "broadcast.safetensors").read_bytes() != model
    told = {"rounds", "accuracy", "accuracy_final", "bytes", "status", "warnings", "chance"}
    assert {key: extended.summary[key] for key in told} == {key: straight.summary[key] for key in told}
    assert extended.options["rounds"] == extended.planned_rounds == 5
    # From now on it is a run of 5 rounds.
    assert protofed.run(out=begun.path, resume=True).summary == extended.summary


def test_a_stopped_run_goes_on_to_more_rounds(tiny_run: Any, same_results: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        tiny_run("fedavg", rounds=4, validation=0.25, callbacks=[Stop(3)], name="stopped")
    folder = tiny_run("fedavg", rounds=6, validation=0.25, name="straight").path
    extended = protofed.run(out=folder.parent / "stopped", resume=True, rounds=6)
    same_results(folder, extended)
    assert extended.summary["best"] == protofed.Run(folder).summary["best"]


def test_a_plan_goes_on(tiny_run: Any, same_results: Any) -> None:
    begun = tiny_run("fedavg", plan="2,1")
    same_results(tiny_run("fedavg", plan="2,1,3"), protofed.run(out=begun.path, resume=True, plan="2,1,3"))
    with pytest.raises(protofed.UserError, match="the epochs of finished rounds would change"):
        protofed.run(out=begun.path, resume=True, plan="1,1,3,1")


@pytest.mark.parametrize(
    ("method", "options", "reason"),
    [
        ("fedavg", {"schedule": "cosine"}, "the cosine schedule of the learning rate was laid out over 2 rounds"),
        ("fedga", {}, "the step of the weights falls over all rounds"),
        ("fedproc", {}, "the share of the cross-entropy rises over all rounds"),
        ("fedavg", {"ensemble": True}, "its last exchange was not averaged"),
        ("single", {}, "the epochs of finished rounds would change|rounds are done"),
        ("fedncm", {}, "rounds are done"),
    ],
)
def test_what_cannot_go_on_says_why(method: str, options: dict[str, Any], reason: str, tiny_run: Any) -> None:
    run = tiny_run(method, **options)
    before = {path.name: path.read_bytes() for path in run.path.glob("*.json*")}
    with pytest.raises(protofed.UserError, match=reason):
        protofed.run(out=run.path, resume=True, rounds=4)
    assert {path.name: path.read_bytes() for path in run.path.glob("*.json*")} == before


def test_methods_that_look_at_the_number_of_rounds_say_so() -> None:
    for name in method_names():
        method = find_method(name)
        own = [each for each in method.__mro__ if issubclass(each, Method) and each is not Method]
        if any("at.rounds" in inspect.getsource(each) for each in own):
            assert method.depends_on_rounds is not Method.depends_on_rounds, name


def test_a_flat_run_goes_on_with_more_patience(tiny_run: Any) -> None:
    # A rate of almost nothing: the loss of later rounds moves by rounding only, or not at all.
    flat = tiny_run("fedavg", rounds=20, lr=1e-12, stop_when_flat=2)
    done = len(flat.rounds)
    assert flat.summary["status"] == "flat"
    assert done < 20
    more = protofed.run(out=flat.path, resume=True, stop_when_flat=20)
    assert more.summary["status"] == "complete"
    assert len(more.rounds) == 20


def test_stopping_says_what_is_kept_and_how_to_go_on(tmp_path: Path, tiny_data: str) -> None:
    out = tmp_path / "a run"
    words = ["run", "fedavg", "--data", tiny_data, "--model", "mlp", "--engine", "loop", "--rounds", "100000"]
    process = subprocess.Popen(
        [sys.executable, "-m", "protofed", *words, "--out", str(out)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ},
        # A shell that starts tests in the background has them ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        deadline = time.monotonic() + 120
        while not (out / "rounds.jsonl").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=60)[1].strip().splitlines()[-1]
    finally:
        process.kill()
    assert process.returncode == 130
    done = len(protofed.Run(out).rounds)
    assert said == f"stopped; {done} of 100000 rounds are kept. To continue: protofed run --resume --out '{out}'"
    assert main(["run", "--resume", "--out", str(out), "--rounds", str(done + 1), "--quiet"]) == 0
    assert json.loads((out / "summary.json").read_text())["rounds"] == done + 1

"""Killing a run at any moment loses only the round in flight: resumed, it equals one that was never killed."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import protofed
from protofed.testing import results_of

# i2pfl keeps prototypes on the server, adam and its moments at the clients; both must come back.
OPTIONS: dict[str, Any] = {
    "model": "mlp",
    "rounds": 8,
    "epochs": 2,
    "batch": 8,
    "optimizer": "adam",
    "participation": 0.7,
    "protocol": "equal=2",
    "set": {"model.hidden": 32, "persist_optimizer": "on"},
}
SCRIPT = "import sys, json, protofed; protofed.run(**json.loads(sys.argv[1]))"


def start(out: Path, data: str, engine: str, resume: bool) -> subprocess.Popen[bytes]:
    options = {"out": str(out), "resume": resume, "engine": engine}
    if not resume:
        options |= {"method": "i2pfl", "data": data, **OPTIONS}
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT, json.dumps(options)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def kill_at_random(out: Path, data: str, engine: str, chance: random.Random, kills: int) -> int:
    """Start, kill, resume, kill again ...; how many of the kills hit a run that was not over yet."""
    hits = 0
    for attempt in range(kills):
        before = lines(out)
        process = start(out, data, engine, resume=attempt > 0)
        deadline = time.monotonic() + 60
        # The moment is counted from the first new round, or the start of the run: importing takes longer than a round.
        while process.poll() is None and time.monotonic() < deadline:
            if (out / "run.json").exists() and (lines(out) > before or chance.random() < 0.002):
                break
            time.sleep(0.002)
        time.sleep(chance.random() * 0.15)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            hits += 1
        process.wait()
        if (out / "summary.json").exists():
            break
    return hits


def lines(out: Path) -> int:
    file = out / "rounds.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, tiny_data: str) -> dict[str, Any]:
    """What a run leaves that nobody disturbs."""
    out = tmp_path_factory.mktemp("straight") / "run"
    return results_of(protofed.run("i2pfl", tiny_data, out=out, engine="loop", **OPTIONS).path)


def resumed_equals(out: Path, expected: dict[str, Any]) -> None:
    run = protofed.run(out=out, resume=True, engine="loop")
    assert run.complete
    found = results_of(out)
    assert sorted(found) == sorted(expected)
    assert [name for name in found if found[name] != expected[name]] == []
    assert [path.name for path in (out / "clients").iterdir() if path.suffix != ".safetensors"] == []


@pytest.mark.parametrize("engine", ["loop", "workers"])
def test_killed_and_resumed(engine: str, straight: dict[str, Any], tiny_data: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    kill_at_random(out, tiny_data, engine, random.Random(engine), kills=1)
    resumed_equals(out, straight)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_killed_and_resumed_many_times(seed: int, straight: dict[str, Any], tiny_data: str, tmp_path: Path) -> None:
    out = tmp_path / "run"
    kill_at_random(out, tiny_data, ("loop", "workers")[seed % 2], random.Random(seed), kills=3)
    resumed_equals(out, straight)


# Between the steps of a commit: every file that a run renames or removes, one by one

SHORT: dict[str, Any] = {**OPTIONS, "rounds": 3, "epochs": 1, "protocol": None, "participation": 1.0}


class Killed(BaseException):
    """Passes through everything that catches mere exceptions, as a kill would."""


class Fuse:
    """Counts the steps that change the folder, and ends the run at one of them, before or after it is done."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int | None, after: bool) -> None:
        self.steps = 0
        self._at, self._after = at, after
        for name in ("replace", "unlink"):
            monkeypatch.setattr(Path, name, self._watched(getattr(Path, name)))

    def _watched(self, original: Any) -> Any:
        def step(path: Path, *arguments: Any, **options: Any) -> Any:
            self.steps += 1
            if self.steps == self._at and not self._after:
                raise Killed
            result = original(path, *arguments, **options)
            if self.steps == self._at:
                raise Killed
            return result

        return step


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory, tiny_data: str) -> tuple[dict[str, Any], int]:
    """The undisturbed short run, and in how many steps it changes its folder."""
    out = tmp_path_factory.mktemp("short") / "run"
    with pytest.MonkeyPatch.context() as monkeypatch:
        fuse = Fuse(monkeypatch, None, False)
        protofed.run("i2pfl", tiny_data, out=out, engine="loop", **SHORT)
    return results_of(out), fuse.steps


@pytest.mark.parametrize("after", [False, True])
def test_killed_between_any_two_steps(
    after: bool, short: tuple[dict[str, Any], int], tiny_data: str, tmp_path: Path
) -> None:
    expected, steps = short
    assert steps > 20
    for at in range(2, steps + 1):  # the first step writes run.json, without which there is no run
        out = tmp_path / f"run{at}"
        with pytest.MonkeyPatch.context() as monkeypatch:
            Fuse(monkeypatch, at, after)
            with pytest.raises(Killed):
                protofed.run("i2pfl", tiny_data, out=out, engine="loop", **SHORT)
        resumed_equals(out, expected)


def test_killed_while_recovering(short: tuple[dict[str, Any], int], tiny_data: str, tmp_path: Path) -> None:
    """A second kill while the first one is being put right."""
    expected, steps = short
    out = tmp_path / "run"
    with pytest.MonkeyPatch.context() as monkeypatch:
        Fuse(monkeypatch, steps // 2, True)
        with pytest.raises(Killed):
            protofed.run("i2pfl", tiny_data, out=out, engine="loop", **SHORT)
    for at in (1, 2, 3):
        with pytest.MonkeyPatch.context() as monkeypatch:
            Fuse(monkeypatch, at, False)
            with pytest.raises(Killed):
                protofed.run(out=out, resume=True, engine="loop")
    resumed_equals(out, expected)


def test_half_a_line_is_forgotten(short: tuple[dict[str, Any], int], tiny_data: str, tmp_path: Path) -> None:
    """Killed while a line of rounds.jsonl was being written, and while clients were proposing."""
    expected, _ = short
    out = tmp_path / "run"

    class Stop:
        def round_end(self, run: Any, record: Any) -> None:
            if record["round"] == 2:
                raise Killed

    with pytest.raises(Killed):
        protofed.run("i2pfl", tiny_data, out=out, engine="loop", callbacks=[Stop()], **SHORT)
    with (out / "rounds.jsonl").open("ab") as file:
        file.write(b'{"round": 3, "participants": ["a-')
    (out / "clients/a-0.round-2").write_bytes(b"half a sta")
    (out / "clients/b-0.round-2.123.tmp").write_bytes(b"")
    resumed_equals(out, expected)


def test_a_damaged_checkpoint_is_refused_by_name(tiny_data: str, tmp_path: Path) -> None:
    out = tmp_path / "run"

    class Stop:
        def round_end(self, run: Any, record: Any) -> None:
            raise Killed

    with pytest.raises(Killed):
        protofed.run("i2pfl", tiny_data, out=out, engine="loop", callbacks=[Stop()], **SHORT)
    (state,) = (out / "checkpoint").glob("server-*.safetensors")
    damaged = bytearray(state.read_bytes())
    damaged[-1] ^= 1
    state.write_bytes(damaged)
    with pytest.raises(Exception, match="checkpoint: the message is corrupted"):
        protofed.run(out=out, resume=True, engine="loop")


def test_resuming_on_another_engine(short: tuple[dict[str, Any], int], tiny_data: str, tmp_path: Path) -> None:
    expected, _ = short
    out = tmp_path / "run"

    class Stop:
        def round_end(self, run: Any, record: Any) -> None:
            raise Killed

    with pytest.raises(Killed):
        protofed.run("i2pfl", tiny_data, out=out, engine="workers", workers=2, callbacks=[Stop()], **SHORT)
    resumed_equals(out, expected)


def test_a_run_killed_before_it_began_can_be_started_again(tmp_path: Path, tiny_data: str) -> None:
    (tmp_path / "run" / "clients").mkdir(parents=True)
    (tmp_path / "run" / "checkpoint").mkdir()
    (tmp_path / "run" / ".lock").touch()
    options = {"model": "mlp", "rounds": 1, "engine": "loop", "out": tmp_path / "run"}
    assert protofed.run("fedavg", tiny_data, **options).complete

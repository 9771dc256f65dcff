"""Damage, a full disk, a place that cannot be written: one line that says so, and never a traceback."""

import csv
import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

import protofed
from protofed.cli import main
from protofed.federation import folder as folder_module
from protofed.inference.predict import _as_text
from protofed.testing import toy_data


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("finished")
    data = toy_data(place / "data", ["a", "b"])
    return protofed.run(
        "fedavg", data, out=place / "run", model="mlp", rounds=2, engine="loop", set={"model.hidden": 4}
    ).path


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def emptied(name: str) -> Callable[[Path], None]:
    return lambda run: (run / name).write_text("{}\n" * (2 if name.endswith("jsonl") else 1)) and None


def changed(**entries: Any) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        content = json.loads((run / "run.json").read_text())
        (run / "run.json").write_text(json.dumps({**content, **entries}))

    return change


def cut(name: str) -> Callable[[Path], None]:
    return lambda run: (run / name).write_bytes((run / name).read_bytes()[:-9]) and None


def unfinished(damage: Callable[[Path], None]) -> Callable[[Path], None]:
    def change(run: Path) -> None:
        (run / "summary.json").unlink()
        damage(run)

    return change


def rounds_begin_empty(run: Path) -> None:
    """As long as before: the manifest knows the length."""
    lines = (run / "rounds.jsonl").read_bytes().split(b"\n")
    lines[0] = b"{}".ljust(len(lines[0]))
    (run / "rounds.jsonl").write_bytes(b"\n".join(lines))


CASES: dict[str, tuple[list[str], Callable[[Path], None]]] = {
    "resume, a line": (["run", "--resume", "--out", "RUN"], unfinished(rounds_begin_empty)),
    "resume, engine": (["run", "--resume", "--out", "RUN"], unfinished(changed(engine=[]))),
    "resume, run.json": (["run", "--resume", "--out", "RUN"], unfinished(emptied("run.json"))),
    "report, run.json": (["report", "RUN"], emptied("run.json")),
    "report, rounds.jsonl": (["report", "RUN"], emptied("rounds.jsonl")),
    "report, summary.json": (["report", "RUN"], emptied("summary.json")),
    "report, partition": (["report", "RUN"], changed(partition=[])),
    "evaluate, broadcast": (["evaluate", "RUN", "--data", "DATA"], cut("broadcast.safetensors")),
    "report, nowhere": (["report", "RUN", "--out", "/dev/null/page.html"], lambda _: None),
}


@pytest.mark.parametrize("case", CASES)
def test_damage_is_told_in_one_line(case: str, run: Path, finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, damage = CASES[case]
    damage(run)
    names = {"RUN": str(run), "DATA": str(finished.parent / "data")}
    assert main([names.get(word, word) for word in words]) == 2
    told = capsys.readouterr().err
    assert told.startswith("error: ")
    assert told.count("\n") == 1


def test_an_empty_comparison_is_told_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "comparison.json").write_text("{}")
    assert main(["report", str(tmp_path)]) == 2
    assert "comparison.json is damaged" in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_named(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = str(finished.parent / "data")
    assert main(["run", "fedavg", "--data", data, "--model", "mlp", "--rounds", "1", "--out", "/dev/null/run"]) == 2
    told = capsys.readouterr().err
    assert "/dev/null/run" in told
    assert told.count("\n") == 1


def test_a_full_disk_is_told_and_the_run_goes_on_afterwards(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write, left = folder_module.write_atomically, 5

    def fills_up(path: Path, content: bytes) -> None:
        nonlocal left
        left -= 1
        if not left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write(path, content)

    words = ["run", "fedavg", "--data", str(finished.parent / "data"), "--model", "mlp", "--rounds", "2"]
    words += ["--engine", "loop", "--set", "model.hidden=4", "--quiet", "--out", str(tmp_path / "run")]
    with monkeypatch.context() as patch:
        patch.setattr(folder_module, "write_atomically", fills_up)
        assert main(words) == 2
    told = capsys.readouterr().err
    assert "no space left on device; make room" in told
    assert "--resume" in told
    assert told.count("\n") == 1
    assert main(["run", "--resume", "--quiet", "--out", str(tmp_path / "run")]) == 0
    assert (tmp_path / "run/model.safetensors").read_bytes() == (finished / "model.safetensors").read_bytes()


@pytest.mark.parametrize("name", ["=1+1.png", "+1.png", "-1.png", "@sum.png"])
def test_no_name_is_a_formula(name: str, finished: Path, tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    Image.new("L", (8, 8)).save(tmp_path / "images" / name)
    assert main(["predict", str(finished), "--images", str(tmp_path / "images"), "--out", str(tmp_path / "p.csv")]) == 0
    _, row = csv.reader((tmp_path / "p.csv").open())
    assert row[0] == f"'{name}"
    assert _as_text("plain-name.png") == "plain-name.png"

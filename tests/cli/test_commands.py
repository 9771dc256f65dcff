"""The commands as a user types them: exit codes, one error line, nothing left behind."""

import io
import json
import logging
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from protofed.cli import completion, main
from protofed.cli.app import app

TINY = ["--model", "mlp", "--samples-per-client", "40", "--rounds", "2", "--engine", "loop"]


@dataclass
class Done:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def protofed(tmp_path, monkeypatch, capfd):
    """The command in a folder of its own; in this process, because starting one costs seconds."""
    monkeypatch.chdir(tmp_path)

    def command(*words, check=None):
        capfd.readouterr()
        code = main([str(word) for word in words])
        done = Done(code, *capfd.readouterr())
        assert check is None or code == check, done.stderr
        return done

    yield command
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def write_npz(folder: Path, **changes):
    rng = np.random.default_rng(0)
    arrays = {
        "x_train": rng.integers(0, 255, (12, 8, 8, 1), dtype=np.uint8),
        "y_train": np.arange(12) % 3,
        "x_test": rng.integers(0, 255, (6, 8, 8, 1), dtype=np.uint8),
        "y_test": np.arange(6) % 3,
    }
    folder.mkdir(exist_ok=True)
    np.savez(folder / "site.npz", **{**arrays, **changes})
    return folder


def broken_png(folder: Path):
    for part in ("train", "test"):
        for label in ("a", "b"):
            place = folder / "site" / part / label
            place.mkdir(parents=True)
            Image.fromarray(np.zeros((8, 8), np.uint8)).save(place / "0.png")
    whole = (folder / "site" / "train" / "a" / "0.png").read_bytes()
    (folder / "site" / "train" / "a" / "0.png").write_bytes(whole[: len(whole) // 2])
    return folder


OPTIONS = {
    "method": ["nosuch"],
    "data": ["--data", "nowhere"],
    "value of a knob": ["--set", "tau=abc"],
    "knob": ["--set", "nosuch=1"],
    "too many clients": ["--clients", "mnist=900"],
    "option": ["--nosuch", "1"],
    "number": ["--rounds", "many"],
    "range": ["--participation", "1.5"],
    "choice": ["--optimizer", "sdg"],
    "engine": ["--engine", "lop"],
    "model": ["--model", "resnet11"],
    "model option": ["--set", "model.width=3"],
    "data option": ["--set", "data.augment=flop"],
    "preset": ["--preset", "nosuch"],
    "plan": ["--plan", "3,x"],
    "weights": ["--weights", "nowhere.pth"],
    "plugin": ["--plugin", "nowhere.py"],
    "from": ["--from", "nowhere.json"],
    "resume": ["--resume"],
    "device": ["--device", "meta"],
    "mixed architectures": ["fedavg", "--model", "mlp,lenet5"],
}
DATA = {
    "nan": lambda folder: write_npz(folder, x_train=np.full((12, 8, 8, 1), np.nan, np.float32)),
    "label": lambda folder: write_npz(folder, y_train=np.arange(12) - 1),
    "label beyond classes": lambda folder: write_npz(folder, classes=np.array(["a", "b"])),
    "empty folder": lambda folder: folder.mkdir(),
    "truncated png": lambda folder: broken_png(folder),
}


@pytest.mark.parametrize("mistake", [*OPTIONS, *DATA])
def test_a_mistake_ends_with_one_line(mistake, protofed, tmp_path):
    if mistake in DATA:
        DATA[mistake](tmp_path / "data")
    done = protofed("run", *OPTIONS.get(mistake, ["--data", "data"]), "--out", tmp_path / "run")
    assert done.returncode == 2
    lines = done.stderr.strip().splitlines()
    assert lines[-1].startswith("error: ")
    assert all(line.startswith("warning: ") for line in lines[:-1])
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert not (tmp_path / "run").exists()


def test_a_run_from_the_command_line(protofed, tmp_path):
    done = protofed("run", "fedavg", *TINY, "--set", "model.hidden=16", "--out", "first", check=0)
    assert "round 2/2" in done.stdout
    assert "average" in done.stdout
    names = {path.name for path in (tmp_path / "first").iterdir()}
    assert names >= {
        "run.json", "rounds.jsonl", "summary.json", "model.safetensors", "broadcast.safetensors", "partition.npz",
        "clients", "checkpoint",
    }  # fmt: skip

    again = protofed("run", "--from", "first/run.json", "--out", "second", "--json", check=0)
    summary = json.loads(again.stdout)
    assert summary["status"] == "complete"
    for name in ("model.safetensors", "partition.npz", "run.json"):
        assert (tmp_path / "first" / name).read_bytes() == (tmp_path / "second" / name).read_bytes()

    protofed("run", "--from", "first/run.json", "--set", "weighting=uniform", "--out", "third", "--quiet", check=0)
    first, third = (json.loads((tmp_path / name / "run.json").read_text())["options"] for name in ("first", "third"))
    assert third == {**first, "set": {**first["set"], "weighting": "uniform"}}

    taken = protofed("run", "fedavg", *TINY, "--out", "first", check=2)
    assert "already exists" in taken.stderr
    changed = protofed("run", "--out", "first", "--resume", "--lr", "0.5", check=2)
    assert "lr (was 0.01, now 0.5)" in changed.stderr
    quiet = protofed("run", "--out", "first", "--resume", "--quiet", check=0)
    assert quiet.stdout == ""


def test_without_out_a_run_says_where_it_goes(protofed, tmp_path):
    done = protofed("run", "fedavg", *TINY, check=0)
    assert "written to runs/fedavg-digits-seed0" in done.stdout
    assert (tmp_path / "runs" / "fedavg-digits-seed0" / "summary.json").exists()


def test_a_plugin_brings_a_method(protofed, tmp_path):
    (tmp_path / "mine.py").write_text(
        "from protofed import register\n"
        "from protofed.methods.fedavg import FedAvg\n"
        "@register('mine')\n"
        "class Mine(FedAvg):\n"
        "    '''FedAvg under another name.'''\n"
    )
    for words in (["mine", "--plugin", "mine.py"], ["mine.py:Mine"]):
        out = f"run-{len(words)}"
        protofed("run", *words, *TINY, "--out", out, "--quiet", check=0)
        assert json.loads((tmp_path / out / "summary.json").read_text())["method"] == words[0]
    listed = protofed("methods", "--plugin", "mine.py", "--json", check=0)
    assert "mine" in [entry["name"] for entry in json.loads(listed.stdout)]


def test_compare_from_the_command_line(protofed, tmp_path):
    words = ["compare", "fedavg", "fedproto", *TINY, "--seeds", "0,1", "--out", "cmp", "--set", "fedproto.lam=0.5"]
    done = protofed(*words, check=0)
    assert "global view" in done.stdout
    assert "personal view" in done.stdout
    content = json.loads((tmp_path / "cmp" / "comparison.json").read_text())
    assert content["methods"]["fedproto"]["global"] is None
    assert len(content["methods"]["fedavg"]["global"]["average"]["seeds"]) == 2
    assert content["methods"]["fedproto"]["personal"]["test"]["p_holm"] <= 1
    again = protofed(*words, check=0)
    assert "round 1/2" not in again.stdout, "finished runs are not repeated"
    assert "none of the methods" in protofed(*words, "--set", "nosuch=1", check=2).stderr


def test_lists(protofed):
    methods = json.loads(protofed("methods", "--json", check=0).stdout)
    assert {"fedavg", "fedproto", "fedproto_avg", "conffedproto", "i2pfl"} <= {entry["name"] for entry in methods}
    assert all(entry["paper"] and entry["summary"] and entry["sends_up"] for entry in methods)
    assert "tau" in protofed("methods", "i2pfl", check=0).stdout
    assert "did you mean i2pfl" in protofed("methods", "i2pf", check=2).stderr
    models = json.loads(protofed("models", "--json", check=0).stdout)
    assert {"lenet5", "cnn", "resnet10", "resnet18", "resnet50", "mlp"} <= {entry["name"] for entry in models}
    assert "width" in protofed("models", "resnet10", check=0).stdout
    assert "digits" in protofed("data", check=0).stdout
    assert "syn_generated" in protofed("data", "digits", check=0).stdout


def test_alone_it_says_what_to_do_next(protofed, tmp_path):
    said = protofed(check=0).stdout
    commands = [line.split()[1:] for line in said.splitlines() if line.startswith("  protofed ")]
    assert [words[0] for words in commands] == ["run", "compare", "data", "methods"]
    (tmp_path / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "runs" / "mine" / "run.json").touch()
    assert "protofed run --resume --out runs/mine" in protofed(check=0).stdout
    (tmp_path / "runs" / "mine" / "summary.json").touch()
    assert "protofed report runs/mine" in protofed(check=0).stdout


def test_every_command_has_an_example_that_names_it(protofed):
    for command in app.registered_commands:
        said = protofed(command.name, "--help", check=0).stdout
        assert f"Example: protofed {command.name}" in said


def test_near_misses_are_suggested(protofed):
    assert "'compare'" in protofed("comapre", check=2).stderr
    assert "'--rounds'" in protofed("run", "--roundz", "3", check=2).stderr
    assert "did you mean lenet5" in protofed("run", "--model", "lenet", check=2).stderr


def test_logging_is_afterwards_as_it_was(monkeypatch, capsys):
    """`main` may be part of a program that has its own handlers, and whose standard error is another one later."""
    handlers, level = list(logging.root.handlers), logging.root.level
    with monkeypatch.context() as patched, io.StringIO() as stream:
        patched.setattr(sys, "stderr", stream)
        assert main(["methods"]) == 0
        assert main(["run", "nosuch"]) == 2
        assert "unknown method" in stream.getvalue()
    logging.getLogger("protofed").warning("later")
    assert "Logging error" not in capsys.readouterr().err
    assert (logging.root.handlers, logging.root.level) == (handlers, level)


def test_a_shell_completes_names():
    words = "protofed run --model resnet5"
    asked = {"_PROTOFED_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    script = "import sys; sys.argv = ['protofed']; from protofed.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", script], env={**os.environ, **asked}, capture_output=True, text=True)
    assert done.stdout.split() == ["resnet50"]
    assert completion.methods("i2") == ["i2pfl"]
    assert completion.data("dig") == ["digits"]
    assert "i2pfl.table2" in completion.tables("i2pfl.")


def test_the_installed_command_is_a_process_of_its_own(tmp_path):
    words = [sys.executable, "-m", "protofed", "run", "nosuch"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert done.stderr.startswith("error: unknown method 'nosuch'")
    assert done.stderr.count("\n") == 1


def test_a_group_without_a_command_shows_its_help_and_no_empty_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["deploy"]) == 2
    shown = capsys.readouterr()
    assert "site" in shown.out
    assert "error" not in shown.err

"""Options as a TOML file: written, read again, and joined with the command line."""

import json
import signal
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import protofed
from protofed import UserError
from protofed.cli import main
from protofed.runs.config_file import config_text, read_config
from protofed.runs.options import Options, make_options

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
NAMES = st.text("abcdefghijk_.", min_size=1, max_size=8)
OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "method": st.sampled_from(["fedavg", "i2pfl", "protoridge", "./my file.py:Mine"]),
        "data": TEXT,
        "domains": TEXT,
        "labels": TEXT.filter(lambda text: not Path(text.replace("\0", "")).is_file() and "\0" not in text),
        "balanced": st.booleans(),
        "rounds": st.integers(1, 10**9),
        "plan": st.lists(st.integers(1, 99), min_size=1, max_size=4),
        "lr": st.floats(1e-9, 1e9),
        "momentum": st.floats(0, 0.999),
        "weight_decay": st.floats(0, 1),
        "participation": st.floats(0.001, 1),
        "optimizer": st.sampled_from(["sgd", "adam"]),
        "guard": TEXT,
        "seed": st.integers(-(2**31), 2**31),
        "snapshot_rounds": st.lists(st.integers(0, 9), min_size=1, max_size=3),
        "plugin": st.lists(TEXT, max_size=2),
        "set": st.dictionaries(NAMES, st.one_of(TEXT, st.integers(), st.floats(allow_nan=False), st.booleans())),
    },
)


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Any]:
    monkeypatch.chdir(tmp_path)

    def call(*words: object) -> tuple[int, str, str]:
        capfd.readouterr()
        code = main([str(word) for word in words])
        return code, *capfd.readouterr()

    yield call
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


@given(OPTIONS)
def test_what_is_written_is_read_again(tmp_path_factory: pytest.TempPathFactory, given_options: dict[str, Any]) -> None:
    options = make_options(given_options)
    path = tmp_path_factory.mktemp("config") / "config.toml"
    path.write_bytes(config_text(options.model_dump()).encode())
    assert make_options(read_config(path)) == options


def test_every_option_is_named_once_and_explained() -> None:
    text = config_text(Options().model_dump())
    for name, field in Options.model_fields.items():
        if name != "set":
            assert [line for line in text.splitlines() if line.lstrip("# ").startswith(f"{name} =")], name
            assert f"# {field.description}\n" in text


def test_a_written_option_survives_though_it_is_the_default(tmp_path: Path) -> None:
    """Some methods have a rate of their own: `lr` at the default of all runs must not fall back to theirs."""
    assert make_options({"method": "fedadapterproto"}).lr != 0.01
    for method in ("i2pfl", "fedadapterproto"):
        options = make_options({"method": method, "lr": 0.01, "optimizer": "sgd"})
        (tmp_path / "config.toml").write_text(config_text(options.model_dump()))
        assert make_options(read_config(tmp_path / "config.toml")).lr == 0.01


def test_forms_that_people_write(tmp_path: Path) -> None:
    path = tmp_path / "study.toml"
    path.write_text(
        'method = "i2pfl"  # ours\nsamples-per-client = 40\nplan = [3, 6]\nclients = {mnist = 2}\n'
        '[set]\ntau = 0.1\n"data.holdout" = 0.2\n[set.model]\nhidden = 16\n'
    )
    options = make_options(read_config(path))
    assert (options.samples_per_client, options.plan, options.clients) == ("40", "3,6", "mnist=2")
    assert options.set == {"tau": "0.1", "data.holdout": "0.2", "model.hidden": "16"}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("round = 3", "did you mean rounds?"),
        ("rounds = ", "not valid TOML"),
        ("set = 3", "a table"),
        ('samples_per_clients = "4"', "did you mean samples_per_client?"),
    ],
)
def test_mistakes_name_the_file(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "study.toml"
    path.write_text(content)
    with pytest.raises(UserError) as refused:
        read_config(path)
    assert str(path) in str(refused.value)
    assert said in str(refused.value)


def test_a_missing_file_is_one_line(command: Callable[..., tuple[int, str, str]]) -> None:
    code, _, error = command("run", "--config", "nowhere.toml")
    assert code == 2
    assert error.strip() == "error: the configuration nowhere.toml cannot be read: No such file or directory"


def test_runs_from_files(command: Callable[..., tuple[int, str, str]], tiny_data: str, same_results: Any) -> None:
    study = Path("study.toml")
    study.write_text(
        f'method = "fedavg"\ndata = {json.dumps(tiny_data)}\nmodel = "mlp"\nrounds = 2\nbatch = 8\nengine = "loop"\n'
        'out = "first"\nlr = 0.02\n[set.model]\nhidden = 16\n'
    )
    assert command("run", "--config", study, "--quiet")[0] == 0
    first = protofed.Run("first").config["options"]
    assert (first["rounds"], first["set"], first["lr"]) == (2, {"model.hidden": "16"}, 0.02)
    # The command line wins, setting by setting.
    words = ("run", "--config", study, "--rounds", 1, "--set", "data.holdout=0.1", "--out", "second", "--quiet")
    assert command(*words)[0] == 0
    second = protofed.Run("second").config["options"]
    assert (second["rounds"], second["set"]) == (1, {"model.hidden": "16", "data.holdout": "0.1"})
    # A run's own file gives the same run, and so does what `config` prints.
    assert command("run", "--config", "first/config.toml", "--out", "again", "--quiet")[0] == 0
    same_results("first", "again")
    code, printed, _ = command("config", "first")
    assert code == 0
    assert printed == Path("first/config.toml").read_text()
    assert tomllib.loads(printed)["method"] == "fedavg"


def test_comparisons_from_files(command: Callable[..., tuple[int, str, str]], tiny_data: str) -> None:
    Path("study.toml").write_text(
        f'methods = ["fedavg", "fedprox"]\nseeds = [0, 1]\ndata = {json.dumps(tiny_data)}\nmodel = "mlp"\n'
        'rounds = 1\nbatch = 8\nengine = "loop"\n'
    )
    assert command("compare", "--config", "study.toml", "--out", "pair", "--quiet")[0] == 0
    content = json.loads(Path("pair/comparison.json").read_text())
    assert (sorted(content["methods"]), content["seeds"]) == (["fedavg", "fedprox"], [0, 1])
    code, _, error = command("compare", "--out", "none")
    assert code == 2
    assert "name the methods to compare" in error


def test_what_a_command_decides_itself_is_left_out_and_said(
    command: Callable[..., tuple[int, str, str]], tiny_data: str
) -> None:
    Path("run.toml").write_text(
        f'method = "fedprox"\nseed = 3\ndata = {json.dumps(tiny_data)}\nmodel = "mlp"\nrounds = 1\n'
    )
    code, _, said = command("compare", "fedavg", "--config", "run.toml", "--out", "one", "--quiet", "--engine", "loop")
    assert (code, protofed.Comparison.read("one").content["seeds"]) == (0, [0])
    assert "run.toml: method, seed: not an option of this command" in said

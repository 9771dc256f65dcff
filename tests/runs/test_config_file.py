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
from protofed.runs.config_comments import END, Comment, comments_in
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


def test_a_plugin_that_no_file_can_be_is_an_option_like_others() -> None:
    assert make_options({"plugin": ["\0"]}).plugin == ["\0"]


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
    assert "run.toml: method, seed is not an option of this command and was ignored" in said


STUDY = """\
# The study of the spring.
# Asked for by the board.

method = "fedavg"  # the yardstick
rounds = 2

# Small, for # is no comment in "# 8":
batch = 8 # images
note = "see #12"
plugin = [
  # none yet
]
out = "first"  # is no option of a run

[set.model]
# The first guess was 32.
hidden = 16 # units

# Ask again in June.
"""


def test_comments_are_where_they_were() -> None:
    found = comments_in(STUDY)
    assert found["method"] == Comment(
        ("# The study of the spring.", "# Asked for by the board.", ""), "# the yardstick"
    )
    assert found["batch"] == Comment(('# Small, for # is no comment in "# 8":',), "# images")
    assert found["note"] == Comment()
    assert found["plugin"] == Comment(("# none yet",), "")
    assert found["set.model.hidden"] == Comment(("# The first guess was 32.",), "# units")
    assert found[END] == Comment(("# Ask again in June.",))
    assert list(found)[:3] == ["method", "rounds", "batch"]


@pytest.mark.parametrize(
    ("text", "name", "comment"),
    [
        ("samples-per-client = 4 # few", "samples_per_client", Comment((), "# few")),
        ("data = 'a # b' # c", "data", Comment((), "# c")),
        ('data = """a\n# b\n""" # c', "data", Comment((), "# c")),
        ("clients = {mnist = 2} # two", "clients", Comment((), "# two")),
        ('set."data.holdout" = 0.1 # kept', "set.data.holdout", Comment((), "# kept")),
        ('set = {tau = 1, "data.holdout" = 0.1} # both', "set", Comment((), "# both")),
        ("# a\r\nlr = 1 # b\r\n", "lr", Comment(("# a",), "# b")),
        ("plan = [1, # one\n 2] # two", "plan", Comment(("# one",), "# two")),
    ],
)
def test_forms_of_comments(text: str, name: str, comment: Comment) -> None:
    assert comments_in(text) == {name: comment}


def test_our_own_comments_are_not_taken_for_theirs() -> None:
    """Whoever edits what `protofed config` prints gets it back as it was, with what they wrote."""
    options = make_options({"method": "i2pfl", "set": {"tau": "0.1"}}).model_dump()
    text = config_text(options)
    assert config_text(options, text) == text
    edited = text.replace("tau = 0.1", "# chosen by hand\ntau = 0.1  # sharp") + "# the end\n"
    again = config_text(options, edited)
    assert again.count("\n") == text.count("\n") + 3
    assert "# chosen by hand\ntau = 0.1  # sharp\n" in again
    assert again.endswith("\n# the end\n")


@given(OPTIONS)
def test_comments_change_no_value(tmp_path_factory: pytest.TempPathFactory, given_options: dict[str, Any]) -> None:
    options = make_options(given_options)
    path = tmp_path_factory.mktemp("config") / "config.toml"
    path.write_bytes(config_text(options.model_dump(), STUDY.replace("[set.model]", "[set]")).encode())
    assert make_options(read_config(path)) == options


def test_a_run_keeps_the_comments_of_its_file(command: Callable[..., tuple[int, str, str]], tiny_data: str) -> None:
    text = f"data = {json.dumps(tiny_data)}\nmodel = 'mlp'\nengine = 'loop' # here\n" + STUDY
    Path("study.toml").write_text(text.replace('note = "see #12"\n', ""))
    assert command("run", "--config", "study.toml", "--rounds", 1, "--quiet")[0] == 0
    assert Path("first/given.toml").read_text() == Path("study.toml").read_text()
    written = Path("first/config.toml").read_text()
    assert "# Asked for by the board.\n" in written
    assert 'method = "fedavg"  # the yardstick\nrounds' not in written, "each has its meaning above it"
    assert "batch = 8  # images\n" in written
    assert "rounds = 1\n" in written, "the value in force"
    assert '# The first guess was 32.\n"model.hidden" = 16  # units\n' in written
    assert command("config", "first")[1] == written
    # More rounds later: the comments stay, and the value is that in force.
    assert command("run", "--resume", "--out", "first", "--rounds", 2, "--quiet")[0] == 0
    assert command("config", "first")[1] == written.replace("rounds = 1\n", "rounds = 2\n")
    assert Path("first/config.toml").read_text() == command("config", "first")[1]

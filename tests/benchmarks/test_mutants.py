"""The runner of `make mutants`, on a package of two functions; of ours see benchmarks/results/mutants.md."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SOURCE = """
def double(x):
    return 2 * x


def down(x):
    while x > 0:
        x -= 1
    return x
"""
TESTS = """
import sums


def test_double():
    assert sums.double(2) == 4


def test_down():
    assert sums.down(3) == 0
"""
MUTANT = """
[[mutant]]
what = "{what}"
file = "__init__.py"
old = "{old}"
new = "{new}"
tests = ["test_sums.py"]
"""
KILLED = MUTANT.format(what="three for two", old="2 * x", new="3 * x")
SURVIVES = MUTANT.format(what="a sum for a product", old="2 * x", new="2 + x")
ENDLESS = MUTANT.format(what="up for down", old="x -= 1", new="x += 1")


@pytest.fixture
def run(tmp_path: Path):
    """The runner with these entries; its exit status and what it has said."""
    package, tests, entries = tmp_path / "src" / "sums", tmp_path / "tests", tmp_path / "entries"
    for folder in (package, tests, entries):
        folder.mkdir(parents=True)
    (package / "__init__.py").write_text(SOURCE)
    (tests / "test_sums.py").write_text(TESTS)

    def go(text: str, *options: str) -> tuple[int, str]:
        (entries / "all.toml").write_text(text)
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        places = ["--package", str(package), "--tests", str(tests), "--entries", str(entries)]
        command = [sys.executable, "-m", "mutants", *places, "--spare", "1", "--load", *options]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
        return done.returncode, done.stdout + done.stderr

    return go


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """The exit status and the words for such outcomes by name; names with a reason to survive have it given."""
    monkeypatch.syspath_prepend(str(ROOT))
    entries, trial, runner = (importlib.import_module(f"mutants.{name}") for name in ("entries", "trial", "__main__"))

    def verdict(outcomes: dict[str, tuple], **reasons: str) -> tuple[int, str]:
        results = {
            entries.Mutant(name, f"{name}.py", "", "", (), reasons.get(name, "")): trial.Outcome(*outcome)
            for name, outcome in outcomes.items()
        }
        return runner.judge(results), capsys.readouterr().out.strip()

    return verdict


def test_killed_and_survivors(run) -> None:
    status, said = run(KILLED + SURVIVES + ENDLESS, "--workers", "2")
    assert "three for two: killed by test_sums.py::test_double" in said
    assert "a sum for a product: survived" in said
    assert "up for down: killed by the clock" in said
    assert "killed 2 of 3" in said
    assert status == 1


def test_verdicts(judged) -> None:
    killed, survived = (False, "test_it", "assert 4 == 6"), (True,)
    assert judged({"a": killed}) == (0, "killed 1 of 1")
    assert judged({"a": survived}) == (1, "survived: a.py: a\nkilled 0 of 1")
    few = {f"{number}": killed for number in range(19)}
    assert judged({**few, "x": survived}, x="nobody can tell")[0] == 0  # 95 %
    assert judged({**few, "x": survived})[0] == 1
    assert judged({"a": killed, "x": survived}, x="nobody can tell")[0] == 1
    assert "needs no reason: x" in judged({"x": killed}, x="nobody can tell")[1]
    assert judged({"x": killed}, x="nobody can tell")[0] == 2
    for nonsense in ((False, "test_it", "NameError: y"), (False, "", "the process ended with 1")):
        status, said = judged({"a": killed, "x": nonsense})
        assert status == 2
        assert said.startswith("shows nothing: x: ")
        assert said.endswith("killed 1 of 2")


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (MUTANT.format(what="too vague", old="return", new="yield"), "occurs 2 times"),
        (MUTANT.format(what="no Python", old="2 * x", new="2 *"), "is no Python any more"),
        (KILLED + KILLED, "more than one entry is called three for two"),
        (KILLED.replace("test_sums.py", "test_none.py"), "there is no test_none.py"),
    ],
)
def test_entries_that_have_to_be_mended(entry: str, reason: str, run) -> None:
    status, said = run(entry)
    assert status == 2
    assert reason in said


def test_tests_have_to_pass_without_a_mutant(run, tmp_path: Path) -> None:
    (tmp_path / "tests" / "test_sums.py").write_text(TESTS.replace("== 4", "== 5"))
    status, said = run(KILLED)
    assert status == 2
    assert "fails without a mutant: tests/test_sums.py::test_double" in said


def test_every_entry_of_ours_fits_the_source() -> None:
    done = subprocess.run([sys.executable, "-m", "mutants", "--list"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[-2]) >= 120

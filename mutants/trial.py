"""Tests against a copy of the package, in a child that is forked from a process in which torch is loaded already."""

import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pytest

K = TypeVar("K")

_PAUSE = 0.02
_MEANINGLESS = ("NameError", "ImportError", "ModuleNotFoundError", "SyntaxError")
"""A mutant that ends so is not a mistake anybody would have committed."""


@dataclass(frozen=True)
class Outcome:
    """What became of one run of tests."""

    passed: bool
    killer: str = ""
    """The test that failed first."""
    message: str = ""
    seconds: float = 0.0

    @property
    def reason(self) -> str:
        """The first line of the message."""
        return self.message.partition("\n")[0][:120]

    @property
    def meaningless(self) -> bool:
        """Whether the code did not get as far as being wrong."""
        return not self.killer or self.message.startswith(_MEANINGLESS)


class Trial(NamedTuple):
    """Tests to be run, with another text for one file (none: with the package as it is)."""

    tests: tuple[str, ...]
    limit: float
    """Seconds after which they have failed."""
    file: str = ""
    text: str = ""


@dataclass
class _FirstFailure:
    """A plugin of pytest that remembers the first test that failed, and why."""

    killer: str = ""
    message: str = ""
    ran: int = 0

    def pytest_runtest_logreport(self, report: Any) -> None:
        self.ran += report.when == "call"
        if report.failed and not self.killer:
            crash = getattr(report.longrepr, "reprcrash", None)
            self.killer, self.message = report.nodeid, str(crash.message if crash else report.longrepr)


@dataclass
class Workbench:
    """A copy of the source in a temporary folder, in which one file at a time is changed."""

    source: Path
    """The folder that holds the package."""
    root: Path
    """The folder that tests run in."""
    folder: Path
    _child: int = 0
    _started: float = 0.0
    _limit: float = 0.0
    _changed: list[tuple[Path, bytes, os.stat_result]] = field(default_factory=list)

    def __post_init__(self) -> None:
        # With the times of the files, so that their compiled forms are used.
        shutil.copytree(self.source, self.copy)

    @property
    def copy(self) -> Path:
        """Where the copy is."""
        return self.folder / "src"

    @property
    def busy(self) -> bool:
        """Whether tests are running."""
        return self._child > 0

    def start(self, trial: Trial) -> None:
        """Start the tests of a trial."""
        if trial.file:
            path = self.copy / trial.file
            self._changed.append((path, path.read_bytes(), path.stat()))
            path.write_text(trial.text)
        self._result.unlink(missing_ok=True)
        self._started, self._limit = time.monotonic(), trial.limit
        self._child = os.fork()
        if self._child == 0:
            self._run(trial.tests)

    def outcome(self) -> Outcome | None:
        """What became of the tests; None while they run."""
        seconds = time.monotonic() - self._started
        ended, status = os.waitpid(self._child, os.WNOHANG)
        if not ended and seconds < self._limit:
            return None
        self.stop()
        if not ended:
            return Outcome(False, "the clock", f"not done after {self._limit:.0f} s", seconds)
        if not self._result.exists():
            return Outcome(False, "", f"the process ended with {os.waitstatus_to_exitcode(status)}", seconds)
        return Outcome(**json.loads(self._result.read_text()), seconds=seconds)

    def stop(self) -> None:
        """End the tests, with whatever they have started, and put the file back."""
        if self._child:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._child, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self._child, 0)
            self._child = 0
        for path, content, was in self._changed:
            path.write_bytes(content)
            os.utime(path, ns=(was.st_atime_ns, was.st_mtime_ns))
        self._changed.clear()

    @property
    def _result(self) -> Path:
        return self.folder / "result.json"

    def _run(self, tests: Sequence[str]) -> None:
        """In the child, which does not come back."""
        try:
            os.setpgid(0, 0)
            log = os.open(self.folder / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            # Nothing is written beside the tests: no compiled files, no examples that failed.
            sys.dont_write_bytecode = True
            os.environ |= {
                "PYTHONPATH": str(self.copy),
                "PYTHONDONTWRITEBYTECODE": "1",
                "HYPOTHESIS_STORAGE_DIRECTORY": str(self.folder / "hypothesis"),
            }
            sys.path.insert(0, str(self.copy))
            os.chdir(self.root)
            first = _FirstFailure()
            options = ["-x", "-q", "-m", "not slow", "-p", "no:cacheprovider", f"--basetemp={self.folder / 'tests'}"]
            code = pytest.main([*options, *self._same_draws(), *tests], plugins=[first])
            outcome = {"passed": code == 0 and first.ran > 0, "killer": first.killer, "message": first.message[:300]}
            self._result.write_text(json.dumps(outcome | self._not_the_copy()))
        finally:
            os._exit(0)

    def _same_draws(self) -> list[str]:
        """Hypothesis draws the same examples every time: what kills a mutant today does so tomorrow."""
        return ["--hypothesis-seed=0"] if "hypothesis" in sys.modules else []

    def _not_the_copy(self) -> dict[str, Any]:
        """Tests that had the package from elsewhere have shown nothing."""
        for package in self.copy.iterdir():
            module = sys.modules.get(package.name)
            if module is not None and not str(module.__file__).startswith(str(self.copy)):
                return {"passed": False, "killer": "", "message": f"{package.name} was imported from elsewhere"}
        return {}


@contextlib.contextmanager
def workbenches(number: int, source: Path, root: Path) -> Iterator[list[Workbench]]:
    """So many copies to work on, which are gone afterwards."""
    with tempfile.TemporaryDirectory(prefix="protofed-mutants-") as temporary:
        made = []
        for position in range(number):
            folder = Path(temporary) / str(position)
            folder.mkdir()
            made.append(Workbench(source, root, folder))
        try:
            yield made
        finally:
            for bench in made:
                bench.stop()


def outcomes(benches: Sequence[Workbench], trials: Iterable[tuple[K, Trial]]) -> Iterator[tuple[K, Outcome]]:
    """Run all trials, one on every bench at a time; in the order in which they end."""
    waiting = iter(trials)
    running: dict[int, K] = {}
    while True:
        for number, bench in enumerate(benches):
            if number in running:
                outcome = bench.outcome()
                if outcome is None:
                    continue
                yield running.pop(number), outcome
            if (following := next(waiting, None)) is not None:
                running[number], trial = following
                bench.start(trial)
        if not running:
            return
        time.sleep(_PAUSE)

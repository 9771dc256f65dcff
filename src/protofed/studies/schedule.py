"""Many runs in one folder, side by side over the cores: finished ones are found again, unfinished ones resumed."""

import json
import logging
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, NamedTuple

from protofed.errors import InUse, UserError
from protofed.federation import RunFolder
from protofed.runs.assembly import assemble
from protofed.runs.estimate import estimate_seconds, refuse_if_too_large
from protofed.runs.extend import MAY_CHANGE
from protofed.runs.opened import Run
from protofed.runs.options import Options, make_options
from protofed.runs.run import run, tell
from protofed.studies.pool import Emit, Ended, run_tasks
from protofed.studies.schema import MissingRun
from protofed.system import CAN_FORK, FileLock, cores, one_thread

log = logging.getLogger("protofed")

_SINGLE_PROCESS_ENGINES = ("loop", "vmap")


@dataclass(frozen=True)
class PlannedRun:
    """One run of many, in a folder named by a hash of what defines it."""

    label: str
    folder: Path
    options: Options

    @cached_property
    def path(self) -> Path:
        """Options at their defaults do not enter the hash, so that one that is added later renames nothing."""
        defining = self.options.model_dump(exclude=MAY_CHANGE, exclude_defaults=True)
        digest = blake2b(json.dumps(defining, sort_keys=True).encode(), digest_size=4).hexdigest()
        return self.folder / f"{Path(self.options.method).stem}-seed{self.options.seed}-{digest}"

    @property
    def title(self) -> str:
        """How people tell it from the others."""
        return f"{self.label}, seed {self.options.seed}"

    @property
    def run(self) -> Run:
        """What is in its folder."""
        return Run(self.path)

    def is_complete(self) -> bool:
        """Whether it is done; a folder of that name with another run in it is refused."""
        if not self.run.complete:
            return False
        stored = make_options(self.run.options).model_dump(exclude=MAY_CHANGE)
        if stored != self.options.model_dump(exclude=MAY_CHANGE):
            raise UserError(f"{self.path} holds a run with other options; remove it or give another --out")
        return True


class Outcome(NamedTuple):
    """How a run ended; `busy`: another process works on it."""

    state: Literal["complete", "busy", "failed"]
    reason: str = ""
    trace: str = ""


class Failure(NamedTuple):
    """A run that was tried and ended with an error."""

    title: str
    reason: str
    trace: str


@dataclass(frozen=True)
class Shard:
    """One of several machines that share the work; each takes every N-th run."""

    number: int = 1
    of: int = 1

    @classmethod
    def parse(cls, text: str | None) -> "Shard":
        """From K/N, where K counts from 1."""
        if text is None:
            return cls()
        try:
            number, of = (int(part) for part in text.split("/"))
        except ValueError:
            raise UserError(f"--shard takes K/N, for example 1/2 and 2/2, not {text!r}") from None
        if not 1 <= number <= of:
            raise UserError(f"--shard {text}: K/N needs a K between 1 and N")
        return cls(number, of)

    def own(self, runs: Sequence[PlannedRun]) -> list[PlannedRun]:
        """Those of the runs, in their order, that fall to this machine."""
        return list(runs[self.number - 1 :: self.of])


@dataclass(frozen=True)
class RunOutcomes:
    """The results of many runs so far; `outcomes` are those of runs without one."""

    runs: tuple[PlannedRun, ...]
    outcomes: Mapping[Path, Outcome]

    def missing(self) -> list[tuple[str, MissingRun]]:
        """Label and description of every run without a result."""
        failed = [run.path for run in self._failed()]
        return [
            (
                run.label,
                {
                    "seed": run.options.seed,
                    "run": run.path.name,
                    "reason": self.outcomes[run.path].reason if run.path in self.outcomes else "not done yet",
                    "failed": run.path in failed,
                },
            )
            for run in self.runs
            if not run.is_complete()
        ]

    def failures(self) -> list[Failure]:
        """The runs that were tried and ended with an error."""
        return [Failure(run.title, *self.outcomes[run.path][1:]) for run in self._failed()]

    def _failed(self) -> list[PlannedRun]:
        return [run for run in self.runs if run.path in self.outcomes and self.outcomes[run.path].state == "failed"]


def run_unfinished(
    runs: Sequence[PlannedRun],
    *,
    validate: Sequence[PlannedRun] = (),
    shard: Shard | None = None,
    callbacks: Sequence[Any] = (),
    after_each: Callable[[RunOutcomes], object] = lambda _outcomes: None,
) -> RunOutcomes:
    """Do the runs that are not complete yet. One that fails is noted and the others go on.

    Those to `validate` are assembled before anything starts, so that a mistake of the user shows at once. Callbacks
    are those of a run, called in this process, and `runs_start(runs, unfinished)`, `runs_estimate(seconds)` and
    `run_failed(run, reason)`. `after_each` is called whenever a run is complete, so that an interruption loses nothing.
    """
    unique = list({run.path: run for run in runs}.values())
    unfinished = [run for run in (shard or Shard()).own(unique) if not run.is_complete()]
    seconds: dict[str, float] = {}
    if unfinished:
        timed = any(hasattr(callback, "runs_estimate") for callback in callbacks)
        seconds = _validate([run for run in validate if not (run.path / "run.json").exists()], timed)
    tell(callbacks, "runs_start", unique, unfinished)
    if seconds and all(run.label in seconds for run in unfinished):
        tell(callbacks, "runs_estimate", sum(seconds[run.label] for run in unfinished) / cores())
    outcomes: dict[Path, Outcome] = {}
    so_far = RunOutcomes(tuple(runs), outcomes)
    logged: set[str] = set()

    def handle(run: PlannedRun, event: str, content: Any) -> None:
        if event == "log":
            level, text = content
            if text not in logged:
                log.log(level, "%s: %s", run.title, text)
            logged.add(text)
        elif event != "outcome":
            tell(callbacks, event, run.run, content)
        elif content.state == "complete":
            tell(callbacks, "run_end", run.run)
            after_each(so_far)
        else:
            outcomes[run.path] = content
            tell(callbacks, "run_failed", run.run, content.reason)

    _run_all(unfinished, handle)
    return so_far


class _Validation(NamedTuple):
    """Result of assembling a run without starting it."""

    label: str
    mistake: str | None = None
    seconds: float | None = None


def _validate(runs: Sequence[PlannedRun], timed: bool) -> dict[str, float]:
    """Assemble without starting; only mistakes of the user count, other trouble belongs to the run it happens in.

    Timed: the seconds that a run of each label will take on one core, where that could be found out.
    """
    if not runs:
        return {}
    # The first one here: data that is kept once loaded is then inherited by every process.
    validated = [_validate_one(runs[0], timed)]
    if CAN_FORK and runs[0].options.device == "cpu":
        tasks = {run.path: partial(_validate_one, run, timed) for run in runs[1:]}
        ends = [ended for _, event, ended in run_tasks(tasks, cores()) if event == "ended"]
        validated += [ended.result for ended in ends if ended.result is not None]
    else:
        validated += [_validate_one(run, timed) for run in runs[1:]]
    for each in validated:
        if each.mistake is not None:
            raise UserError(each.mistake)
    return {each.label: each.seconds for each in validated if each.seconds is not None}


def _validate_one(run: PlannedRun, timed: bool, _emit: Emit | None = None) -> _Validation:
    try:
        with one_thread():
            assembly = assemble(run.options, run.path / "clients")
            refuse_if_too_large(assembly)
            return _Validation(run.label, seconds=estimate_seconds(assembly) if timed else None)
    except UserError as error:
        return _Validation(run.label, str(error))
    except Exception:
        return _Validation(run.label)


def _run_all(runs: Sequence[PlannedRun], handle: Callable[[PlannedRun, str, Any], None]) -> None:
    """Do the runs; their events are handled as they come, each run's last being its outcome."""
    if not CAN_FORK or any(run.options.device != "cpu" for run in runs):
        for run in runs:
            handle(run, "outcome", _do(run, {}, partial(handle, run)))
        return
    if not runs:
        return
    max_workers, overrides = allocate_cores(runs[0].options, len(runs))
    by_path = {run.path: run for run in runs}
    tasks = {path: partial(_do, run, overrides) for path, run in by_path.items()}
    # Closed also when a callback raises: that ends the processes.
    with closing(run_tasks(tasks, max_workers)) as events:
        for path, event, content in events:
            if isinstance(content, Ended):
                died = Outcome("failed", f"its process ended with code {content.exit_code}")
                handle(by_path[path], "outcome", content.result or died)
            else:
                handle(by_path[path], event, content)


def allocate_cores(options: Options, runs: int) -> tuple[int, dict[str, Any]]:
    """How many runs at once, and what to change in their options, so that every core has one process to run."""
    total = cores()
    engine = "workers" if options.engine == "auto" and options.workers else options.engine
    if engine == "auto":
        max_workers = min(runs, total)
        each = total // max_workers
        return max_workers, {"engine": "loop"} if each == 1 else {"engine": "workers", "workers": each}
    processes = 1 if engine in _SINGLE_PROCESS_ENGINES else options.workers or total
    return max(1, min(runs, total // processes)), {}


def _do(planned: PlannedRun, overrides: Mapping[str, Any], emit: Emit) -> Outcome:
    """Begin or continue one run, and say how it ended."""
    try:
        with folder_lock(planned.folder, planned.path.name):
            if planned.is_complete():
                return Outcome("complete")
            begun = (planned.path / "run.json").exists()
            if planned.path.exists() and not begun:
                # Killed before run.json was written: there is nothing to continue.
                remains = RunFolder(planned.path)
                remains.lock()
                remains.discard()
            options = {**planned.options.model_dump(), **overrides}
            run(out=planned.path, resume=begun, callbacks=[_EventCallback(emit)], **options)
    except InUse as error:
        return Outcome("busy", str(error))
    except UserError as error:
        return Outcome("failed", str(error))
    except Exception as error:
        return Outcome("failed", f"{type(error).__name__}: {error}", traceback.format_exc())
    return Outcome("complete")


class _EventCallback:
    """Callback of a run in another process: forwards its events."""

    def __init__(self, emit: Emit) -> None:
        self._emit = emit

    def run_start(self, _run: Run, rounds_done: int) -> None:
        """The run itself is read from its folder on the other side."""
        self._emit("run_start", rounds_done)

    def round_end(self, _run: Run, record: dict[str, Any]) -> None:
        """With its line of rounds.jsonl."""
        self._emit("round_end", record)


@contextmanager
def folder_lock(folder: Path, name: str, wait: bool = False) -> Iterator[None]:
    """Inside: no other process, here or on a machine that shares the folder, is inside under this name."""
    locks = folder / ".locks"
    locks.mkdir(parents=True, exist_ok=True)
    lock = FileLock(locks / name)
    lock.acquire(f"another process is working on {name}", wait=wait)
    try:
        yield
    finally:
        lock.release()

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
from protofed.runs.options import Options, make_options
from protofed.runs.results import Run
from protofed.runs.run import MAY_CHANGE, run, tell
from protofed.studies.pool import Ended, Report, side_by_side
from protofed.system import CAN_FORK, FileLock, cores, one_thread

log = logging.getLogger("protofed")

_SINGLE_PROCESS_ENGINES = ("loop", "vmap")


@dataclass(frozen=True)
class Job:
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
    """How a job ended; `busy`: another process is at it."""

    state: Literal["complete", "busy", "failed"]
    reason: str = ""
    trace: str = ""


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

    def own(self, jobs: Sequence[Job]) -> list[Job]:
        """Those of the jobs, in their order, that fall to this machine."""
        return list(jobs[self.number - 1 :: self.of])


@dataclass(frozen=True)
class Done:
    """What came of a batch of jobs; outcomes are those that brought no result."""

    jobs: tuple[Job, ...]
    outcomes: Mapping[Path, Outcome]

    def missing(self) -> list[dict[str, Any]]:
        """The jobs without a result, and why."""
        return [
            {
                "label": job.label,
                "seed": job.options.seed,
                "run": job.path.name,
                "reason": self.outcomes[job.path].reason if job.path in self.outcomes else "not done yet",
                "failed": job in self.failed(),
            }
            for job in self.jobs
            if not job.is_complete()
        ]

    def failed(self) -> list[Job]:
        """The jobs that were tried and ended with an error."""
        return [job for job in self.jobs if job.path in self.outcomes and self.outcomes[job.path].state == "failed"]


def perform(
    jobs: Sequence[Job],
    *,
    trials: Sequence[Job] = (),
    shard: Shard | None = None,
    callbacks: Sequence[Any] = (),
    after_each: Callable[[Done], object] = lambda _done: None,
) -> Done:
    """Do what is not done yet. A run that fails is noted and the others go on.

    `trials` are assembled before anything starts, so that a mistake of the user shows at once. Callbacks are those of
    a run, called in this process, and `runs_start(jobs, unfinished)`, `runs_estimate(seconds)` and
    `run_failed(run, reason)`. `after_each` is
    called whenever a run is complete, so that an interruption loses nothing.
    """
    unique = list({job.path: job for job in jobs}.values())
    unfinished = [job for job in (shard or Shard()).own(unique) if not job.is_complete()]
    tried: dict[str, float] = {}
    if unfinished:
        timed = any(hasattr(callback, "runs_estimate") for callback in callbacks)
        tried = _try_out([job for job in trials if not (job.path / "run.json").exists()], timed)
    tell(callbacks, "runs_start", unique, unfinished)
    if tried and all(job.label in tried for job in unfinished):
        tell(callbacks, "runs_estimate", sum(tried[job.label] for job in unfinished) / cores())
    outcomes: dict[Path, Outcome] = {}
    done = Done(tuple(jobs), outcomes)
    said: set[str] = set()

    def handle(job: Job, event: str, content: Any) -> None:
        if event == "log":
            level, text = content
            if text not in said:
                log.log(level, "%s: %s", job.title, text)
            said.add(text)
        elif event != "outcome":
            tell(callbacks, event, job.run, content)
        elif content.state == "complete":
            tell(callbacks, "run_end", job.run)
            after_each(done)
        else:
            outcomes[job.path] = content
            tell(callbacks, "run_failed", job.run, content.reason)

    _run_all(unfinished, handle)
    return done


class _Trial(NamedTuple):
    """What came of assembling a run without starting it."""

    label: str
    mistake: str | None = None
    seconds: float | None = None


def _try_out(trials: Sequence[Job], timed: bool) -> dict[str, float]:
    """Assemble without starting; only mistakes of the user count, other trouble belongs to the run it happens in.

    Timed: the seconds that a run of each label will take on one core, where that could be found out.
    """
    if not trials:
        return {}
    # The first one here: data that is kept once loaded is then inherited by every process.
    tried = [_try(trials[0], timed)]
    if CAN_FORK and trials[0].options.device == "cpu":
        tasks = {job.path: partial(_try, job, timed) for job in trials[1:]}
        ends = [ended for _, event, ended in side_by_side(tasks, cores()) if event == "ended"]
        tried += [ended.result for ended in ends if ended.result is not None]
    else:
        tried += [_try(job, timed) for job in trials[1:]]
    for trial in tried:
        if trial.mistake is not None:
            raise UserError(trial.mistake)
    return {trial.label: trial.seconds for trial in tried if trial.seconds is not None}


def _try(job: Job, timed: bool, _report: Report | None = None) -> _Trial:
    try:
        with one_thread():
            assembly = assemble(job.options, job.path / "clients")
            refuse_if_too_large(assembly)
            return _Trial(job.label, seconds=estimate_seconds(assembly) if timed else None)
    except UserError as error:
        return _Trial(job.label, str(error))
    except Exception:
        return _Trial(job.label)


def _run_all(jobs: Sequence[Job], handle: Callable[[Job, str, Any], None]) -> None:
    """Run the jobs; their events are handled as they come, each job's last being its outcome."""
    if not CAN_FORK or any(job.options.device != "cpu" for job in jobs):
        for job in jobs:
            handle(job, "outcome", _run(job, {}, partial(handle, job)))
        return
    if not jobs:
        return
    at_once, where = places(jobs[0].options, len(jobs))
    by_path = {job.path: job for job in jobs}
    tasks = {path: partial(_run, job, where) for path, job in by_path.items()}
    # Closed whatever happens in a callback: that ends the processes.
    with closing(side_by_side(tasks, at_once)) as events:
        for path, event, content in events:
            if isinstance(content, Ended):
                died = Outcome("failed", f"its process ended with code {content.exit_code}")
                handle(by_path[path], "outcome", content.result or died)
            else:
                handle(by_path[path], event, content)


def places(options: Options, runs: int) -> tuple[int, dict[str, Any]]:
    """How many runs at once, and what to change in their options, so that every core has one process to run."""
    total = cores()
    engine = "workers" if options.engine == "auto" and options.workers else options.engine
    if engine == "auto":
        at_once = min(runs, total)
        each = total // at_once
        return at_once, {"engine": "loop"} if each == 1 else {"engine": "workers", "workers": each}
    processes = 1 if engine in _SINGLE_PROCESS_ENGINES else options.workers or total
    return max(1, min(runs, total // processes)), {}


def _run(job: Job, where: Mapping[str, Any], report: Report) -> Outcome:
    """Begin or continue one run, and say how it ended."""
    try:
        with claimed(job.folder, job.path.name):
            if job.is_complete():
                return Outcome("complete")
            begun = (job.path / "run.json").exists()
            if job.path.exists() and not begun:
                # Killed before it had written what it is: there is nothing to continue.
                rest = RunFolder(job.path)
                rest.lock()
                rest.discard()
            options = {**job.options.model_dump(), **where}
            run(out=job.path, resume=begun, callbacks=[_Messenger(report)], **options)
    except InUse as error:
        return Outcome("busy", str(error))
    except UserError as error:
        return Outcome("failed", str(error))
    except Exception as error:
        return Outcome("failed", f"{type(error).__name__}: {error}", traceback.format_exc())
    return Outcome("complete")


class _Messenger:
    """Callback of a run in a process of its own: passes on what happens."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def run_start(self, _run: Run, rounds_done: int) -> None:
        """The run itself is read from its folder on the other side."""
        self._report("run_start", rounds_done)

    def round_end(self, _run: Run, record: dict[str, Any]) -> None:
        """With its line of rounds.jsonl."""
        self._report("round_end", record)


@contextmanager
def claimed(folder: Path, name: str, wait: bool = False) -> Iterator[None]:
    """Inside: no other process, here or on a machine that shares the folder, is inside under this name."""
    locks = folder / ".locks"
    locks.mkdir(parents=True, exist_ok=True)
    lock = FileLock(locks / name)
    lock.acquire(f"another process is working on {name}", wait=wait)
    try:
        yield
    finally:
        lock.release()

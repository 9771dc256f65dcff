"""What a person sees while many runs are estimated or go on side by side: bars on a terminal, lines elsewhere."""

import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.progress import Progress, TaskID

from protofed.cli.output import bars, progress_of, warn_of_time
from protofed.runs import Run
from protofed.studies.schedule import PlannedRun


class ManyRuns:
    """Callback of comparisons and sweeps."""

    def __init__(self, describe: Callable[[dict[str, Any]], str] = progress_of) -> None:
        self._describe = describe
        self._titles: dict[Path, str] = {}
        self._rounds: dict[Path, int] = {}
        self._bars: dict[Path, TaskID] = {}
        self._progress: Progress | None = None
        self._complete = self._total = 0

    def __enter__(self) -> "ManyRuns":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def runs_start(self, runs: Sequence[PlannedRun], unfinished: Sequence[PlannedRun]) -> None:
        """How much there is to do."""
        self._titles = {run.path: run.title for run in runs}
        self._total, self._complete = len(unfinished), 0
        others = len(runs) - len(unfinished)
        print(
            f"{len(unfinished)} runs to do" + (f", {others} are complete or assigned to others" if others else ""),
            flush=True,
        )
        if unfinished and sys.stdout.isatty():
            # No thread that draws: processes are forked while the bars are up.
            self._progress = bars(auto_refresh=False)
            self._progress.start()
            self._all = self._progress.add_task("all runs", total=self._total, status="")

    def runs_estimate(self, seconds: float) -> None:
        """Before long work."""
        warn_of_time(seconds)

    def run_start(self, run: Run, rounds_done: int) -> None:
        """One more is under way."""
        config = run.config
        self._rounds[run.path] = rounds = len(config["plan"]["epochs"])
        title = self._titles[run.path]
        if self._progress is not None:
            self._bars[run.path] = self._progress.add_task(title, total=rounds, completed=rounds_done, status="")
            self._progress.refresh()
        else:
            resumed = f", {rounds_done} of them done before" if rounds_done else ""
            print(f"{title}: {rounds} rounds, {len(config['partition']['clients'])} clients{resumed}", flush=True)

    def round_end(self, run: Run, record: dict[str, Any]) -> None:
        """Where one of them stands."""
        status = self._describe(record)
        if self._progress is not None:
            self._progress.update(self._bars[run.path], advance=1, status=status)
            self._progress.refresh()
        else:
            stands = f"round {record['round']}/{self._rounds[run.path]}"
            print(f"{self._titles[run.path]}: {stands}  {status}  {record['seconds']['total']:.1f} s", flush=True)

    def run_end(self, run: Run) -> None:
        """A result."""
        self._complete += 1
        self._leave(run, f"complete ({self._complete} of {self._total})")

    def run_failed(self, run: Run, reason: str) -> None:
        """No result."""
        self._leave(run, f"no result: {reason}")

    def stop(self) -> None:
        """Leave the terminal as it was, also after an interruption."""
        if self._progress is not None:
            with suppress(Exception):
                self._progress.stop()
            self._progress = None

    def _leave(self, run: Run, text: str) -> None:
        line = f"{self._titles[run.path]}: {text}"
        if self._progress is None:
            print(line, flush=True)
            return
        if run.path in self._bars:
            self._progress.remove_task(self._bars.pop(run.path))
        self._progress.update(self._all, advance=1)
        self._progress.console.print(line)
        self._progress.refresh()


class EstimateProgress:
    """How far an estimate of many runs has come: a bar on a terminal, some lines elsewhere."""

    _LINES = 5

    def __init__(self) -> None:
        self._progress: Progress | None = None

    def __enter__(self) -> "EstimateProgress":
        if sys.stdout.isatty():
            self._progress = bars()
            self._progress.start()
            self._bar = self._progress.add_task("estimating", total=None, status="kinds of runs")
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.remove_task(self._bar)
            self._progress.stop()

    def tried(self, done: int, total: int) -> None:
        """So many kinds of runs of all were tried."""
        if self._progress is not None:
            self._progress.update(self._bar, completed=done, total=total)
        elif done * self._LINES // total > (done - 1) * self._LINES // total:
            print(f"estimating: {done} of {total} kinds of runs tried", flush=True)

"""`protofed run`: train one federation."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from protofed.cli import completion
from protofed.cli.options import (
    ConfigOption,
    QuietOption,
    StrictOption,
    TensorBoardOption,
    TrackOption,
    options_of,
    over_stored,
    takes_run_options,
    trackers_of,
)
from protofed.cli.output import ProgressBar, console, exit_code, followers, show_summary
from protofed.cli.stopping import saying
from protofed.runs import Run, run
from protofed.runs.extend import resume_command


@takes_run_options(without=("method",), config=("method", "out", "track", "tensorboard", "strict"))
def run_command(
    *,
    run_options: dict[str, Any],
    method: Annotated[
        str | None,
        typer.Argument(help="a method's name, or file.py:Class (default: i2pfl)", autocompletion=completion.methods),
    ] = None,
    out: Annotated[str | None, typer.Option("--out", help="the run folder (default: runs/NAME)")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="continue the run in --out")] = False,
    from_: Annotated[Path | None, typer.Option("--from", help="use the options in an earlier run's run.json")] = None,
    config: ConfigOption = None,
    track: TrackOption = None,
    tensorboard: TensorBoardOption = False,
    strict: StrictOption = False,
    quiet: QuietOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="print only the summary, as JSON")] = False,
) -> int:
    """Train a federation and write a run folder.

    Example: protofed run i2pfl --data digits --rounds 10 --out my-run
    """
    if method is not None:
        run_options["method"] = method
    if from_ is not None:
        run_options = over_stored(options_of(from_), run_options)
    progress = ProgressBar()
    begun = _BegunRun()
    callbacks = [begun, *followers(progress, quiet or as_json, trackers_of(track, tensorboard), config)]
    try:
        with saying(begun.how_to_go_on):
            result = run(out=out, resume=resume, callbacks=callbacks, **run_options)
    except BaseException:
        progress.stop()
        raise
    if as_json:
        print(json.dumps(result.summary))
    elif not quiet:
        console().print()
        show_summary(result)
    return exit_code(result, strict)


class _BegunRun:
    """Callback: what is kept when the run is interrupted, and how it goes on."""

    def __init__(self) -> None:
        self._run: Run | None = None

    def run_start(self, run: Run, rounds_done: int) -> None:
        """From now on there is something to go on with."""
        self._run = run

    def how_to_go_on(self) -> str:
        """For whoever interrupted it."""
        if self._run is None:
            return "stopped before the first round; nothing is kept"
        done, planned = len(self._run.rounds), self._run.planned_rounds
        return f"stopped; {done} of {planned} rounds are kept. To continue: {resume_command(self._run.path)}"

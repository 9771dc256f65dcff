"""A folder of many runs whose JSON and Markdown files are rewritten after each of them."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from protofed.studies.schedule import PlannedRun, RunOutcomes, Shard, folder_lock, run_unfinished
from protofed.system import write_atomically


class StudyResult(Protocol):
    """The results of a study."""

    @property
    def content(self) -> Mapping[str, Any]:
        """For machines."""

    def markdown(self) -> str:
        """For people."""


R = TypeVar("R", bound=StudyResult)


def write_result(result: StudyResult, folder: Path, name: str) -> None:
    """NAME.json and NAME.md."""
    write_atomically(folder / f"{name}.json", json.dumps(result.content, indent=2).encode() + b"\n")
    write_atomically(folder / f"{name}.md", result.markdown().encode())


def run_study(
    folder: Path,
    name: str,
    runs: Sequence[PlannedRun],
    summarise: Callable[[RunOutcomes], R],
    *,
    validate: Sequence[PlannedRun],
    shard: str | None,
    callbacks: Iterable[Any],
    write_first: bool = False,
) -> R:
    """Do the runs that are not complete, and write what they amount to after each of them.

    With `write_first` it is written before the first result too, so that whoever watches the folder knows what is to
    come.
    """

    def write(outcomes: RunOutcomes) -> R:
        with folder_lock(folder, name, wait=True):
            result = summarise(outcomes)
            write_result(result, folder, name)
        return result

    first = [_AtStart(lambda: write(RunOutcomes(tuple(runs), {})))] if write_first else []
    return write(
        run_unfinished(
            runs, validate=validate, shard=Shard.parse(shard), callbacks=[*first, *callbacks], after_each=write
        )
    )


class _AtStart:
    """Callback: does something once it is sure that the runs will start."""

    def __init__(self, action: Callable[[], object]) -> None:
        self._action = action

    def runs_start(self, _runs: Sequence[PlannedRun], _unfinished: Sequence[PlannedRun]) -> None:
        """No mistake of the user was found."""
        self._action()

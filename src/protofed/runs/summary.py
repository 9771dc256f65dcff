"""summary.json: a whole run from its rounds."""

import resource
import time
from collections.abc import Mapping
from typing import Any, Literal

from protofed.records import KINDS
from protofed.runs.assembly import Assembly

LAST_ROUNDS = 5

Status = Literal["complete", "flat", "diverged"]


class Stopwatch:
    """Time since it was made: on the clock, and of the processor, in this process and in those that it has ended."""

    def __init__(self, whole: bool) -> None:
        self._whole = whole
        self._start = time.perf_counter(), _processor_seconds()

    def wall(self) -> float:
        """Seconds on the clock."""
        return time.perf_counter() - self._start[0]

    def cpu(self) -> float | None:
        """Seconds of the processor; None for a run of which an earlier process did a part."""
        return _processor_seconds() - self._start[1] if self._whole else None


def _processor_seconds() -> float:
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(each.ru_utime + each.ru_stime for each in used)


def summarise_run(assembly: Assembly, rounds: list[dict[str, Any]], clock: Stopwatch, status: Status) -> dict[str, Any]:
    """Accuracy, bytes, time and memory of a run that has ended; `status` says how.

    `complete`: all rounds are done. `flat`: it stopped early, because it had not become better for a while.
    `diverged`: a round could not be closed, because no client's weights were finite; the figures are those of the
    rounds before it.
    """
    options = assembly.options
    method = assembly.context.method
    only_the_end_counts = method.pools_data or method.ensembles or options.ensemble
    final = next((record["accuracy"] for record in reversed(rounds) if record["accuracy"] is not None), None)
    train_seconds = sum(record["seconds"]["train"] for record in rounds)
    peak = sum(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return {
        "method": options.method,
        "data": options.data,
        "protocol": assembly.context.partition.protocol,
        "seed": options.seed,
        "rounds": len(rounds),
        "engine": assembly.engine.name,
        "accuracy": final if only_the_end_counts else mean_of_last(rounds),
        "accuracy_final": final,
        "accuracy_best_validation": _best_validated(rounds),
        "bytes": {
            way: {kind: sum(record["bytes"][way][kind] for record in rounds) for kind in (*KINDS, "total")}
            for way in ("up", "down")
        },
        "seconds": {
            **{
                part: sum(record["seconds"][part] for record in rounds)
                for part in ("train", "aggregate", "evaluate", "total")
            },
            "wall": clock.wall(),
            "cpu": clock.cpu(),
        },
        "samples_per_second": sum(record["samples"] for record in rounds) / train_seconds if rounds else 0.0,
        "peak_memory_bytes": peak * 1024,
        "status": status,
    }


def mean_of_last(rounds: list[dict[str, Any]], last: int = LAST_ROUNDS) -> Any:
    """Accuracy in the contract's form, averaged over the last evaluated rounds."""
    evaluated = [record["accuracy"] for record in rounds if record["accuracy"] is not None]
    return _mean(evaluated[-last:])


def _best_validated(rounds: list[dict[str, Any]]) -> Any:
    """Accuracy of the round whose model did best on validation data; None where there was no such data."""
    validated = [record for record in rounds if record["validation"] is not None]
    return max(validated, key=lambda record: record["validation"])["accuracy"] if validated else None


def _mean(views: list[Any]) -> Any:
    """The mean of trees of numbers, built like the last of them; what is missing in one does not count."""
    known = [view for view in views if view is not None]
    if not known:
        return None
    if isinstance(known[-1], Mapping):
        return {key: _mean([view.get(key) for view in known]) for key in known[-1]}
    return sum(known) / len(known)

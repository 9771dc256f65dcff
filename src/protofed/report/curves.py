"""How methods fared round by round: mean over runs, and the lowest and highest of them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from protofed.federation.best import shown_loss
from protofed.report.content import MethodGroup, ReportedRun

_NO_PART = ("average", "held_out", "quantiles")
_MOST_PARTS = 12

Pick = Callable[[dict[str, Any]], float | None]


@dataclass(frozen=True)
class Measure:
    """Something that can be followed over the rounds."""

    key: str
    label: str
    percent: bool
    pick: Pick


@dataclass(frozen=True)
class _Series:
    """One method, one measure: a point for each round in which it was taken."""

    rounds: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]
    bytes: list[float]
    """Sent up and down until then."""


def measures(group: MethodGroup) -> list[Measure]:
    """What the runs of a group have in common to be followed, the main one first."""
    known: dict[str, Measure] = {}
    for run in group.all_runs:
        accuracy: dict[str, Any] = next(
            (record["accuracy"] for record in reversed(run.rounds) if record["accuracy"]), {}
        )
        for view, words in (("global", "global model"), ("personal", "clients' models")):
            parts = accuracy.get(view)
            if parts is None or not any(shown.name == view for shown in group.views or ()):
                continue
            known.setdefault(f"{view}.average", _accuracy(view, "average", f"average accuracy, {words}"))
            named = [part for part in parts if part not in _NO_PART]
            for part in named if len(named) <= _MOST_PARTS else []:
                label = "all test images together" if part == "pooled" else part
                known.setdefault(f"{view}.{part}", _accuracy(view, part, f"{label}, {words}"))
    ordered = sorted(known.values(), key=lambda measure: not measure.key.endswith(".average"))
    loss = Measure("loss", "training loss (cross-entropy)", False, shown_loss)
    total = Measure("loss.total", "training loss with all terms of the method", False, lambda line: line["train_loss"])
    return [*ordered, loss, *([total] if _losses_differ(group) else [])]


def _losses_differ(group: MethodGroup) -> bool:
    """Whether some method minimises more than the loss that all are compared by."""
    return any(shown_loss(record) != record["train_loss"] for run in group.all_runs for record in run.rounds)


def series(runs: Sequence[ReportedRun], measure: Measure) -> _Series | None:
    """One measure of one method; None where no run has it."""
    values: dict[int, list[float]] = {}
    sent: dict[int, list[float]] = {}
    for run in runs:
        exchanged = accumulate(sum(record["bytes"][way]["total"] for way in ("up", "down")) for record in run.rounds)
        for record, until in zip(run.rounds, exchanged, strict=True):
            value = measure.pick(record)
            if value is not None:
                values.setdefault(record["round"], []).append(value)
                sent.setdefault(record["round"], []).append(until)
    if not values:
        return None
    rounds = sorted(values)
    return _Series(
        rounds,
        [sum(values[number]) / len(values[number]) for number in rounds],
        [min(values[number]) for number in rounds],
        [max(values[number]) for number in rounds],
        [sum(sent[number]) / len(sent[number]) for number in rounds],
    )


def _accuracy(view: str, part: str, label: str) -> Measure:
    def pick(record: Mapping[str, Any]) -> float | None:
        parts = (record["accuracy"] or {}).get(view)
        return None if parts is None else parts.get(part)

    return Measure(f"{view}.{part}", label, True, pick)

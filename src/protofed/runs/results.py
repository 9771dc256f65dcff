"""Accuracies of a whole run from those of its rounds."""

from collections.abc import Mapping
from typing import Any

from protofed.runs.opened import Run

__all__ = ["Run", "best_validated", "mean_of_last"]

_LAST_ROUNDS = 5


def mean_of_last(rounds: list[dict[str, Any]], last: int = _LAST_ROUNDS) -> Any:
    """Accuracy in the contract's form, averaged over the last evaluated rounds."""
    evaluated = [record["accuracy"] for record in rounds if record["accuracy"] is not None]
    return _mean(evaluated[-last:])


def best_validated(rounds: list[dict[str, Any]]) -> Any:
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

"""The best round of a run so far, kept before a later one overwrites it.

It is judged by the clients' own validation images where they keep some from training, else by the training loss; never
by test images. A round that is the best and the last needs no copy: its states are in place. So a copy is made only
when a round that is not better is about to be committed over the best one.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

By = Literal["validation", "train_loss"]

BEST, NOTE = "best", "best.json"
"""The folder of the best round in a run folder, and the note in it that says which round that is."""


@dataclass(frozen=True)
class BestRound:
    """After how many rounds the best model was there, and how it was judged."""

    round: int
    by: By
    score: float
    """Accuracy on validation images, or the loss."""

    @classmethod
    def read(cls, folder: Path) -> "BestRound | None":
        """The one that a run folder keeps."""
        try:
            return cls(**json.loads((folder / BEST / NOTE).read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def note(self) -> bytes:
        """What is written beside its states."""
        return json.dumps(asdict(self)).encode() + b"\n"

    def beats(self, other: "BestRound | None") -> bool:
        """Whether it is better than another; of equals the earlier stays."""
        if other is None:
            return True
        return self.score > other.score if self.by == "validation" else self.score < other.score


class BestTracker:
    """Follows the rounds and has the best one kept in time."""

    def __init__(self, by: By, keep: Callable[[BestRound], None]) -> None:
        """`keep` copies the states that are in place now."""
        self._by = by
        self._keep = keep
        self._kept: BestRound | None = None
        self.best: BestRound | None = None
        self._last = 0

    def resume(self, lines: Sequence[Mapping[str, Any]], kept: BestRound | None) -> None:
        """Go on after these rounds. A best round of which no copy is left cannot be had again."""
        self._kept = kept if kept is not None and kept.by == self._by and kept.round <= len(lines) else None
        self._last = len(lines)
        for line in lines:
            judged = self._judged(line)
            if judged is not None and judged.beats(self.best):
                self.best = judged
        if self.best is not None and self.best.round != self._last and self.best != self._kept:
            self.best = self._kept or self._judged(lines[-1])

    def before_commit(self, line: Mapping[str, Any]) -> None:
        """A round is about to take the place of the one before."""
        judged = self._judged(line)
        if judged is not None and judged.beats(self.best):
            self.best = judged
        else:
            self._keep_if_in_place()
        self._last += 1

    def finish(self) -> BestRound | None:
        """Have the best round kept also where it is the last."""
        self._keep_if_in_place()
        return self._kept

    def rounds_since(self) -> int:
        """Rounds since the best one."""
        return 0 if self.best is None else self._last - self.best.round

    def _keep_if_in_place(self) -> None:
        if self.best is not None and self.best.round == self._last and self._kept != self.best:
            self._keep(self.best)
            self._kept = self.best

    def _judged(self, line: Mapping[str, Any]) -> BestRound | None:
        """A round with its score; None where it has none."""
        score = line["validation"] if self._by == "validation" else shown_loss(line)
        if score is None or not math.isfinite(score):
            return None
        return BestRound(line["round"], self._by, score)


def shown_loss(line: Mapping[str, Any]) -> float | None:
    """The training loss that can be compared between methods: the cross-entropy, else all terms together."""
    cross_entropy: float | None = line.get("cross_entropy")
    return line["train_loss"] if cross_entropy is None else cross_entropy

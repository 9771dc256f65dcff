"""How a run went: when it reached an accuracy and at what cost, when it settled, how much it wavered."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import mean, stdev
from typing import Any

_WINDOW = 5
_SETTLED = 0.005
_LAST_ROUNDS = 20


@dataclass(frozen=True)
class Convergence:
    """The evaluated rounds of a run in one view: average accuracy after each, and bytes exchanged until then."""

    rounds: Sequence[int]
    average: Sequence[float]
    bytes: Sequence[int]

    @classmethod
    def of(cls, records: Sequence[dict[str, Any]], view: str) -> "Convergence":
        """From the lines of rounds.jsonl."""
        exchanged = accumulate(record["bytes"]["up"]["total"] + record["bytes"]["down"]["total"] for record in records)
        points = [
            (record["round"], record["accuracy"][view]["average"], total)
            for record, total in zip(records, exchanged, strict=True)
            if record["accuracy"] is not None and record["accuracy"][view] is not None
        ]
        return cls([point[0] for point in points], [point[1] for point in points], [point[2] for point in points])

    def rounds_to(self, target: float | None) -> int | None:
        """The first round after which the average reaches the target; None: never, or there is no target."""
        index = self._first(target)
        return None if index is None else self.rounds[index]

    def bytes_to(self, target: float | None) -> int | None:
        """What had been sent by then, up and down."""
        index = self._first(target)
        return None if index is None else self.bytes[index]

    def convergence_round(self) -> int | None:
        """The first round whose mean with the four before it is within half a point of the best such mean."""
        means = [mean(self.average[end - _WINDOW : end]) for end in range(_WINDOW, len(self.average) + 1)]
        if not means:
            return None
        # Rounding must not decide whether half a point is within half a point.
        enough = max(means) - _SETTLED - 1e-12
        return self.rounds[_WINDOW - 1 + next(index for index, value in enumerate(means) if value >= enough)]

    def fluctuation(self) -> float | None:
        """Standard deviation of the average over the last twenty evaluated rounds, or over all where they are fewer."""
        last = self.average[-_LAST_ROUNDS:]
        return stdev(last) if len(last) > 1 else None

    def _first(self, target: float | None) -> int | None:
        if target is None:
            return None
        return next((index for index, value in enumerate(self.average) if value >= target - 1e-12), None)

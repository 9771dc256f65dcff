"""How the rounds of a run are run."""

import math
from dataclasses import dataclass

from protofed.metrics import ACCURACY


@dataclass(frozen=True)
class RoundPolicy:
    """How rounds are run: who takes part, how often they are scored, and what is kept of them."""

    participation: float = 1.0
    evaluate_every: int = 1
    evaluate_local: bool = False
    ensemble: bool = False
    """After the last round the clients' models predict together."""
    keep_messages: bool = False
    """Every upload is kept as it was sent."""
    min_clients: int = 1
    """A round with fewer uploads does not count."""
    class_mean_head: bool = False
    """Before the first round the head is made of the clients' class means."""
    snapshots: frozenset[int] = frozenset()
    """After how many rounds a snapshot of all states is kept; 0: before the first."""
    stop_when_flat: int | None = None
    """Stop once so many rounds have not been better than the best before them."""
    metric: str = ACCURACY
    """What models are judged by on validation data."""

    def participants_of(self, clients: int) -> int:
        """How many of the clients train in a round."""
        return max(1, math.ceil(self.participation * clients - 1e-9))

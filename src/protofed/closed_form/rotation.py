"""Who trains and who judges: sites are put into folds, and each scores models that were trained without it."""

from typing import Literal, NamedTuple

from protofed.method import At


class Turn(NamedTuple):
    """What one exchange of a rotation is for."""

    fold: int | None
    """The fold that stays out and scores what it receives; None: everybody takes part."""
    part: Literal["statistics", "training", "scores"]
    trained: int
    """Rounds of training behind the model that is received."""


def rotation(folds: int, rounds: int) -> tuple[Turn, ...]:
    """Every fold once left out of `rounds` rounds of training, then all together.

    A model is known by its statistics before it is trained or scored, so training and statistics take turns.
    """
    turns: list[Turn] = []
    for fold in (*range(folds), None):
        for done in range(rounds):
            turns += [Turn(fold, "statistics", done), Turn(fold, "training", done)]
        turns.append(Turn(fold, "statistics", rounds))
        if fold is not None:
            turns.append(Turn(fold, "scores", rounds))
    return tuple(turns)


def fold_of(client: str, folds: int, at: At) -> int:
    """The fold of a site: that of its domain where sites are of several, so that all of a domain is left out."""
    domains = list(dict.fromkeys(at.domains.values()))
    if len(domains) > 1:
        return domains.index(at.domains[client]) % folds
    return list(at.clients).index(client) % folds

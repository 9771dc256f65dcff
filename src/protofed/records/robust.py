"""Averages that one hostile client cannot move at will; they take the place of the mean over clients.

What a method uses client by client, tables of prototypes and models, has no mean; there a value that is too far from
the median of all is drawn in towards it.

Every client counts the same here: a weight is a number the client chose, so a hostile one would choose a large one.

Coordinate-wise median and trimmed mean: Yin, Chen, Ramchandran, Bartlett. Byzantine-Robust Distributed Learning:
Towards Optimal Statistical Rates. ICML 2018. Norm bounding: Sun, Kairouz, Suresh, McMahan. Can You Really Backdoor
Federated Learning? 2019; about a robust centre, as in Karimireddy, He, Jaggi. Learning from History for Byzantine
Robust Optimization. ICML 2021. Multi-Krum: Blanchard, El Mhamdi, Guerraoui, Stainer. Machine Learning with
Adversaries: Byzantine Tolerant Gradient Descent. NeurIPS 2017.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from protofed.errors import UserError

Pieces = list[Tensor | None]
"""One client's value cut into flat tensors that are averaged apart; None: this client has none (it lacks the class)."""

_FORMS = "median, trimmed=0.2, norm-bound=1 or krum=0.2"
_DEFAULTS = {"trimmed": 0.2, "norm-bound": 1.0, "krum": 0.2}
_REACH = 2.0


class Robust(ABC):
    """A rule that combines the values of all clients into one."""

    @property
    def reach(self) -> float:
        """How far from the median of all a value may be that is used by itself, in units of the median distance."""
        return _REACH

    @property
    def for_sums(self) -> "Robust":
        """The rule for sums such as second moments: coordinate-wise medians would not be moments of anything."""
        return Downweighted(self.reach)

    @abstractmethod
    def combine(self, values: Sequence[Pieces]) -> Pieces:
        """The common value, piece by piece; None if no client has the piece."""

    def draw_in(self, values: Sequence[Pieces], apart: bool) -> list[Pieces]:
        """Every client's value, no farther from the others than `reach`; with `apart` piece by piece."""
        if not apart:
            return _drawn_in(values, self.reach)
        alone = [_drawn_in([[piece] for piece in pieces], self.reach) for pieces in zip(*values, strict=True)]
        return [[pieces[client][0] for pieces in alone] for client in range(len(values))]


@dataclass(frozen=True)
class Trimmed(Robust):
    """Coordinate by coordinate, the mean of what is left without the `share` lowest and highest; half: the median."""

    share: float

    def combine(self, values: Sequence[Pieces]) -> Pieces:
        """Sort, cut both ends, average."""
        return [None if stacked is None else self._middle(stacked) for stacked in _stacked(values)]

    def _middle(self, stacked: Tensor) -> Tensor:
        clients = len(stacked)
        cut = min(int(self.share * clients + 1e-9), (clients - 1) // 2)
        return stacked.sort(0).values[cut : clients - cut].mean(0)


MEDIAN = Trimmed(0.5)


@dataclass(frozen=True)
class NormBound(Robust):
    """The mean of values that are no farther from the coordinate-wise median than `factor` times the median client.

    The distance is that of a client's whole value, so a scaled or reversed one is drawn in as a whole.
    """

    factor: float

    @property
    def reach(self) -> float:
        """The factor."""
        return self.factor

    def combine(self, values: Sequence[Pieces]) -> Pieces:
        """Scale down values that are too far out, then average."""
        centre = MEDIAN.combine(values)
        return [
            None if middle is None or moved is None else middle + moved.mean(0)
            for middle, moved in zip(centre, _stacked(_near(values, centre, self.factor)), strict=True)
        ]


@dataclass(frozen=True)
class Downweighted(Robust):
    """The mean of values that count the less the farther they are from the others: an average of what clients sent.

    Sums of squares stay so. About a coordinate-wise median they would not, and a matrix whose smallest eigenvalues are
    wrong decides a regression. A client's distance is the median of those to the other clients. Beyond `factor` times
    the median client's it counts by the square of how much it is too far, so that who goes farther gains nothing.
    """

    factor: float

    def combine(self, values: Sequence[Pieces]) -> Pieces:
        """Weigh the clients, then average."""
        distances = _distances(values)
        typical = distances.median()
        trust = (self.factor * typical / distances.clamp(min=1e-300)).clamp(max=1.0).square()
        trust = torch.where(distances > 0, trust, 1.0)
        return [_weighted_mean(pieces, trust) for pieces in zip(*values, strict=True)]


@dataclass(frozen=True)
class MultiKrum(Robust):
    """The mean without the `share` of the clients that are farthest from those nearest to them.

    A client is left out with its whole value, so it does not matter where in it the harm lies, and what is left is an
    average of what clients sent: sums of squares stay so. With n clients, of whom f are left out, each is judged by
    the sum of squared distances to its n - f - 2 nearest; f hostile ones are stood where n >= 2 f + 3.
    """

    share: float

    @property
    def for_sums(self) -> Robust:
        """The same."""
        return self

    def combine(self, values: Sequence[Pieces]) -> Pieces:
        """Choose the clients, then average; a piece that none of them has is taken from those who have it."""
        chosen = self._chosen(values)
        found: Pieces = []
        for pieces in zip(*values, strict=True):
            held = {client: piece.double() for client, piece in enumerate(pieces) if piece is not None}
            kept = [piece for client, piece in held.items() if client in chosen] or list(held.values())
            found.append(torch.stack(kept).mean(0) if kept else None)
        return found

    def draw_in(self, values: Sequence[Pieces], apart: bool) -> list[Pieces]:
        """Values of the chosen clients as they are; in place of the others' the mean of those."""
        holders = [own for own in values if any(piece is not None for piece in own)]
        if not holders:
            return list(values)
        chosen = {id(holders[place]) for place in self._chosen(holders)}
        middle = self.combine(holders)
        return [
            own
            if id(own) in chosen
            else [None if piece is None else mean for piece, mean in zip(own, middle, strict=True)]
            for own in values
        ]

    def _chosen(self, values: Sequence[Pieces]) -> set[int]:
        clients = len(values)
        cut = min(int(self.share * clients + 1e-9), (clients - 1) // 2)
        near = max(clients - cut - 2, 1)
        scores = [
            float(torch.stack(sorted(apart)[:near]).square().sum()) if apart else 0.0 for apart in _all_apart(values)
        ]
        return set(sorted(range(clients), key=scores.__getitem__)[: clients - cut])


def _weighted_mean(pieces: Sequence[Tensor | None], weights: Tensor) -> Tensor | None:
    held = [(weight, piece) for weight, piece in zip(weights, pieces, strict=True) if piece is not None]
    if not held:
        return None
    total = torch.stack([weight for weight, _ in held]).sum()
    return torch.stack([weight / total * piece.double() for weight, piece in held]).sum(0)


def _distances(values: Sequence[Pieces]) -> Tensor:
    """How far each client is from the others: the median of its distances to them; 0 where it can not be compared."""
    return torch.stack(
        [torch.stack(apart).median() if apart else torch.zeros((), dtype=torch.float64) for apart in _all_apart(values)]
    )


def _all_apart(values: Sequence[Pieces]) -> list[list[Tensor]]:
    """For each client, its distances to the others."""
    return [_apart(own, values) for own in values]


def _apart(own: Pieces, values: Sequence[Pieces]) -> list[Tensor]:
    """Distances to the clients that have a piece in common, each a root mean square over what both have."""
    apart = []
    for other in values:
        both = [(a, b) for a, b in zip(own, other, strict=True) if a is not None and b is not None]
        if other is not own and both:
            squares = torch.stack([(a.double() - b.double()).square().sum() for a, b in both]).sum()
            apart.append((squares / sum(a.numel() for a, _ in both)).sqrt())
    return apart


_SHARES: dict[str, type[Trimmed | MultiKrum]] = {"trimmed": Trimmed, "krum": MultiKrum}


def parse_robust(text: str) -> Robust:
    """The rule behind `median`, `trimmed=0.2`, `norm-bound=1` or `krum=0.2`."""
    name, equals, amount_text = (part.strip() for part in text.partition("="))
    if name == "median" and not equals:
        return MEDIAN
    if name not in _DEFAULTS:
        raise UserError(f"robust={text} is not valid; use {_FORMS}")
    try:
        amount = float(amount_text) if equals else _DEFAULTS[name]
    except ValueError:
        amount = -1.0
    if name in _SHARES and 0 < amount < 0.5:
        return _SHARES[name](amount)
    if name == "norm-bound" and 0 < amount < float("inf"):
        return NormBound(amount)
    bounds = "a share above 0 and below 0.5" if name in _SHARES else "a factor above 0"
    raise UserError(f"robust={text} is not valid; {name} takes {bounds}, for example {name}={_DEFAULTS[name]:g}")


def _near(values: Sequence[Pieces], centre: Pieces, factor: float) -> list[Pieces]:
    """What every client's value deviates from the centre, at most `factor` times as far as the median client's."""
    deviations: list[Pieces] = [
        [
            None if piece is None or middle is None else piece.double() - middle
            for piece, middle in zip(own, centre, strict=True)
        ]
        for own in values
    ]
    norms = torch.stack([_norm(own) for own in deviations])
    # With an even number of clients torch's median is the lower one: the cautious side.
    shrink = (factor * norms.median() / norms.clamp(min=1e-300)).clamp(max=1.0)
    return [
        [None if piece is None else piece * factor for piece in own]
        for own, factor in zip(deviations, shrink, strict=True)
    ]


def _drawn_in(values: Sequence[Pieces], factor: float) -> list[Pieces]:
    """Each value among those that have it, drawn in towards their median."""
    owners = [own for own in values if any(piece is not None for piece in own)]
    if not owners:
        return list(values)
    centre = MEDIAN.combine(owners)
    near = iter(_near(owners, centre, factor))
    return [
        [
            None if moved is None or middle is None else middle + moved
            for moved, middle in zip(next(near), centre, strict=True)
        ]
        if any(piece is not None for piece in own)
        else own
        for own in values
    ]


def _stacked(values: Sequence[Pieces]) -> list[Tensor | None]:
    """Each piece of all clients that have it, [clients, ...] in float64."""
    return [
        torch.stack([piece.double() for piece in pieces if piece is not None])
        if any(piece is not None for piece in pieces)
        else None
        for pieces in zip(*values, strict=True)
    ]


def _norm(pieces: Pieces) -> Tensor:
    squares = [piece.pow(2).sum() for piece in pieces if piece is not None]
    return torch.stack(squares).sum().sqrt() if squares else torch.zeros((), dtype=torch.float64)

"""Does what a client sent tell whether a given image was among those it trained on?

Scores are higher for images that an attacker takes for members. Yeom, Giacomelli, Fredrikson, Jha. Privacy Risk in
Machine Learning: Analyzing the Connection to Overfitting. CSF 2018, take the loss of the model; distances to what was
sent are the same idea for features and prototypes.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import sqrt

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_NORMAL_95 = 1.959964


@dataclass(frozen=True)
class Auc:
    """Area under the curve with a 95 % interval: the chance that a member scores higher than an outsider."""

    auc: float
    error: float
    members: int
    outsiders: int

    @property
    def low(self) -> float:
        """Lower end of the interval."""
        return max(0.0, self.auc - _NORMAL_95 * self.error)

    @property
    def high(self) -> float:
        """Upper end of the interval."""
        return min(1.0, self.auc + _NORMAL_95 * self.error)

    def as_dict(self) -> dict[str, float | int]:
        """For audit.json."""
        return {**asdict(self), "low": self.low, "high": self.high}


def auc(members: Tensor, outsiders: Tensor) -> Auc:
    """Of scores of members and of outsiders; the error is that of DeLong, DeLong and Clarke-Pearson, 1988."""
    from scipy.stats import rankdata
    from sklearn.metrics import roc_auc_score

    inside, outside = (np.sort(np.asarray(scores.double())) for scores in (members, outsiders))
    if not len(inside) or not len(outside):
        raise ValueError("an AUC takes at least one member and one outsider")
    took_part = np.repeat([1, 0], [len(inside), len(outside)])
    # Ranks, because a score may be infinite.
    area = roc_auc_score(took_part, rankdata(np.concatenate([inside, outside])))
    above, below = _share_below(inside, outside), 1 - _share_below(outside, inside)
    variance = sum(float(part.var(ddof=1)) / len(part) for part in (above, below) if len(part) > 1)
    return Auc(float(area), sqrt(variance), len(inside), len(outside))


def mean_auc(each_client: Sequence[Auc]) -> Auc:
    """Over clients, whose scores are on scales of their own."""
    count = len(each_client)
    return Auc(
        sum(each.auc for each in each_client) / count,
        sqrt(sum(each.error**2 for each in each_client)) / count,
        sum(each.members for each in each_client),
        sum(each.outsiders for each in each_client),
    )


def nearness(features: Tensor, labels: Tensor, rows: Tensor, row_labels: Tensor) -> Tensor:
    """Minus the distance of each sample to the nearest row of its class; without such a row it scores least."""
    distance = distances(features, rows)
    distance[labels[:, None] != row_labels[None, :]] = float("inf")
    return -distance.amin(1)


def distances(x: Tensor, y: Tensor) -> Tensor:
    """Euclidean, [n, m], of rows of any shape."""
    return torch.cdist(x.flatten(1).double(), y.flatten(1).double())


def _share_below(scores: NDArray[np.float64], others: NDArray[np.float64]) -> NDArray[np.float64]:
    """For each score the share of the sorted `others` below it, ties counting half."""
    left, right = (np.searchsorted(others, scores, side=side) for side in ("left", "right"))
    return np.asarray((left + right) / (2 * len(others)), dtype=np.float64)

"""Second moments under attack: the directions in which a site's features lie, and who lies in them."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from protofed.audit.membership import distances
from protofed.audit.victim import SentRows, Victim
from protofed.verbs import unpack_symmetric

_SHOWN = 8
"""Leading directions that are rebuilt."""
_RIDGE = 1e-3
"""Of the mean variance: keeps directions without any from deciding alone."""


def second_moment_in(rows: SentRows, dim: int) -> Tensor | None:
    """The mean of h h' over the site's samples, [D, D], where rows are such a moment; of the group that has most."""
    if not len(rows.rows) or rows.rows.ndim != 2 or rows.rows.shape[1] != dim * (dim + 1) // 2:
        return None
    each = [unpack_symmetric(row.double(), dim) for row in rows.rows]
    return max(each, key=lambda moment: float(moment.trace()))


def leading_directions(moment: Tensor, means: SentRows, field: str) -> SentRows:
    """The directions with most variance, as features an attacker may decode; each of the class whose mean is nearest.

    A direction has no sign: it gets the one in which the class means lie.
    """
    centre = means.rows.double().mean(0)
    _, directions = torch.linalg.eigh(moment)
    rows = directions.flip(1).T[:_SHOWN]
    rows = rows * torch.where(rows @ centre < 0, -1.0, 1.0)[:, None]
    nearest = distances(rows, functional.normalize(means.rows.double(), dim=1)).argmin(1)
    return replace(means, kind="prototypes", field=field, rows=rows.float(), labels=means.labels[nearest], counts=None)


def lies_within(features: Tensor, moment: Tensor) -> Tensor:
    """How well each sample is explained by a second moment: minus h' (M + ridge)^-1 h.

    A sample that took part lies in the span of M, and where there are fewer samples than dimensions others do not.
    """
    h = features.flatten(1).double()
    ridge = (_RIDGE * moment.trace() / len(moment)).clamp(min=1e-12)
    variance, directions = torch.linalg.eigh(moment)
    score: Tensor = -((h @ directions).pow(2) / (variance.clamp(min=0) + ridge)).sum(1)
    return score


def nearer_than_reference(victim: Victim, rows: SentRows, stage: str) -> tuple[Tensor, Tensor]:
    """Of members and outsiders: how much nearer they are to the sent mean of their class than to that of a reference.

    Homer et al., PLoS Genetics 2008, on features: the reference is every second outsider, which is then not scored. Of
    a class without a mean on either side nothing is known, and its samples score 0.
    """
    features, labels = victim.features(victim.outsiders, stage).flatten(1).double(), victim.outsiders.y
    known, scored = torch.arange(0, len(labels), 2), torch.arange(1, len(labels), 2)
    reference, sent = features.new_zeros(2, victim.net.classes, features.shape[1])
    for label, row in zip(rows.labels.tolist(), rows.rows.flatten(1).double(), strict=True):
        own = labels[known] == label
        if own.any():
            reference[label], sent[label] = features[known][own].mean(0), row

    def score(h: Tensor, y: Tensor) -> Tensor:
        return (h - reference[y]).pow(2).sum(1) - (h - sent[y]).pow(2).sum(1)

    members = victim.features(victim.members, stage).flatten(1).double()
    return score(members, victim.members.y), score(features[scored], labels[scored])

"""What a model reaches that has learned nothing: the level under which an accuracy says nothing."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from protofed.clients import RunContext, Score
from protofed.federation.evaluation import client_view, global_view

_POINTS, _PART = 0.02, 0.25
"""An accuracy this little above chance is still chance: two points, or a quarter of a chance that is small itself."""


def chance_levels(context: RunContext) -> dict[str, Any]:
    """Chance in both views, laid out as the accuracy is: the share of the most frequent class of each test set.

    `uniform` is what guessing all classes equally often reaches, whatever the test set.
    """
    dataset, partition = context.dataset, context.partition
    classes = len(dataset.classes)
    domains = {name: _most_frequent(domain.test.y, classes) for name, domain in dataset.domains.items()}
    tested = any(score.total for score in domains.values())
    return {
        "uniform": 1 / classes,
        "global": global_view(domains, partition.held_out) if tested else None,
        "personal": _personal(context, domains),
    }


def at_chance(accuracy: float, chance: float) -> bool:
    """Whether an accuracy is no better than chance."""
    return accuracy <= chance + min(_POINTS, _PART * chance)


def _personal(context: RunContext, domains: Mapping[str, Score]) -> dict[str, Any] | None:
    """On each client's own hold-out, or on the test set of its domain, as the personal view is scored."""
    partition, labels = context.partition, context.dataset.pooled_labels()
    if any(len(indices) for indices in partition.holdout.values()):
        classes = len(context.dataset.classes)
        own = {client: labels[torch.from_numpy(partition.holdout[client])] for client in partition.clients}
        return client_view({client: _most_frequent(y, classes) for client, y in own.items()})
    if not all(context.tested_on.values()):
        return None
    return client_view({client: domains[domain] for client, domain in context.tested_on.items()})


def _most_frequent(y: Tensor, classes: int) -> Score:
    """The score of always saying the most frequent class."""
    return Score(int(torch.bincount(y, minlength=classes).max()), len(y))

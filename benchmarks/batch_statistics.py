"""What averaged statistics of batch normalisation cost: a finished run's model with each domain's own in their place.

    python -m benchmarks.batch_statistics RUN [RUN ...] [--write]

FedAvg averages the running means and variances of clients whose images look different, and the averages fit nobody's.
Here every domain is tested twice: with the model as it is, and with statistics from the domain's own training images,
changed at random as they were in training: the black border of `crop` alone moves those of a white sketch far away.
No weight changes, and no label is used. RUN is the folder of a run that has a model for all, with its images at hand.
"""

from collections.abc import Sequence
from copy import deepcopy

import torch
from torch import Tensor, nn

from benchmarks.finished_runs import accuracy, as_in_training, by_domain, judge, run_title
from protofed.models import Split
from protofed.runs.opened import OpenRun


def with_statistics_of(model: Split, images: Sequence[Tensor]) -> Split:
    """The model with running statistics that are the mean over these batches of images."""
    adapted = deepcopy(model).eval()
    layers = [layer for layer in adapted.modules() if isinstance(layer, nn.BatchNorm2d)]
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # a mean over all batches, not a moving one
        layer.train()
    with torch.no_grad():
        for batch in images:
            adapted(batch)
    return adapted.eval()


def accuracies(path: str) -> dict[str, dict[str, float]]:
    """By statistics and domain: of the model as it is, and with the domain's own."""
    opened = OpenRun(path, with_data=True)
    model, domains = opened.run.model().eval(), opened.context.dataset.domains
    return {
        "averaged": {name: accuracy(opened, model, domain.test) for name, domain in domains.items()},
        "the domain's own": {
            name: accuracy(opened, with_statistics_of(model, as_in_training(opened, domain.train)), domain.test)
            for name, domain in domains.items()
        },
    }


def rows_of(path: str) -> list[list[str]]:
    """Two rows for a run: as it is, and with the domains' own statistics."""
    return [[run_title(path), statistics, *by_domain(found)] for statistics, found in accuracies(path).items()]


def main(arguments: Sequence[str] | None = None) -> str:
    """Judge the runs, print the table, and on demand write it."""
    return judge(
        "batch_statistics",
        "Averaged batch statistics",
        "Accuracy on each domain's test images after the last round, in %.",
        ["run", "statistics", "by domain", "mean"],
        rows_of,
        arguments,
    )


if __name__ == "__main__":
    main()

"""What a finished run would be credited with if it were tested on its domains' training images, too.

    python -m benchmarks.training_images RUN [RUN ...] [--write]

A code family of domain generalisation tests PACS on all images of a domain, among them those that clients trained on.
Here every domain is tested on its test images and on all of its images, with the averaged statistics of batch
normalisation and with its own, beside the share of all images that some client holds. RUN is the folder of a run that
has a model for all, with its images at hand.
"""

from collections.abc import Mapping, Sequence

import torch

from benchmarks.batch_statistics import with_statistics_of
from benchmarks.finished_runs import accuracy, as_in_training, by_domain, judge, run_title
from protofed.data import Domain, Images
from protofed.runs.opened import OpenRun

_TESTS, _ALL = "test images", "all images"
_AVERAGED, _OWN = "averaged", "the domain's own"


def accuracies(opened: OpenRun) -> dict[tuple[str, str], dict[str, float]]:
    """By statistics and what is tested on, of every domain."""
    model = opened.run.model().eval()
    found: dict[tuple[str, str], dict[str, float]] = {}
    for name, domain in opened.context.dataset.domains.items():
        adapted = with_statistics_of(model, as_in_training(opened, domain.train))
        for statistics, judged in {_AVERAGED: model, _OWN: adapted}.items():
            for tested, images in {_TESTS: domain.test, _ALL: all_images(domain)}.items():
                found.setdefault((statistics, tested), {})[name] = accuracy(opened, judged, images)
    return found


def all_images(domain: Domain) -> Images:
    """For training and for tests."""
    parts = domain.train, domain.test
    return Images(torch.cat([part.x for part in parts]), torch.cat([part.y for part in parts]))


def shares_trained_on(opened: OpenRun) -> Mapping[str, float]:
    """Of every domain's images, as many as some client holds."""
    partition, dataset = opened.context.partition, opened.context.dataset
    held = {index for client in partition.clients for index in partition.train[client].tolist()}
    return {
        name: len(held.intersection(dataset.offsets[name])) / (len(domain.train) + len(domain.test))
        for name, domain in dataset.domains.items()
    }


def rows_of(path: str) -> list[list[str]]:
    """Four rows for a run."""
    opened = OpenRun(path, with_data=True)
    trained_on, _ = by_domain(shares_trained_on(opened))
    return [
        [run_title(path), statistics, tested, *by_domain(found), "none" if tested == _TESTS else trained_on]
        for (statistics, tested), found in accuracies(opened).items()
    ]


def main(arguments: Sequence[str] | None = None) -> str:
    """Judge the runs, print the table, and on demand write it."""
    return judge(
        "training_images",
        "Tested on training images, too",
        "Accuracy of the model for all after the last round, in %.",
        ["run", "statistics", "tested on", "by domain", "mean", "of which trained on"],
        rows_of,
        arguments,
    )


if __name__ == "__main__":
    main()

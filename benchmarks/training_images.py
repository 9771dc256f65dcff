"""What a finished run would be credited with if it were tested on its domains' training images, too.

    python -m benchmarks.training_images RUN [RUN ...] [--write]

A code family of domain generalisation tests PACS on all images of a domain, among them those that clients trained on.
Here every domain is tested twice, on its test images and on all of its images, beside the share of the latter that
some client holds. RUN is the folder of a run that has a model for all, with its images at hand.
"""

from collections.abc import Sequence

import torch

from benchmarks.finished_runs import accuracy, by_domain, judge, run_title
from protofed.data import Images
from protofed.runs.opened import OpenRun


def accuracies(path: str) -> dict[str, tuple[float, float, float]]:
    """By domain: on its test images, on all of its images, and the share of these that clients trained on."""
    opened = OpenRun(path, with_data=True)
    model, dataset, partition = opened.run.model().eval(), opened.context.dataset, opened.context.partition
    held = {index for client in partition.clients for index in partition.train[client].tolist()}
    found = {}
    for name, domain in dataset.domains.items():
        everything = Images(torch.cat([domain.train.x, domain.test.x]), torch.cat([domain.train.y, domain.test.y]))
        trained_on = len(held.intersection(dataset.offsets[name])) / len(everything)
        found[name] = accuracy(opened, model, domain.test), accuracy(opened, model, everything), trained_on
    return found


def rows_of(path: str) -> list[list[str]]:
    """Two rows for a run: on test images, and on all."""
    found = accuracies(path)
    on_tests, on_all, trained_on = ({name: each[index] for name, each in found.items()} for index in range(3))
    return [
        [run_title(path), "test images", *by_domain(on_tests), "none"],
        [run_title(path), "all images", *by_domain(on_all), by_domain(trained_on)[0]],
    ]


def main(arguments: Sequence[str] | None = None) -> str:
    """Judge the runs, print the table, and on demand write it."""
    return judge(
        "training_images",
        "Tested on training images, too",
        "Accuracy of the model for all after the last round, in %.",
        ["run", "tested on", "by domain", "mean", "of which trained on"],
        rows_of,
        arguments,
    )


if __name__ == "__main__":
    main()

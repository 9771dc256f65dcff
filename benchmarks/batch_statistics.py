"""What averaged statistics of batch normalisation cost: a finished run's model with each domain's own in their place.

    python -m benchmarks.batch_statistics RUN [RUN ...] [--write]

FedAvg averages the running means and variances of clients whose images look different, and the averages fit nobody's.
Here every domain is tested twice: with the model as it is, and with statistics from the domain's own training images.
No weight changes, and no label is used. RUN is the folder of a run that has a model for all, with its images at hand.
"""

import argparse
import os
import time
from collections.abc import Sequence
from copy import deepcopy
from statistics import mean

import torch
from torch import Tensor, nn

from benchmarks import RESULTS, report, table
from protofed.data import Images
from protofed.models import Split
from protofed.runs.opened import OpenRun, batches


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


def accuracies(path: str) -> dict[str, tuple[float, float]]:
    """By domain: of the model as it is, and with the domain's own statistics."""
    opened = OpenRun(path, with_data=True)
    model = opened.run.model().eval()

    def normalised(images: Images) -> list[Tensor]:
        return [opened.normalised(batch) for batch in batches(images.x)]

    def accuracy(judged: Split, images: Images) -> float:
        with torch.no_grad():
            predicted = torch.cat([judged(batch).argmax(1) for batch in normalised(images)])
        return float((predicted == images.y).double().mean())

    found = {}
    for name, domain in opened.context.dataset.domains.items():
        adapted = with_statistics_of(model, normalised(domain.train))
        found[name] = accuracy(model, domain.test), accuracy(adapted, domain.test)
    return found


def rows_of(path: str) -> list[list[str]]:
    """Two rows for a run: as it is, and with the domains' own statistics."""
    config = OpenRun(path).config
    named = (
        config["method"]["name"],
        config["data"]["name"],
        config["partition"]["protocol"],
        f"seed {config['seed']}",
    )
    found = accuracies(path)
    rows = []
    for index, statistics in enumerate(("averaged", "the domain's own")):
        figures = {domain: 100 * both[index] for domain, both in found.items()}
        by_domain = ", ".join(f"{domain} {figure:.1f}" for domain, figure in figures.items())
        rows.append([", ".join(named), statistics, by_domain, f"{mean(figures.values()):.1f}"])
    return rows


def main(arguments: Sequence[str] | None = None) -> str:
    """Judge the runs, print the table, and on demand write it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.batch_statistics", description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--write", action="store_true", help="write the table to benchmarks/results")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    begun, load = time.perf_counter(), os.getloadavg()[0]
    rows = [row for path in chosen.runs for row in rows_of(path)]
    told = "Accuracy on each domain's test images after the last round, in %."
    body = f"{told}\n\n{table(['run', 'statistics', 'by domain', 'mean'], rows)}"
    command = "python -m benchmarks.batch_statistics RUN ... --write"
    page = report("Averaged batch statistics", command, body, time.perf_counter() - begun, load)
    print(page)
    if chosen.write:
        (RESULTS / "batch_statistics.md").write_text(page)
    return page


if __name__ == "__main__":
    main()

"""Finished runs judged anew on images of their domains: what the benchmarks about that share."""

import argparse
import os
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import mean

import torch
from torch import Tensor

from benchmarks import RESULTS, report, table
from protofed.data import Images
from protofed.models import Split
from protofed.runs.opened import OpenRun, batches


def normalised(opened: OpenRun, images: Images) -> list[Tensor]:
    """In batches, as the model wants them."""
    return [opened.normalised(batch) for batch in batches(images.x)]


def as_in_training(opened: OpenRun, images: Images) -> list[Tensor]:
    """The same, changed at random as clients change them: what layers of normalisation see while they train."""
    changed = opened.context.augment or (lambda x, _: x)
    rng = torch.Generator().manual_seed(opened.run.seed)
    return [opened.normalised(changed(batch, rng)) for batch in batches(images.x)]


def accuracy(opened: OpenRun, model: Split, images: Images) -> float:
    """Share of the images that a model gets right."""
    with torch.no_grad():
        predicted = torch.cat([model(batch).argmax(1) for batch in normalised(opened, images)])
    return float((predicted == images.y).double().mean())


def run_title(path: str) -> str:
    """Which run it is, in words."""
    config = OpenRun(path).config
    plan = config["plan"]
    named = config["method"]["name"], config["data"]["name"], config["partition"]["protocol"]
    trained = f"{len(plan['epochs'])} rounds of {max(plan['epochs'])} {plan['unit']}"
    return ", ".join([*named, trained, str(config["data"]["augment"]).replace(",", " "), f"seed {config['seed']}"])


def by_domain(shares: Mapping[str, float]) -> list[str]:
    """Two cells, in percent: every domain's figure, and their mean."""
    told = ", ".join(f"{domain} {100 * share:.1f}" for domain, share in shares.items())
    return [told, f"{100 * mean(shares.values()):.1f}"]


def judge(
    name: str,
    title: str,
    told: str,
    columns: Sequence[str],
    rows_of: Callable[[str], list[list[str]]],
    arguments: Sequence[str] | None,
) -> str:
    """The program of such a benchmark: judge the runs, print the table, and on demand write it."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=title)
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--write", action="store_true", help="write the table to benchmarks/results")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    begun, load = time.perf_counter(), os.getloadavg()[0]
    rows = [row for path in chosen.runs for row in rows_of(path)]
    body = f"{told}\n\n{table(list(columns), rows)}"
    page = report(title, f"python -m benchmarks.{name} RUN ... --write", body, time.perf_counter() - begun, load)
    print(page)
    if chosen.write:
        (RESULTS / f"{name}.md").write_text(page)
    return page

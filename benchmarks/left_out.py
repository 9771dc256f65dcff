"""One exchange beside training of the same head, where the images are: in the domains trained on, and in one left out.

    python -m benchmarks.left_out --pacs IMAGES/pacs --fundus IMAGES/dr_fundus --out runs/left-out [--write]

PACS by accuracy, healthy against diseased fundus photographs by AUC. Every domain is left out once. Runs that are found
in the folder are not repeated.
"""

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import protofed
from benchmarks import RESULTS, report, table

CLOSED_FORMS = ("fedncm", "fed3r", "fedcgs", "fedcof", "protoridge")
TRAINED = ("fedavg", "feddyn")
_HEAD: dict[str, Any] = {"train": "head", "views": 1, "rounds": 10, "lr": 0.03, "evaluate_every": 1000}
_KNOBS = {"fedcof": {"parts": 8}}


@dataclass(frozen=True)
class Images:
    """A data set, who holds how much of it, and what it is judged by."""

    title: str
    domains: tuple[str, ...]
    clients: int
    """Of each domain."""
    metric: str
    options: dict[str, Any]


PACS = Images("PACS, accuracy in %", ("art_painting", "cartoon", "photo", "sketch"), 2, "accuracy", {"fraction": 0.3})
FUNDUS = Images(
    "Fundus, healthy or diseased, AUC in %",
    ("aptos", "eyepacs", "idrid"),
    1,
    "auc",
    {"labels": "No DR=healthy,Mild=diseased,Moderate=diseased,Severe=diseased,Proliferative=diseased"},
)


def score(images: Images, data: str, method: str, left: str | None, seed: int, out: Path) -> dict[str, float]:
    """By domain: of all where nobody is left out, else of the one that is."""
    folder = out / images.metric / f"{method}-{left or 'all'}-{seed}"
    if not (folder / "summary.json").exists():
        trained = [domain for domain in images.domains if domain != left]
        protofed.run(
            method,
            data,
            out=folder,
            seed=seed,
            protocol=f"leave-out={left}" if left else "domains",
            clients=",".join(f"{domain}={images.clients}" for domain in trained),
            engine="loop",
            set=_KNOBS.get(method, {}),
            **images.options,
            **(_HEAD if method in TRAINED else {}),
        )
    found = protofed.Run(folder).summary["metrics"]["global"]
    return {domain: found[domain][images.metric]["value"] for domain in ([left] if left else images.domains)}


def rows_of(images: Images, data: str, seeds: Sequence[int], out: Path) -> Iterator[list[str]]:
    """A row for each method: every domain in and left out, and the means."""
    for method in (*CLOSED_FORMS, *TRAINED):
        inside = [score(images, data, method, None, seed, out) for seed in seeds]
        outside = [
            {left: score(images, data, method, left, seed, out)[left] for left in images.domains} for seed in seeds
        ]
        cells = [_cell([scores[domain] for scores in view]) for view in (inside, outside) for domain in images.domains]
        means = [_cell([mean(scores.values()) for scores in view], spread=True) for view in (inside, outside)]
        yield [method, *cells[: len(images.domains)], means[0], *cells[len(images.domains) :], means[1]]
        print(images.title, method, *means, flush=True)


def _cell(values: Sequence[float], spread: bool = False) -> str:
    told = f"{100 * mean(values):.1f}"
    return f"{told} ± {100 * stdev(values):.1f}" if spread and len(values) > 1 else told


def main(arguments: Sequence[str] | None = None) -> str:
    """Run what is missing, print the tables, and on demand write them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.left_out", description=__doc__.splitlines()[0])
    parser.add_argument("--pacs", required=True, help="class folders of PACS")
    parser.add_argument("--fundus", required=True, help="class folders of the fundus photographs")
    parser.add_argument("--out", required=True, help="the folder of the runs")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--write", action="store_true", help="write the tables to benchmarks/results/left_out.md")
    chosen = parser.parse_args(arguments)
    begun, load = time.perf_counter(), os.getloadavg()[0]
    seeds = [int(seed) for seed in chosen.seeds.split(",")]
    parts = [_settings()]
    for images, data in ((PACS, chosen.pacs), (FUNDUS, chosen.fundus)):
        heading = ["method", *images.domains, "mean", *(f"to {domain}" for domain in images.domains), "mean left out"]
        rows = list(rows_of(images, data, seeds, Path(chosen.out)))
        parts.append(f"{images.title}:\n\n{table(heading, rows)}")
    command = f"python -m benchmarks.left_out --pacs PACS --fundus FUNDUS --out RUNS --seeds {chosen.seeds} --write"
    page = report("In the domains, and left out", command, "\n\n".join(parts), time.perf_counter() - begun, load)
    print(page)
    if chosen.write:
        (RESULTS / "left_out.md").write_text(page)
    return page


def _settings() -> str:
    return (
        "EfficientNet-Lite0 with ImageNet weights, frozen; PACS at 160 pixels, two clients of each domain with 30 % of "
        "its images each; fundus photographs at 224, a client for each site with all of its images. fedcof with "
        "parts=8. fedavg and feddyn train the head for 10 rounds of one epoch (SGD 0.03); methods that pull at "
        "features are fedavg behind a frozen backbone. Mean ± standard deviation over seeds; first the domains that "
        "were trained on, then each as the one left out."
    )


if __name__ == "__main__":
    main()

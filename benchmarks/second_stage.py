"""A second stage after the ridge head: what prototypes across domains add on a domain that nobody trained on.

    python -m benchmarks.second_stage --data IMAGES/pacs --out runs/second-stage [--seeds 0,1,2] [--write]

Every domain is left out once. The clients of the others make a ridge head (protoridge), and then train the last stage
of the network, the last two, or adapters around the last, three rounds long (prototune): against the prototypes of
their domains, the head, or other targets. In rows that say "if sites gain", sites that were left out of the training
decide how many of these rounds are kept; test images never do. Runs that are found are not repeated.
"""

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from safetensors.torch import load_file

import protofed
from benchmarks import RESULTS, report, table
from protofed.text import percent

DOMAINS = ("art_painting", "cartoon", "photo", "sketch")
_STAGE: dict[str, Any] = {"train": "last", "views": 4}
_TWO: dict[str, Any] = {"train": "stages=2", "views": 4}
_ADAPTERS: dict[str, Any] = {"train": "head", "views": 4, "lr": 1e-3}


def _tuned(stage: dict[str, Any], **knobs: Any) -> dict[str, Any]:
    return {"method": "prototune", "set": knobs, **stage}


VARIANTS: dict[str, dict[str, Any]] = {
    "ridge": {"method": "protoridge", "set": {"balance": "domain"}},
    "prototypes": _tuned(_STAGE, folds=1),
    "head": _tuned(_STAGE, folds=1, target="head"),
    "both": _tuned(_STAGE, folds=1, target="both"),
    "alignment": _tuned(_STAGE, folds=1, target="alignment"),
    "prototypes and MixUp": _tuned(_STAGE, folds=1, mixup=0.1),
    "prototypes, adapters": _tuned(_ADAPTERS, folds=1, adapters=2),
    "prototypes, two stages": _tuned(_TWO, folds=1),
    "prototypes, if sites gain": _tuned(_STAGE),
    "prototypes, two stages, if sites gain": _tuned(_TWO),
}


def main(arguments: Sequence[str] | None = None) -> dict[str, dict[str, list[float]]]:
    """Run what is missing, print the table, and on demand write it; accuracies by variant and domain, seed by seed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.second_stage", description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="class folders of PACS")
    parser.add_argument("--out", required=True, help="the folder of the runs")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--variants", default=";".join(VARIANTS))
    parser.add_argument("--write", action="store_true", help="write the table to benchmarks/results/second_stage.md")
    chosen = parser.parse_args(arguments)
    begun, load = time.perf_counter(), os.getloadavg()[0]
    variants = {name: VARIANTS[name] for name in chosen.variants.split(";")}
    seeds = [int(seed) for seed in chosen.seeds.split(",")]
    compared = {left: _compared(left, variants, seeds, chosen.data, Path(chosen.out)) for left in DOMAINS}
    accuracies = {
        name: {left: _accuracies(compared[left], name, left, Path(chosen.out) / left) for left in DOMAINS}
        for name in variants
    }
    rows = [_row(name, accuracies[name], accuracies["ridge"]) for name in variants]
    kept = [
        f"- {name}, rounds kept: "
        + "; ".join(f"{left} {_kept(compared[left], name, Path(chosen.out) / left)}" for left in DOMAINS)
        for name, settings in variants.items()
        if settings["method"] == "prototune" and "folds" not in settings["set"]
    ]
    columns = ["trained on", *DOMAINS, "mean", "std", "against ridge", "seeds"]
    command = f"python -m benchmarks.second_stage --data PACS --out RUNS --seeds {chosen.seeds}"
    body = "\n".join([_settings(), "", table(columns, rows), "", *kept])
    page = report("A second stage, on domains that were left out", command, body, time.perf_counter() - begun, load)
    print(page)
    if chosen.write:
        (RESULTS / "second_stage.md").write_text(page)
    return accuracies


def _compared(left: str, variants: dict[str, Any], seeds: list[int], data: str, out: Path) -> protofed.Comparison:
    others = ",".join(f"{domain}=2" for domain in DOMAINS if domain != left)
    return protofed.compare(
        variants,
        out=out / left,
        seeds=seeds,
        data=data,
        protocol=f"leave-out={left}",
        clients=others,
        fraction=0.3,
        evaluate_every=1000,
        engine="loop",
    )


def _settings() -> str:
    return (
        "PACS at 160 pixels, EfficientNet-Lite0 with ImageNet weights. Three domains of two clients with 30 % of their "
        "domain's images each; accuracy in % on the test images of the fourth. Domains balance. prototune: "
        "the last stage, unless said otherwise, 3 rounds of one epoch, Adam 3e-4 (adapters 1e-3), four cached views of "
        "each image."
    )


def _accuracies(comparison: protofed.Comparison, name: str, left: str, folder: Path) -> list[float]:
    runs = [protofed.Run(folder / run) for run in comparison.content["methods"][name]["runs"]]
    return [run.rounds[-1]["accuracy"]["global"][left] for run in runs]


def _kept(comparison: protofed.Comparison, name: str, folder: Path) -> str:
    """How many rounds sites liked, seed by seed."""
    states = [
        load_file(next((folder / run / "checkpoint").glob("server-*.safetensors")))
        for run in comparison.content["methods"][name]["runs"]
    ]
    return ", ".join(str(int(state["shared/kept"])) for state in states)


def _row(name: str, own: dict[str, list[float]], ridge: dict[str, list[float]]) -> list[str]:
    by_seed = [mean(values) for values in zip(*own.values(), strict=True)]
    against = [mean(values) for values in zip(*ridge.values(), strict=True)]
    gain = mean(by_seed) - mean(against[: len(by_seed)])
    spread = percent(stdev(by_seed)) if len(by_seed) > 1 else "-"
    gained = "-" if own is ridge else f"{100 * gain:+.2f}"
    each = [percent(mean(values)) for values in own.values()]
    return [name, *each, percent(mean(by_seed)), spread, gained, str(len(by_seed))]


if __name__ == "__main__":
    main()

"""Methods on one pretrained backbone: accuracy per domain, bytes and processor time, over seeds.

    python -m benchmarks.pretrained --data IMAGES/office_caltech10 --out runs/pretrained [--seeds 0,1,2] [--write]

All of them start from EfficientNet-Lite0 with ImageNet weights, and train its last stage and the head (`--train last`),
or what their paper says. Runs that are found in the folder are not repeated.
"""

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import protofed
from benchmarks import RESULTS, report, table
from protofed.text import percent, size

# A server's head starts from class means; those that keep their heads to themselves learn them, with a larger rate.
_STARTED: dict[str, Any] = {"head": "closed-form", "lr": 0.003}
_ALONE: dict[str, Any] = {"lr": 0.01, "rounds": 5, "epochs": 2}
_ADAM: dict[str, Any] = {"optimizer": "adam", "lr": 0.001, "epochs": 2}
METHODS: dict[str, dict[str, Any]] = {
    "fedavg": _STARTED,
    "fedproto_avg": _STARTED,
    "i2pfl": _STARTED,
    "fpl": _STARTED,
    "fedmp": _STARTED,
    "conffedproto": _ALONE,
    "fedadapter": {**_STARTED, "optimizer": "sgd", "lr": 0.01},
    "fedadapterproto": _ADAM,
}


def main(arguments: Sequence[str] | None = None) -> protofed.Comparison:
    """Run what is missing, print the table, and on demand write it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pretrained", description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="class folders of Office-Caltech-10 at 224 pixels")
    parser.add_argument("--out", required=True, help="the folder of the runs")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--write", action="store_true", help="write the table to benchmarks/results/pretrained.md")
    chosen = parser.parse_args(arguments)
    begun, load = time.perf_counter(), os.getloadavg()[0]
    variants = {name: {"method": name, **METHODS[name]} for name in chosen.methods.split(",")}
    comparison = protofed.compare(
        variants,
        out=chosen.out,
        seeds=[int(seed) for seed in chosen.seeds.split(",")],
        data=chosen.data,
        clients="caltech=3,amazon=2,webcam=1,dslr=4",
        fraction=0.2,
        rounds=3,
        train="last",
        views=1,
    )
    rows = [
        _row(name, entry, _processor_seconds(comparison.path, entry["runs"]))
        for name, entry in comparison.content["methods"].items()
        if entry["seeds"]
    ]
    columns = ["method", "view", "amazon", "caltech", "dslr", "webcam", "average", "std", "seeds", "up", "CPU s"]
    command = f"python -m benchmarks.pretrained --data OFFICE --out RUNS --seeds {chosen.seeds}"
    body = f"{_settings()}\n\n{table(columns, rows)}"
    page = report("Methods on one pretrained backbone", command, body, time.perf_counter() - begun, load)
    print(page)
    if chosen.write:
        (RESULTS / "pretrained.md").write_text(page)
    return comparison


def _settings() -> str:
    """What differs between the methods, in words."""
    return (
        "Office-Caltech-10, ten clients with a fifth of their domain each, 224 pixels, `--train last`, one view. "
        "Global methods: head from class means, 3 rounds of one epoch, lr 0.003 (fedadapter 0.01). conffedproto, whose "
        "clients keep their heads: 5 rounds of two epochs, lr 0.01. fedadapterproto: 3 rounds of two epochs, Adam "
        "0.001. Accuracy in %, mean of the evaluated rounds; CPU seconds of a run, where it was not resumed."
    )


def _processor_seconds(folder: Path, runs: Sequence[str]) -> str:
    """In the mean over the runs of which it is known."""
    known = [protofed.Run(folder / run).summary["seconds"].get("cpu") for run in runs]
    told = [seconds for seconds in known if seconds is not None]
    return f"{mean(told):.0f}" if told else "-"


def _row(name: str, entry: Any, processor_seconds: str) -> list[str]:
    view = "personal" if entry["global"] is None else "global"
    scores = entry[view]
    domains = [percent(scores["per_domain"][domain]["mean"]) for domain in scores["per_domain"]] or ["-"] * 4
    average = scores["average"]
    return [
        name,
        view,
        *domains,
        percent(average["mean"]),
        percent(average["std"]),
        str(len(entry["seeds"])),
        size(entry["bytes"]["up"]["total"]),
        processor_seconds,
    ]


if __name__ == "__main__":
    main()

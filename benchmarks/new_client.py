"""A newcomer to a finished federation: what its prototypes are worth to a client with few images.

    python -m benchmarks.new_client --data-root DATA --out runs/new-client [--seeds 0,1,2,3,4] [--write]

Ten clients train on DATA/digits/mnist.npz as in ConfFedProto's label-skew suite, without the images of a newcomer who
holds a few images of four digits. It then joins with a network of its own start. All newcomers of a seed have the same
images and take as many steps; `alone` is without the pull towards prototypes, and `swapped` is pulled to the prototype
of the next digit. Federations that are found in the folder are not repeated.
"""

import argparse
import datetime
import os
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

import protofed
from benchmarks import RESULTS, cpu_seconds, report, table
from protofed.data.npz import read_arrays
from protofed.inference.join import JoinResult, join
from protofed.records import ClassTable, decode, encode
from protofed.runs.opened import OpenRun
from protofed.seeding import numpy_generator
from protofed.studies.convergence import Convergence
from protofed.studies.tables.preset import find_preset
from protofed.studies.tables.results import ResultsContent, RunRecord, as_texts, save_results
from protofed.system import describe_machine
from protofed.text import percent

PAGES = Path(__file__).parents[1] / "docs" / "results" / "data"
FEDERATION = find_preset("conffedproto.confidence").run_options("mnist", "lite")
CLASSES, SIZES = 4, (20, 100)
TESTED = 150
"""Test images of each of the newcomer's classes."""
ROUNDS, SHOWN, LAST = 60, (1, 5, 10, 20, 40, 60), 5
_OWN_START = 1000
"""Added to the seed: with that of the federation the newcomer would start from the weights its clients started from."""


@dataclass(frozen=True)
class Row:
    """Whose prototypes a newcomer gets, and what it does otherwise than the others."""

    method: str
    options: dict[str, Any] = field(default_factory=dict)
    swapped: bool = False

    @property
    def settings(self) -> dict[str, Any]:
        plain = {key: value for key, value in self.options.items() if key != "set"}
        return {**plain, **self.options.get("set", {}), **({"swapped": True} if self.swapped else {})}


_WITHOUT = {"set": {"lam": 0}}
ROWS = {
    "alone": Row("conffedproto", _WITHOUT),
    "fedproto": Row("fedproto"),
    "conffedproto": Row("conffedproto"),
    "conffedproto, swapped": Row("conffedproto", swapped=True),
    "alone, cnn": Row("conffedproto", {"model": "cnn", **_WITHOUT}),
    "conffedproto, cnn": Row("conffedproto", {"model": "cnn"}),
    "conffedproto, cnn, swapped": Row("conffedproto", {"model": "cnn"}, swapped=True),
}


def write_images(source: Path, seed: int, folder: Path) -> tuple[Path, dict[int, Path]]:
    """The federation's images and, by size, those of the newcomer; the smaller newcomer holds a part of the larger."""
    arrays = read_arrays(source)
    rng = numpy_generator(seed, "newcomer")
    classes = rng.choice(len(arrays["classes"]), CLASSES, replace=False)
    drawn = {
        part: [rng.permutation(np.flatnonzero(arrays[f"y_{part}"] == label))[:count] for label in classes]
        for part, count in (("train", max(SIZES) // CLASSES), ("test", TESTED))
    }
    tested = np.concatenate(drawn["test"])

    def written(name: str, train: Any, test: Any) -> Path:
        (folder / name).mkdir(parents=True, exist_ok=True)
        chosen = {f"{kind}_{part}": arrays[f"{kind}_{part}"] for kind in "xy" for part in ("train", "test")}
        chosen = {key: array[train if key.endswith("train") else test] for key, array in chosen.items()}
        np.savez(folder / name / "mnist.npz", classes=arrays["classes"], **chosen)
        return folder / name

    others = {part: np.delete(np.arange(len(arrays[f"y_{part}"])), np.concatenate(drawn[part])) for part in drawn}
    sizes = {
        size: written(f"newcomer-{size}", np.concatenate([each[: size // CLASSES] for each in drawn["train"]]), tested)
        for size in SIZES
    }
    return written("federation", others["train"], others["test"]), sizes


def federation(method: str, data: Path, seed: int, out: Path) -> Path:
    """The folder of a federation's run."""
    folder = out / method
    if not (folder / "summary.json").exists():
        protofed.run(method, out=folder, seed=seed, engine="loop", **{**FEDERATION, "data": str(data)})
    return folder


def swapped(run: Path, folder: Path) -> Path:
    """A copy of a run that sends newcomers the prototype of the next class for every class."""
    copy = folder / f"{run.name}-swapped"
    shutil.copytree(run, copy)
    opened = OpenRun(run)
    down: Any = decode(opened.broadcast(), opened.templates.down, "server")
    turned = replace(down, G=ClassTable(down.G.rows.roll(1, 0), down.G.count.roll(1, 0)))
    (copy / "broadcast.safetensors").write_bytes(encode(turned, "server").blob)
    return copy


def joined(row: Row, runs: Mapping[str, Path], data: Path, seed: int, rounds: int) -> tuple[float, JoinResult]:
    """CPU seconds of a newcomer, with its scoring, and how it did."""
    with tempfile.TemporaryDirectory(prefix="protofed-newcomer-") as temporary:
        folder = Path(temporary)
        run = swapped(runs[row.method], folder) if row.swapped else runs[row.method]
        options = {"rounds": rounds, "seed": seed + _OWN_START, "to_the_end": True, **row.options}
        seconds, result = cpu_seconds(lambda: join(run, str(data), out=folder / "newcomer", **options))
    return seconds, result


def record(name: str, size: int, seed: int, seconds: float, result: JoinResult) -> RunRecord:
    """A newcomer as results files have runs: the mean of the last rounds.

    What a finished federation sends never changes, so one download is enough, and nobody waits for an upload.
    """
    accuracy = [each.accuracy for each in result.rounds]
    settled = Convergence([each.round for each in result.rounds], accuracy, []).convergence_round()
    alone = ROWS[name].settings.get("lam") == 0
    return {
        "row": name,
        "condition": f"{size} images",
        "seed": seed,
        "accuracy": {"personal": {"value": round(mean(accuracy[-LAST:]), 6), "parts": {}}},
        "auc": {},
        "leakage": {},
        "explanations": {},
        "curve": {},
        "converged": {} if settled is None else {"personal": settled},
        "bytes": {"up": 0, "down": 0 if alone else result.rounds[0].down},
        "cpu_seconds": round(seconds, 1),
        "rounds": len(result.rounds),
        "date": datetime.date.today().isoformat(),
        "machine": describe_machine(),
    }


def main(arguments: Sequence[str] | None = None) -> ResultsContent:
    """Run what is missing, write the results file, print accuracies by round, and on demand write these, too."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.new_client", description=__doc__.splitlines()[0])
    parser.add_argument("--data-root", required=True, type=Path, help="the folder that has digits/mnist.npz")
    parser.add_argument("--out", required=True, type=Path, help="the folder of images and federations")
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--rounds", default=ROUNDS, type=int, help="of the newcomer")
    parser.add_argument("--results", default=PAGES, type=Path, help="the folder of the results file")
    parser.add_argument("--write", action="store_true", help="write rounds to benchmarks/results/new_client.md")
    chosen = parser.parse_args(arguments)
    begun, load = time.perf_counter(), os.getloadavg()[0]
    records: list[RunRecord] = []
    curves: dict[tuple[int, str], list[list[float]]] = {(size, name): [] for size in SIZES for name in ROWS}
    for seed in map(int, chosen.seeds.split(",")):
        out = chosen.out / str(seed)
        others, newcomers = write_images(chosen.data_root / "digits" / "mnist.npz", seed, out)
        runs = {method: federation(method, others, seed, out) for method in {row.method for row in ROWS.values()}}
        for size, name in curves:
            seconds, result = joined(ROWS[name], runs, newcomers[size], seed, chosen.rounds)
            records.append(record(name, size, seed, seconds, result))
            curves[size, name].append([each.accuracy for each in result.rounds])
            print(seed, size, name, percent(records[-1]["accuracy"]["personal"]["value"]), flush=True)
    command = f"python -m benchmarks.new_client --data-root DATA --out OUT --seeds {chosen.seeds}"
    content: ResultsContent = {
        "preset": "conffedproto.new_client",
        "title": "A new client with few images joins a finished federation",
        "dataset": "mnist",
        "scale": "lite",
        "command": command,
        "options": {"set": {}},
        "common": as_texts(FEDERATION),
        "date": datetime.date.today().isoformat(),
        "machine": describe_machine(),
        "versions": protofed.Run(runs["conffedproto"]).config["versions"],
        "baseline": "alone",
        "value": "average",
        "conditions": [f"{size} images" for size in SIZES],
        "domains": [],
        "rows": {name: {"method": row.method, "settings": row.settings, "paper": None} for name, row in ROWS.items()},
        "runs": records,
    }
    save_results(content, chosen.results)
    shown = [round for round in SHOWN if round <= chosen.rounds]
    rows = [
        [f"{size} images", name, *(percent(mean(curve[round - 1] for curve in seeds)) for round in shown)]
        for (size, name), seeds in curves.items()
    ]
    body = table(["newcomer", "row", *(f"round {round}" for round in shown)], rows)
    about = f"Accuracy in % after single rounds of the newcomer, mean over seeds; {CLASSES} classes."
    page = report("A new client", command, f"{about}\n\n{body}", time.perf_counter() - begun, load)
    print(page)
    if chosen.write:
        (RESULTS / "new_client.md").write_text(page)
    return content


if __name__ == "__main__":
    main()

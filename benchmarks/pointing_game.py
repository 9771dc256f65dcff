"""Do explanations point at the disease? On images with planted lesions, whose places are known.

    python -m benchmarks.pointing_game [--methods fedadapterproto,protoridge] [--seeds 0,1,2] [--quick] [--write]
                                       [--keep FOLDER]

A backbone is pretrained on the generated set's atlas. Then three sites train part prototypes on their own images
(fedadapterproto), and every client explains its own site's test images; or the sites send statistics once (protoridge),
and the head of all explains everybody's by what every place adds to its logits. Over the diseased images that are
recognised: how often the box of the evidence that spoke most holds the middle of the lesion, and how often a random box
of the same size does.
"""

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

import protofed
from benchmarks import RESULTS, report, table
from protofed.data.images import to_size
from protofed.data.lesions import ATLAS, CLASSES, SIDE, SITES, draw_images, load_lesions
from protofed.explain.evidence import explain_with, nobody_trained
from protofed.explain.explanation import Explanation
from protofed.explain.maps import random_box
from protofed.runs.opened import GLOBAL, OpenRun
from protofed.runs.pretrain import pretrain
from protofed.seeding import numpy_generator

HIT_GOAL, CHANCE_GOAL = 0.8, 0.2


@dataclass(frozen=True)
class Work:
    """What is trained. Positions of a ResNet-10 see 49 pixels of 64; of a local one 19, so that they tell places."""

    image_size: int = SIDE
    pretraining: int = 10
    rounds: int = 8
    width: int = 8

    @property
    def settings(self) -> dict[str, object]:
        return {"model.width": self.width, "model.local": True}

    @property
    def options(self) -> dict[str, object]:
        return {
            "model": "resnet10",
            "image_size": self.image_size,
            "engine": "loop",
            "optimizer": "adam",
            "lr": 0.003,
            "batch": 16,
        }


QUICK = Work(image_size=16, pretraining=1, rounds=1, width=4)


@dataclass(frozen=True)
class Outcome:
    """One method and seed: shares over all clients."""

    method: str
    seed: int
    accuracy: float
    hits: float
    chance: float
    images: int


def backbone(work: Work, folder: Path) -> Path:
    """Weights of a network that has seen the atlas only."""
    out = folder / "backbone.safetensors"
    if not out.exists():
        settings = {**work.settings, "data.augment": "flip,vflip"}
        chosen = {**work.options, "schedule": "cosine", "evaluate_every": work.pretraining, "set": settings}
        pretrain("lesions", domains=ATLAS, out=out, epochs=work.pretraining, **chosen)
    return out


def play(work: Work, method: str, seed: int, weights: Path, folder: Path) -> Outcome:
    """Train the sites, unless their run was kept, and let every client explain its own test images."""
    out = folder / f"{method}-seed{seed}"
    own = {"prototype_dim": 32} if method == "fedadapterproto" else {}
    done = protofed.run(
        method,
        "lesions",
        domains=",".join(SITES),
        weights=str(weights),
        rounds=work.rounds,
        evaluate_every=work.rounds,
        seed=seed,
        set={**work.settings, **own},
        out=out,
        resume=(out / "run.json").exists(),
        **work.options,
    )
    opened = OpenRun(done.path)
    size = (work.image_size, work.image_size)
    hits: list[bool] = []
    chance: list[float] = []
    right: list[bool] = []
    for client, site in opened.domains.items():
        test = load_lesions().domains[site].test
        asked = GLOBAL if nobody_trained(opened) else client
        explained = explain_with(opened, asked, to_size(test.x, size), top=1)
        correct = [view.predicted == label for view, label in zip(explained, test.y.tolist(), strict=True)]
        ill = [i for i, is_right in enumerate(correct) if is_right and CLASSES[int(test.y[i])] == "diseased"]
        places = draw_images(site, "test")[2][ill] * (work.image_size / SIDE)
        rng = numpy_generator(seed, "pointing", client)
        found, random = pointing_game([explained[i] for i in ill], places, size, rng)
        hits, chance, right = hits + found, chance + random, right + correct
    return Outcome(method, seed, float(np.mean(right)), _share(hits), _share(chance), len(hits))


def pointing_game(
    explanations: Sequence[Explanation],
    places: NDArray[np.float64],
    size: tuple[int, int],
    rng: np.random.Generator,
    randoms: int = 20,
) -> tuple[list[bool], list[float]]:
    """For each image whether the box holds the place, and the share of random boxes of its size that do.

    A flat map has no box and misses.
    """
    hits: list[bool] = []
    by_chance: list[float] = []
    for explanation, (row, column) in zip(explanations, places, strict=True):
        box = explanation.strongest.box
        hits.append(box is not None and box.contains(row, column))
        if box is not None:
            tried = [random_box(box, size, rng).contains(row, column) for _ in range(randoms)]
            by_chance.append(sum(tried) / randoms)
    return hits, by_chance


def _share(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else 0.0


def main(arguments: Sequence[str] | None = None) -> list[Outcome]:
    """Play for every seed, print, and on demand write the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pointing_game", description=__doc__.splitlines()[0])
    parser.add_argument("--methods", default="fedadapterproto,protoridge", help="which to let explain")
    parser.add_argument("--seeds", default="0,1,2", help="for example 0,1,2")
    parser.add_argument("--quick", action="store_true", help="a tiny network, one round: does it work at all?")
    parser.add_argument("--keep", type=Path, help="keep backbone and runs in this folder, and use those in it")
    parser.add_argument("--write", action="store_true", help="write the table to benchmarks/results/pointing_game.md")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    start, load = time.perf_counter(), os.getloadavg()[0]
    work = QUICK if given.quick else Work()
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="protofed-benchmark-") as temporary:
        folder = given.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        weights = backbone(work, folder)
        for method in given.methods.split(","):
            for seed in [int(part) for part in given.seeds.split(",")]:
                outcomes.append(play(work, method, seed, weights, folder))
                print(outcomes[-1], flush=True)
    text = _table(outcomes)
    print(f"\n{text}")
    if given.write and not given.quick:
        command = f"python -m benchmarks.pointing_game --methods {given.methods} --seeds {given.seeds} --write"
        body = f"Goals: hits at least {HIT_GOAL}, random boxes at most {CHANCE_GOAL}.\n\n{text}"
        page = report("Pointing game on planted lesions", command, body, time.perf_counter() - start, load)
        (RESULTS / "pointing_game.md").write_text(page)
    return outcomes


def _table(outcomes: Sequence[Outcome]) -> str:
    rows: list[list[object]] = []
    for method in dict.fromkeys(each.method for each in outcomes):
        mine = [each for each in outcomes if each.method == method]
        rows += [[method, each.seed, each.images, *_figures([each])] for each in mine]
        rows.append([method, "mean", "", *_figures(mine)])
    return table(["method", "seed", "images", "accuracy", "hit rate", "random boxes"], rows)


def _figures(outcomes: Sequence[Outcome]) -> list[str]:
    return [f"{np.mean([getattr(each, key) for each in outcomes]):.3f}" for key in ("accuracy", "hits", "chance")]


if __name__ == "__main__":
    main()

"""Features of a pretrained backbone that is not trained: ours beside a bare PyTorch loop, in CPU time per image.

    python -m benchmarks.backbone [--alternations 9] [--quick] [--write]

The bare loop is what one would type: the network in evaluation mode, without gradients, batch by batch. What torch
takes depends on the size of the batch, so it is timed at a small one, which suits it best (two images of 224 pixels,
four of 128), and at eight and thirty-two. Ours cuts batches as it likes. That both give the same features is checked
before.
"""

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import NamedTuple

import onnxruntime
import torch
from torch import Tensor

from benchmarks import RESULTS, Ratios, cpu_seconds, in_turn, report, table
from protofed.models import Split, build_model
from protofed.models.fast.onnx_frozen import TOLERANCE, frozen_extractor
from protofed.models.pretrained import load_pretrained

MODEL = "efficientnet_lite0"
GOAL = 0.45
_CLASSES = 10


@dataclass(frozen=True)
class Case:
    """Images of one size, in batches."""

    side: int
    batch: int
    images: int = 64

    def __str__(self) -> str:
        return f"{self.side} pixels, batches of {self.batch}"


class Measured(NamedTuple):
    """CPU time of ours over the bare loop's, both in milliseconds an image, and the largest difference of a feature."""

    ratios: Ratios
    bare: float
    ours: float
    difference: float


CASES = tuple(Case(side, batch) for side, small in ((224, 2), (128, 4)) for batch in (small, 8, 32))
QUICK = (Case(32, 2, images=4),)


def measure(case: Case, alternations: int) -> Measured:
    """The ratios, alternation by alternation."""
    shape = (3, case.side, case.side)
    model = build_model(MODEL, shape, _CLASSES)
    load_pretrained(model, MODEL)
    model.eval()
    ours = frozen_extractor(list(model.stages().values())[: model.stages_until(None)], shape)
    images = torch.randn(case.images, *shape, generator=torch.Generator().manual_seed(0))
    sides = {"bare": lambda: _bare(model, images, case.batch), "ours": lambda: ours.features(images)}
    difference = (sides["bare"]() - sides["ours"]()).abs().max().item()
    if difference > TOLERANCE:
        raise RuntimeError(f"{case}: features differ by {difference:.1e}, so this is not worth timing")
    seconds = [
        {side: cpu_seconds(sides[side])[0] for side in in_turn(tuple(sides), alternation)}
        for alternation in range(alternations)
    ]
    bare, fast = (median(1000 * one[side] / case.images for one in seconds) for side in ("bare", "ours"))
    return Measured(Ratios(tuple(one["ours"] / one["bare"] for one in seconds)), bare, fast, difference)


@torch.no_grad()
def _bare(model: Split, images: Tensor, batch: int) -> Tensor:
    return torch.cat([model.features(part) for part in images.split(batch)])


def main(arguments: Sequence[str] | None = None) -> dict[Case, Measured]:
    """Measure, print, and on demand write the table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.backbone", description=__doc__.splitlines()[0])
    parser.add_argument("--alternations", type=int, default=9, help="measurements of each (default 9)")
    parser.add_argument("--quick", action="store_true", help="a second on tiny images: does it work at all?")
    parser.add_argument("--write", action="store_true", help="write the table to benchmarks/results/backbone.md")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    begun, load = time.perf_counter(), os.getloadavg()[0]
    measured, rows = {}, []
    for case in QUICK if given.quick else CASES:
        found = measured[case] = measure(case, 2 if given.quick else given.alternations)
        judged = f"{GOAL} {'met' if found.ratios.median <= GOAL else 'missed'}"
        rows.append([case, f"{found.bare:.1f}", f"{found.ours:.1f}", found.ratios, judged, f"{found.difference:.0e}"])
        print(f"{case}: {found.ratios}", flush=True)
    text = table(["images", "bare, ms", "ours, ms", "ours / bare", "goal", "largest difference"], rows)
    print(f"\n{text}")
    if given.write and not given.quick:
        command = f"python -m benchmarks.backbone --alternations {given.alternations} --write"
        body = (
            f"{MODEL} with ImageNet weights, ONNX Runtime {onnxruntime.__version__}, one thread. CPU time an image, "
            f"median of {given.alternations} alternations (ratios: lowest to highest); largest difference of a feature."
            f"\n\n{text}"
        )
        text = report("A backbone that is not trained", command, body, time.perf_counter() - begun, load)
        (RESULTS / "backbone.md").write_text(text)
    return measured


if __name__ == "__main__":
    main()

"""How fast and how large: beside a bare PyTorch loop, beside Flower's simulation, method by method, by size.

Here is what the benchmarks share: a federation to be run round by round, clocks, and the report.
"""

import gc
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import torch

from benchmarks import generated
from protofed.engines import make_engine
from protofed.federation import Federation, RoundPolicy, RunFolder
from protofed.runs.assembly import ClientSideRecipe, assemble
from protofed.runs.options import make_options
from protofed.system import describe_machine

RESULTS = Path(__file__).parent / "results"

_NEVER = 10**9


@dataclass(frozen=True)
class Workload:
    """Who trains what: every client holds as many images, labels are random."""

    name: str
    model: str
    image_shape: tuple[int, int, int]
    clients: int
    samples: int
    epochs: int = 1
    batch: int = 32
    lr: float = 1e-3
    settings: dict[str, object] = field(default_factory=dict)

    def __str__(self) -> str:
        shape = "x".join(str(side) for side in self.image_shape)
        epochs = f"{self.epochs} epoch{'s' if self.epochs > 1 else ''}"
        return f"{self.name}, {self.clients} clients x {self.samples} images of {shape}, {epochs}"

    @property
    def data_settings(self) -> dict[str, object]:
        """What makes the generated images those of this work."""
        channels, _, side = self.image_shape
        made = {"images": self.clients * self.samples, "channels_made": channels, "side": side}
        return {"data.holdout": 0, **{f"data.{key}": value for key, value in made.items()}}


@contextmanager
def federation(
    method: str, work: Workload, rounds: int, workers: int = 0, evaluated: bool = False, **options: Any
) -> Iterator[Federation]:
    """A federation in a temporary folder of which `rounds` rounds can be run, none of them evaluated.

    The last round of a run is always evaluated, so one more is planned than will be run, unless it may be `evaluated`.
    A method with a plan of its
    own repeats it. Without workers clients run in this process, one after the other.
    """
    generated.register()
    chosen = {
        "method": method,
        "data": generated.NAME,
        "protocol": f"iid={work.clients}",
        "model": work.model,
        "rounds": 2,
        "epochs": work.epochs,
        "batch": work.batch,
        "lr": work.lr,
        "engine": "workers" if workers else "loop",
        "workers": workers or None,
        **options,
        "set": {**work.data_settings, **work.settings, **options.get("set", {})},
    }
    with tempfile.TemporaryDirectory(prefix="protofed-benchmark-") as temporary:
        folder = RunFolder(Path(temporary) / "run")
        assembly = assemble(make_options(chosen), folder.clients)
        plan = assembly.context.plan
        longer = replace(plan, epochs=tuple(islice(cycle(plan.epochs), rounds + (not evaluated))))
        prepared = assembly.prepared.with_context(plan=longer)
        folder.create()
        engine = make_engine(assembly.engine, prepared, ClientSideRecipe.of(assembly))
        try:
            yield Federation(prepared, engine, folder, RoundPolicy(evaluate_every=_NEVER))
        finally:
            engine.close()
            folder.release()


def run_rounds(running: Federation, rounds: int = 1) -> int:
    """Run the next rounds; the samples trained on, each epoch counted. A client that fails is an error here."""
    samples = 0
    for record in islice(running.rounds(), rounds):
        if record["events"]:
            raise RuntimeError(f"round {record['round']} is not worth timing: {record['events'][0]}")
        samples += record["samples"]
    return samples


def cpu_seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    """CPU time (user and system) of this process while it works, which other processes hardly change."""
    gc.collect()
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


def wall_seconds(work: Callable[[], Any]) -> tuple[float, Any]:
    """Time on the clock, which is what counts where several processes work; the machine must be idle otherwise."""
    gc.collect()
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def in_turn(sides: Sequence[str], alternation: int) -> list[str]:
    """The order within an alternation: swapped every time, so that no side always comes first."""
    return list(sides) if alternation % 2 == 0 else list(reversed(sides))


@dataclass(frozen=True)
class Ratios:
    """The ratios of all alternations."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def __str__(self) -> str:
        return f"{self.median:.3f} ({min(self.values):.3f} to {max(self.values):.3f})"


def table(heading: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A markdown table that can be read as it is."""
    cells = [[str(cell) for cell in row] for row in (heading, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(heading))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def report(title: str, command: str, body: str, seconds: float, load: float) -> str:
    """A result with all one needs to judge or repeat it; no names of hosts, no paths."""
    loads = f"load average {load:.1f} at the start and {os.getloadavg()[0]:.1f} at the end"
    return f"""# {title}

    {command}

- {datetime.now(UTC):%Y-%m-%d}, {seconds:.0f} s, {loads}
- {describe_machine()}; one torch thread
- python {platform.python_version()}, torch {torch.__version__}

{body}
"""

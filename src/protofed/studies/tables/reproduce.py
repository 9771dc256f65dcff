"""The papers' tables, run again or computed, with the paper's figures beside ours."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from protofed.errors import UserError
from protofed.runs.options import make_options
from protofed.studies.schedule import Failure
from protofed.studies.schema import ComputedBlock, ReproductionContent, Scale, TrainedBlock
from protofed.studies.study import write_result
from protofed.studies.tables.computed import compute
from protofed.studies.tables.estimate import Estimate, estimate_row
from protofed.studies.tables.preset import SCALES, PublishedRow, find_preset
from protofed.studies.tables.reproduction import Reproduction
from protofed.studies.tables.trained import TrainedTable
from protofed.system import one_thread
from protofed.text import split_names


def reproduce(
    name: str,
    *,
    out: str | Path | None = None,
    scale: str = "lite",
    datasets: str | Sequence[str] | None = None,
    methods: str | Sequence[str] | None = None,
    columns: str | Sequence[str] | None = None,
    seeds: Sequence[int] | None = None,
    shard: str | None = None,
    callbacks: Iterable[Any] = (),
    runs: str | Path | None = None,
    **options: Any,
) -> Reproduction:
    """Run or compute a table or figure, such as `i2pfl.table2`, and write comparison.json and comparison.md to `out`.

    `methods` are rows of the table, by title or by method; `columns` some of those that take runs of their own, such as
    `alpha=0.1`. The options are those of `run` and override what the preset says. Runs that are found in `out`, or in
    the folder `runs` where tables share theirs, are not repeated.
    """
    preset, overrides = find_preset(name), checked_overrides(options)
    at = preset.scale_of(parse_scale(scale))
    rows = preset.selected_rows(split_names(methods), at)
    selected = preset.selected_datasets(split_names(datasets), at)
    run_seeds: list[int] = []
    failures: list[Failure] = []
    blocks: dict[str, TrainedBlock | ComputedBlock]
    if preset.trains:
        if out is None:
            raise UserError(f"{name} trains, so it needs --out, the folder of its runs; --dry-run estimates the cost")
        run_seeds = list(dict.fromkeys(seeds if seeds is not None else preset.seeds[at]))
        table = TrainedTable(preset, at, rows, split_names(columns), run_seeds, overrides, shard, list(callbacks))
        blocks = {dataset: table.block(dataset, Path(runs or out) / dataset, Path(out)) for dataset in selected}
        failures = table.failures
    else:
        with one_thread():
            blocks = {dataset: compute(preset, at, dataset, rows, overrides) for dataset in selected}
    content: ReproductionContent = {
        "preset": preset.name,
        "title": preset.title,
        "scale": at,
        "seeds": run_seeds,
        "methods": split_names(methods),
        "columns": split_names(columns),
        "options": overrides,
        "baseline": preset.baseline,
        "notes": preset.notes,
        "datasets": blocks,
    }
    result = Reproduction(preset, content, failures)
    if out is not None:
        Path(out).mkdir(parents=True, exist_ok=True)
        write_result(result, Path(out), "comparison")
    return result


def dry_run(
    name: str,
    *,
    scale: str = "lite",
    datasets: str | Sequence[str] | None = None,
    methods: str | Sequence[str] | None = None,
    columns: str | Sequence[str] | None = None,
    **options: Any,
) -> list[Estimate]:
    """Build every row of a table on generated images, let a client train on one batch, and estimate what a run takes.

    A table that is only about data is tried with fedavg.
    """
    preset, at, overrides = find_preset(name), parse_scale(scale), checked_overrides(options)
    with one_thread():
        return [
            estimate_row(
                preset,
                row,
                dataset,
                at,
                overrides,
                runs=len(preset.selected_conditions(dataset, at, split_names(columns))),
            )
            for dataset in preset.selected_datasets(split_names(datasets), at)
            for row in preset.selected_rows(split_names(methods), at) or [PublishedRow(method="fedavg")]
        ]


def parse_scale(name: str) -> Scale:
    """A scale by name."""
    for scale in SCALES:
        if scale == name:
            return scale
    raise UserError(f"scale={name} is not valid; use {' or '.join(SCALES)}")


def checked_overrides(options: Mapping[str, Any]) -> dict[str, Any]:
    """The user's options, checked, in the form in which they are merged."""
    overrides = {key: value for key, value in options.items() if value is not None}
    return {**overrides, "set": make_options(overrides).set}

"""`protofed reproduce ALL`: the tables whose images are at hand, one after the other, and one page in the end."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from protofed.cli.output import console, report_failures, show_table
from protofed.cli.progress import EstimateProgress, ManyRuns
from protofed.errors import UserError
from protofed.studies.schedule import Failure
from protofed.studies.tables.redrawing import redraw
from protofed.studies.tables.reproduce import parse_scale, reproduce
from protofed.studies.tables.results import write_results
from protofed.studies.tables.results_page import write_page
from protofed.studies.tables.several import TableAtHand, estimate_all, tables_at_hand
from protofed.text import Table, split_names


def reproduce_several(
    names: str,
    *,
    scale: str,
    datasets: str | None,
    methods: str | None,
    seeds: Sequence[int] | None,
    out: str | None,
    results: str | None,
    shard: str | None,
    dry: bool,
    quiet: bool,
    run_options: dict[str, Any],
) -> int:
    """Say what is there and what it takes, run it, and write one page; runs that tables share are made once."""
    chosen = (split_names(datasets), split_names(methods))
    tables, left_out = tables_at_hand(names, parse_scale(scale), run_options.get("data_root"), *chosen)
    if not tables:
        raise UserError(
            f"no table has its images available: {'; '.join(left_out[:3])}; protofed data shows what is available"
        )
    if not (dry or out):
        raise UserError(f"{names} trains, so it needs --out, the folder of its runs; --dry-run estimates the cost")
    if not quiet:
        _announce(tables, left_out, seeds, run_options)
    if dry or out is None:
        return 0
    folder = Path(out)
    summaries = Path(results) if results else folder / "results"
    failures: list[Failure] = []
    for number, table in enumerate(tables, 1):
        if not quiet:
            console().print(f"{table.preset.name} ({number} of {len(tables)}): {table.preset.title}", highlight=False)
        failures += _run(table, folder, summaries, seeds, shard, quiet, run_options)
        # Written each time, so that there is one to look at while the rest goes on.
        write_page(summaries, folder / "index.html", left_out, [f"{each.title}: {each.reason}" for each in failures])
    if not quiet:
        console().print(f"written to {folder / 'index.html'}")
    return report_failures(failures)


def _announce(
    tables: Sequence[TableAtHand],
    left_out: Sequence[str],
    seeds: Sequence[int] | None,
    run_options: dict[str, Any],
) -> None:
    rows = [[table.preset.name, ", ".join(table.datasets), str(len(table.rows))] for table in tables]
    show_table(Table("Available tables", ["name", "data sets", "rows"], rows, numeric=False))
    for line in left_out:
        console().print(f"left out: {line}", highlight=False)
    with EstimateProgress() as progress:
        whole = estimate_all(tables, seeds, progress.tried, **run_options)
    console().print(
        f"{whole.runs} different runs, about {whole.hours:.2g} hours on all cores of this machine; runs that "
        "already exist take no time"
    )


def _run(
    table: TableAtHand,
    folder: Path,
    summaries: Path,
    seeds: Sequence[int] | None,
    shard: str | None,
    quiet: bool,
    run_options: dict[str, Any],
) -> list[Failure]:
    """One table; a mistake in it is noted, and the others go on."""
    own = folder / table.preset.name
    try:
        with ManyRuns() as progress:
            result = reproduce(
                table.preset.name,
                out=own,
                runs=folder / "runs" / table.preset.suite_name,
                scale=table.scale,
                datasets=table.datasets,
                methods=[row.title for row in table.rows],
                seeds=seeds,
                shard=shard,
                callbacks=[] if quiet else [progress],
                **run_options,
            )
        redraw(result, own)  # scores of explanations are among the results
        write_results(result, own, summaries)
    except UserError as error:
        return [Failure(table.preset.name, str(error), "")]
    return list(result.failures)

"""`protofed reproduce`: a table or figure of a paper, with the paper's figures beside ours."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from protofed.cli import completion
from protofed.cli.options import QuietOption, ShardOption, parse_integers, takes_run_options
from protofed.cli.output import console, report_failures, show_or_dump, show_table, size
from protofed.cli.progress import ManyRuns
from protofed.cli.reproduce_several import reproduce_several
from protofed.errors import UserError
from protofed.studies.tables.estimate import Estimate, total_hours
from protofed.studies.tables.preset import Preset, find_preset, preset_names
from protofed.studies.tables.reproduce import dry_run, parse_scale, reproduce
from protofed.studies.tables.reproduction import Reproduction
from protofed.studies.tables.results import write_results
from protofed.studies.tables.several import names_several
from protofed.text import Table, duration


@takes_run_options(without=("method", "data", "domains", "seed"))
def reproduce_command(
    *,
    run_options: dict[str, Any],
    table: Annotated[
        str | None,
        typer.Argument(
            help="PAPER.TABLE, for example i2pfl.table2; several: a,b, i2pfl.table* or ALL; omit it to list them",
            autocompletion=completion.tables,
        ),
    ] = None,
    scale: Annotated[str, typer.Option("--scale", help="lite | paper (the published setting) | imagenet")] = "lite",
    datasets: Annotated[str | None, typer.Option("--datasets", help="only these, for example digits,pacs")] = None,
    methods: Annotated[str | None, typer.Option("--methods", help="only these rows, for example fedavg,i2pfl")] = None,
    columns: Annotated[
        str | None,
        typer.Option("--columns", help="only these columns, if they have runs of their own: alpha=0.1,alpha=0.5"),
    ] = None,
    seeds: Annotated[str | None, typer.Option("--seeds", help="for example 0,1,2 (default: the table's)")] = None,
    out: Annotated[str | None, typer.Option("--out", help="folder; finished runs in it are not repeated")] = None,
    results: Annotated[
        str | None, typer.Option("--results", help="folder for a small JSON file per data set with all its runs")
    ] = None,
    shard: ShardOption = None,
    dry: Annotated[bool, typer.Option("--dry-run", help="try one batch on generated images; estimate costs")] = False,
    quiet: QuietOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="print only comparison.json")] = False,
) -> int:
    """Reproduce a table of a paper; options given here override those of the table.

    Example: protofed reproduce i2pfl.table2 --data-root DATA --datasets office_caltech10 --out my-table
    """
    if table is None:
        show_or_dump([_described(find_preset(name)) for name in preset_names()], as_json, _show_presets)
        return 0
    selection: dict[str, Any] = {"scale": scale, "datasets": datasets, "methods": methods, "columns": columns}
    run_seeds = None if seeds is None else parse_integers(seeds)
    if names_several(table):
        if columns is not None or as_json:
            raise UserError("--columns and --json work with one table only, not with several")
        choice: dict[str, Any] = {"scale": scale, "datasets": datasets, "methods": methods, "seeds": run_seeds}
        where: dict[str, Any] = {"out": out, "results": results, "shard": shard}
        return reproduce_several(table, **choice, **where, dry=dry, quiet=quiet, run_options=run_options)
    if dry:
        estimates = dry_run(table, **selection, **run_options)
        if as_json:
            print(json.dumps([each.as_dict() for each in estimates]))
        elif not quiet:
            _show_estimates(table, scale, estimates, run_seeds)
        return 0
    with ManyRuns() as progress:
        callbacks = [] if quiet or as_json else [progress]
        result = reproduce(
            table, out=out, **selection, seeds=run_seeds, shard=shard, callbacks=callbacks, **run_options
        )
    pictures, files = _draw(result, out), _sum_up(result, out, results)  # files have the scores of what was drawn
    if as_json:
        print(json.dumps(result.content))
    elif not quiet:
        _show_result(result, pictures, files, out)
    return report_failures(result.failures)


def _show_result(result: Reproduction, pictures: Sequence[Path], files: Sequence[Path], out: str | None) -> None:
    console().print(f"{result.preset.name}: {result.preset.title}\n")
    for table in result.tables():
        show_table(table)
    for note in result.preset.notes:
        console().print(f"- {note}")
    for picture in pictures:
        console().print(f"drawn: {picture}")
    for file in files:
        console().print(f"summary in {file}")
    if out is not None:
        console().print(f"written to {out}")


def _sum_up(result: Reproduction, out: str | None, folder: str | None) -> list[Path]:
    """Write the files that pages are made from; which they are."""
    return [] if folder is None or out is None else write_results(result, Path(out), Path(folder))


def _draw(result: Reproduction, out: str | None) -> list[Path]:
    """Draw the pictures of a figure that has some; their files."""
    if result.preset.draw is None or out is None:
        return []
    from protofed.studies.tables.redrawing import redraw

    return redraw(result, Path(out))


def _described(preset: Preset) -> dict[str, Any]:
    rows = [row.title for row in preset.rows]
    return {"name": preset.name, "title": preset.title, "datasets": preset.datasets, "rows": rows}


def _show_presets(presets: Sequence[dict[str, Any]]) -> None:
    rows = [[each["name"], each["title"], ", ".join(each["datasets"]), str(len(each["rows"]))] for each in presets]
    heading = "Tables and figures (protofed reproduce NAME)"
    show_table(Table(heading, ["name", "description", "data sets", "rows"], rows, numeric=False))


def _show_estimates(name: str, scale: str, estimates: Sequence[Estimate], run_seeds: Sequence[int] | None) -> None:
    preset = find_preset(name)
    seeds = len(preset.seeds[parse_scale(scale)] if run_seeds is None else run_seeds)
    rows = [
        [
            each.dataset,
            each.row,
            str(each.runs * seeds),
            str(each.clients),
            str(each.rounds),
            duration(each.seconds),
            size(each.memory),
            size(each.up),
            size(each.down),
        ]
        for each in estimates
    ]
    columns = ["data set", "method", "runs", "clients", "rounds", "time", "memory", "sent up", "sent down"]
    show_table(Table(f"{name} at scale {scale}: each run on one core of this machine, roughly", columns, rows))
    if preset.trains:
        hours = total_hours(estimates, seeds)
        console().print(f"about {hours:.2g} hours for all runs with {seeds} seed(s), on all cores of this machine")

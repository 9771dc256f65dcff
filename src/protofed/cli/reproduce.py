"""`protofed reproduce`: a table or figure of a paper, with the paper's figures beside ours."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from protofed.cli import completion
from protofed.cli.compare import complain, numbers
from protofed.cli.options import takes_run_options
from protofed.cli.output import console, show_table, size
from protofed.cli.progress import ManyRuns
from protofed.studies.tables.estimate import Estimate, total_hours
from protofed.studies.tables.preset import find_preset, preset_names
from protofed.studies.tables.reproduce import dry_run, reproduce
from protofed.studies.tables.reproduction import Reproduction


@takes_run_options(without=("method", "data", "domains", "seed"))
def reproduce_command(
    *,
    given: dict[str, Any],
    table: Annotated[
        str | None,
        typer.Argument(help="PAPER.TABLE, for example i2pfl.table2; none: list them", autocompletion=completion.tables),
    ] = None,
    scale: Annotated[str, typer.Option("--scale", help="lite, or paper: the published setting")] = "lite",
    datasets: Annotated[str | None, typer.Option("--datasets", help="only these, for example digits,pacs")] = None,
    methods: Annotated[str | None, typer.Option("--methods", help="only these rows, for example fedavg,i2pfl")] = None,
    columns: Annotated[
        str | None, typer.Option("--columns", help="only these of columns with runs of their own: alpha=0.1,alpha=0.5")
    ] = None,
    seeds: Annotated[str | None, typer.Option("--seeds", help="for example 0,1,2 (default: the table's)")] = None,
    out: Annotated[str | None, typer.Option("--out", help="folder; finished runs in it are not repeated")] = None,
    shard: Annotated[
        str | None, typer.Option("--shard", metavar="K/N", help="do the K-th of N parts; machines share --out")
    ] = None,
    dry: Annotated[bool, typer.Option("--dry-run", help="try one batch on generated images; estimate costs")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="say nothing but warnings")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print comparison.json, and nothing else")] = False,
) -> int:
    """Run or compute a table of a paper; the options of a run go before those of the table.

    Example: protofed reproduce i2pfl.table2 --data-root DATA --datasets office_caltech10 --out my-table
    """
    if table is None:
        _show_presets(as_json)
        return 0
    if dry:
        estimates = dry_run(table, scale=scale, datasets=datasets, methods=methods, columns=columns, **given)
        used = find_preset(table).seeds["paper" if scale == "paper" else "lite"] if seeds is None else numbers(seeds)
        if as_json:
            print(json.dumps([each.as_dict() for each in estimates]))
        elif not quiet:
            _show_estimates(table, scale, estimates, len(used))
        return 0
    with ManyRuns() as progress:
        result = reproduce(
            table,
            out=out,
            scale=scale,
            datasets=datasets,
            methods=methods,
            columns=columns,
            seeds=None if seeds is None else numbers(seeds),
            shard=shard,
            callbacks=[] if quiet or as_json else [progress],
            **given,
        )
    pictures = _drawn(result, out)
    if as_json:
        print(json.dumps(result.content))
    elif not quiet:
        console().print(f"{result.preset.name}: {result.preset.title}\n")
        for each in result.tables():
            show_table(*each)
        for note in result.preset.notes:
            console().print(f"- {note}")
        for picture in pictures:
            console().print(f"drawn: {picture}")
        if out is not None:
            console().print(f"written to {out}")
    return complain(result.failures)


def _drawn(result: Reproduction, out: str | None) -> list[Path]:
    """The pictures of a figure that has some."""
    if result.preset.draw is None or out is None:
        return []
    from protofed.studies.tables.redrawing import redraw

    return redraw(result, Path(out))


def _show_presets(as_json: bool) -> None:
    presets = [find_preset(name) for name in preset_names()]
    if as_json:
        listed = [
            {
                "name": preset.name,
                "title": preset.title,
                "datasets": preset.datasets,
                "rows": [row.title for row in preset.rows],
            }
            for preset in presets
        ]
        print(json.dumps(listed))
        return
    rows = [[preset.name, preset.title, ", ".join(preset.datasets), str(len(preset.rows))] for preset in presets]
    heading = "Tables and figures (protofed reproduce NAME)"
    show_table(heading, ["name", "what it shows", "data sets", "rows"], rows, figures=False)


def _show_estimates(table: str, scale: str, estimates: Sequence[Estimate], seeds: int) -> None:
    rows = [
        [
            each.dataset,
            each.row,
            str(each.runs * seeds),
            str(each.clients),
            str(each.rounds),
            f"{each.seconds / 3600:.2f}",
            size(each.memory),
            size(each.up),
            size(each.down),
        ]
        for each in estimates
    ]
    columns = ["data set", "method", "runs", "clients", "rounds", "hours", "memory", "sent up", "sent down"]
    show_table(f"{table} at scale {scale}: each run on one core of this machine, roughly", columns, rows)
    if find_preset(table).trains:
        hours = total_hours(estimates, seeds)
        console().print(f"about {hours:.1f} hours for all runs with {seeds} seed(s), on all cores of this machine")

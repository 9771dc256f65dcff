"""`protofed compare`: several methods under equal conditions."""

import json
from typing import Annotated, Any

import typer

from protofed.cli import completion
from protofed.cli.options import (
    ConfigOption,
    QuietOption,
    ShardOption,
    StrictOption,
    TensorBoardOption,
    TrackOption,
    parse_integers,
    takes_run_options,
    trackers_of,
)
from protofed.cli.output import WENT_WRONG, console, followers, report_failures, show_table
from protofed.cli.progress import ManyRuns
from protofed.errors import UserError
from protofed.studies import Comparison, compare


@takes_run_options(
    without=("method", "seed"), config=("methods", "seeds", "baseline", "target", "track", "tensorboard", "strict")
)
def compare_command(
    *,
    run_options: dict[str, Any],
    methods: Annotated[
        list[str] | None, typer.Argument(help="names of methods, or ALL", autocompletion=completion.methods)
    ] = None,
    out: Annotated[str, typer.Option("--out", help="folder of the comparison; finished runs in it are not repeated")],
    seeds: Annotated[str, typer.Option("--seeds", help="for example 0,1,2")] = "0",
    baseline: Annotated[
        str | None,
        typer.Option("--baseline", help="the method to test the others against (default: fedavg, or the first)"),
    ] = None,
    target: Annotated[
        float | None,
        typer.Option(
            "--target", help="report rounds and bytes needed to reach this accuracy (default: the baseline's average)"
        ),
    ] = None,
    shard: ShardOption = None,
    config: ConfigOption = None,
    track: TrackOption = None,
    tensorboard: TensorBoardOption = False,
    strict: StrictOption = False,
    quiet: QuietOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="print only comparison.json")] = False,
) -> int:
    """Compare methods with the same partition, initial weights and client sampling for each seed.

    Example: protofed compare fedavg i2pfl --data digits --rounds 10 --seeds 0,1,2 --out my-comparison
    """
    if not methods:
        raise UserError("name the methods to compare, for example: protofed compare fedavg i2pfl --out my-comparison")
    with ManyRuns() as progress:
        result = compare(
            methods,
            seeds=parse_integers(seeds),
            baseline=baseline,
            target=target,
            shard=shard,
            out=out,
            callbacks=followers(progress, quiet or as_json, trackers_of(track, tensorboard), config),
            **run_options,
        )
    if as_json:
        print(json.dumps(result.content))
    elif not quiet:
        _show_comparison(result)
    return report_failures(result.failures) or (WENT_WRONG if strict and result.warnings() else 0)


def _show_comparison(result: Comparison) -> None:
    """Tables per view, never mixed, and the costs."""
    console().print()
    for view in result.views():
        table = result.accuracy_table(view)
        if table.rows:
            show_table(table)
            show_table(result.convergence(view))
        by_metric = result.by_metric(view)
        if by_metric.rows:
            show_table(by_metric)
    show_table(result.costs())
    for line in result.missing():
        console().print(f"missing: {line}")
    console().print(f"written to {result.path}")

"""`protofed compare`: several methods under equal conditions."""

import json
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from protofed.cli import completion
from protofed.cli.options import takes_run_options
from protofed.cli.output import TENSORBOARD, console, followers, show_table
from protofed.cli.progress import ManyRuns
from protofed.errors import UserError
from protofed.studies import Comparison, compare
from protofed.studies.comparison import Failure


@takes_run_options(without=("method", "seed"))
def compare_command(
    *,
    given: dict[str, Any],
    methods: Annotated[list[str], typer.Argument(help="names of methods, or ALL", autocompletion=completion.methods)],
    out: Annotated[str, typer.Option("--out", help="folder of the comparison; finished runs in it are not repeated")],
    seeds: Annotated[str, typer.Option("--seeds", help="for example 0,1,2")] = "0",
    baseline: Annotated[
        str | None,
        typer.Option("--baseline", help="the method others are tested against (default: fedavg, or the first)"),
    ] = None,
    target: Annotated[
        float | None,
        typer.Option("--target", help="count rounds and bytes up to this accuracy (default: the baseline's average)"),
    ] = None,
    shard: Annotated[
        str | None, typer.Option("--shard", metavar="K/N", help="do the K-th of N parts; machines share --out")
    ] = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help=TENSORBOARD)] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="say nothing but warnings")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print comparison.json, and nothing else")] = False,
) -> int:
    """Compare methods: same partition, same initial weights, same client draws for each seed.

    Example: protofed compare fedavg i2pfl --data digits --rounds 10 --seeds 0,1,2 --out my-comparison
    """
    with ManyRuns() as progress:
        result = compare(
            methods,
            seeds=numbers(seeds),
            baseline=baseline,
            target=target,
            shard=shard,
            out=out,
            callbacks=followers(progress, quiet or as_json, tensorboard),
            **given,
        )
    if as_json:
        print(json.dumps(result.content))
    elif not quiet:
        show_comparison(result)
    return complain(result.failures)


def show_comparison(result: Comparison) -> None:
    """Tables per view, never mixed, and the costs."""
    console().print()
    for view in result.views():
        columns, rows = result.table(view)
        if rows:
            show_table(f"Accuracy (%), {view} view", columns, rows)
            show_table(f"On the way, {view} view, {result.target(view)}", *result.course(view))
    show_table("Costs per run", *result.costs())
    for line in result.missing():
        console().print(f"missing: {line}")
    console().print(f"written to {result.path}")


def complain(failures: Sequence[Failure]) -> int:
    """Say what failed, after everything else; the exit code."""
    for failure in failures:
        if failure.trace:
            print(failure.trace, file=sys.stderr)
    for failure in failures:
        print(f"error: {failure.title}: {' '.join(failure.reason.split())}", file=sys.stderr)
    return 1 if failures else 0


def numbers(text: str) -> list[int]:
    """The seeds in 0,1,2."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--seeds takes whole numbers separated by commas, not {text!r}") from None

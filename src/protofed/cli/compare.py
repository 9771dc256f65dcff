"""`protofed compare`: several methods under equal conditions."""

import json
from typing import Annotated, Any

import typer

from protofed.cli.options import takes_run_options
from protofed.cli.output import ProgressBar, console, percent, show_table, size
from protofed.errors import UserError
from protofed.experiments import Comparison, compare


@takes_run_options(without=("method", "seed"))
def compare_command(
    *,
    given: dict[str, Any],
    methods: Annotated[list[str], typer.Argument(help="names of methods, or ALL")],
    out: Annotated[str, typer.Option("--out", help="folder of the comparison; finished runs in it are not repeated")],
    seeds: Annotated[str, typer.Option("--seeds", help="for example 0,1,2")] = "0",
    baseline: Annotated[str, typer.Option("--baseline", help="the method others are tested against")] = "fedavg",
    quiet: Annotated[bool, typer.Option("--quiet", help="say nothing but warnings")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="print comparison.json, and nothing else")] = False,
) -> None:
    """Compare methods: same partition, same initial weights, same client draws for each seed.

    Example: protofed compare fedavg i2pfl --data digits --rounds 10 --seeds 0,1,2 --out my-comparison
    """
    progress = ProgressBar(show_seed=True)
    try:
        result = compare(
            methods,
            seeds=_numbers(seeds),
            baseline=baseline,
            out=out,
            callbacks=[] if quiet or as_json else [progress],
            **given,
        )
    except BaseException:
        progress.stop()
        raise
    if as_json:
        print(json.dumps(result.content))
    elif not quiet:
        show_comparison(result)


def show_comparison(result: Comparison) -> None:
    """One table per view, never mixed, and the costs."""
    console().print()
    for view in ("global", "personal"):
        columns, rows = result.table(view, percent)
        if rows:
            show_table(f"Accuracy (%), {view} view", columns, rows)
    columns, rows = result.costs(size)
    show_table("Costs per run", columns, rows)
    console().print(f"written to {result.path}")


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--seeds takes whole numbers separated by commas, not {text!r}") from None

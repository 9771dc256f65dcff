"""`protofed sweep`: search for hyper-parameters on validation data."""

import json
from typing import Annotated, Any

import typer

from protofed.cli import completion
from protofed.cli.options import QuietOption, ShardOption, parse_integers, takes_run_options
from protofed.cli.output import console, percent, report_failures, show_table
from protofed.cli.progress import ManyRuns
from protofed.studies import sweep


@takes_run_options(without=("method",))
def sweep_command(
    *,
    run_options: dict[str, Any],
    method: Annotated[str, typer.Argument(help="a method's name, or file.py:Class", autocompletion=completion.methods)],
    over: Annotated[
        list[str],
        typer.Option("--over", metavar="KEY=VALUES", help="V1,V2,... or, with --random, LOW..HIGH[:log][:int]; repeat"),
    ],
    out: Annotated[str, typer.Option("--out", help="folder of the sweep; finished runs in it are not repeated")],
    random: Annotated[int | None, typer.Option("--random", help="draw N combinations instead of trying all")] = None,
    seeds: Annotated[str | None, typer.Option("--seeds", help="for example 0,1,2 (default: --seed)")] = None,
    score: Annotated[str, typer.Option("--score", help="last (mean of 5) or best evaluated round")] = "last",
    shard: ShardOption = None,
    quiet: QuietOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="print only sweep.json")] = False,
) -> int:
    """Search for hyper-parameters of a method, by accuracy on images held out from training, never on test images.

    Example: protofed sweep i2pfl --over tau=0.05,0.07,0.1 --over lr=0.01,0.03 --rounds 10 --out my-sweep
    """
    with ManyRuns(_validation) as progress:
        result = sweep(
            method,
            over,
            out=out,
            random=random,
            seeds=None if seeds is None else parse_integers(seeds),
            score=score,  # type: ignore[arg-type]  # checked there
            shard=shard,
            callbacks=[] if quiet or as_json else [progress],
            **run_options,
        )
    if as_json:
        print(json.dumps(result.content))
    elif not quiet:
        console().print()
        show_table(result.table())
        for line in result.missing():
            console().print(f"missing: {line}")
        console().print(result.winner())
        console().print(f"written to {result.path}")
    return report_failures(result.failures)


def _validation(record: dict[str, Any]) -> str:
    """What may be seen of a round while the search goes on."""
    return f"validation {percent(record['validation'])} %"

"""`protofed join`: one more client for a federation that is complete."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from protofed.cli.options import takes_run_options
from protofed.cli.output import console, percent, size
from protofed.inference.addition import AdditionResult
from protofed.inference.join import DEFAULT_ROUNDS, JoinRound, join
from protofed.runs import Options
from protofed.text import counted

_OWN = (
    "data_root",
    "domains",
    "labels",
    "test_share",
    "group_by",
    "pages",
    "samples_per_client",
    "epochs",
    "batch",
    "optimizer",
    "lr",
    "momentum",
    "weight_decay",
    "balanced",
    "seed",
    "set",
    "plugin",
)
"""Options of a run that a newcomer may give, which then go before those of the run it joins."""

_ModelOption = Annotated[
    str | None, typer.Option("--model", help="an architecture of its own, if only prototypes are exchanged")
]
_WeightsOption = Annotated[
    str | None, typer.Option("--weights", help="a backbone to start from, instead of the global model")
]


@takes_run_options(without=tuple(name for name in Options.model_fields if name not in _OWN))
def join_command(
    *,
    run_options: dict[str, Any],
    run: Annotated[Path, typer.Argument(help="the folder of a complete run")],
    data: Annotated[str, typer.Option("--data", help="the newcomer's images: a name, a folder or a manifest")],
    out: Annotated[Path, typer.Option("--out", help="where to write its model and join.json")],
    model: _ModelOption = None,
    weights: _WeightsOption = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="most rounds")] = DEFAULT_ROUNDS,
    as_json: Annotated[bool, typer.Option("--json", help="print only the result, as JSON")] = False,
) -> None:
    """Train a newcomer on what the run would send it, until it is as good as the clients that took part.

    If the result is a sum over sites (fedncm, fed3r, fedcgs, fedcof, protoridge), its share is added exactly.

    Example: protofed join my-run --data my-data --model lenet5 --out my-site
    """

    def tell(done: JoinRound) -> None:
        console().print(f"  round {done.round}  accuracy {percent(done.accuracy)} %  up {size(done.up)}")

    result = join(
        run,
        data,
        out=out,
        rounds=rounds,
        model=model,
        weights=weights,
        tell=None if as_json else tell,
        **run_options,
    )
    content = result.as_dict()
    if as_json:
        print(json.dumps(content))
        return
    if isinstance(result, AdditionResult):
        console().print(
            f"{result.client} and its {counted(result.images, 'image')} were added to the result, now a sum over "
            f"{len(result.sites)} sites; sent {size(result.up)} up; written to {out}"
        )
        return
    sent = f"{size(content['bytes']['up'])} up and {size(content['bytes']['down'])} down"
    when = f"not reached in {counted(len(result.rounds), 'round')}"
    if result.reached:
        when = f"reached after {counted(result.reached, 'round')}"
    console().print(
        f"{result.client} started from {result.start}; the others' {percent(result.target)} % were {when}, sent "
        f"{sent}; written to {out}"
    )

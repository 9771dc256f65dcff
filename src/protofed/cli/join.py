"""`protofed join`: one more client for a federation that is complete."""

import json
from pathlib import Path
from typing import Annotated

import typer

from protofed.cli.options import DataRootOption
from protofed.cli.output import console, percent, size
from protofed.inference.addition import AdditionResult
from protofed.inference.join import DEFAULT_ROUNDS, JoinRound, join

_SamplesOption = Annotated[str | None, typer.Option("--samples-per-client", help="use so many of its training images")]
_ModelOption = Annotated[
    str | None, typer.Option("--model", help="an architecture of its own, where only prototypes are exchanged")
]
_WeightsOption = Annotated[
    str | None, typer.Option("--weights", help="a backbone to begin with, instead of the global model")
]


def join_command(
    run: Annotated[Path, typer.Argument(help="the folder of a complete run")],
    data: Annotated[str, typer.Option("--data", help="the newcomer's images: a name, a folder or a manifest")],
    out: Annotated[Path, typer.Option("--out", help="where its model and join.json go")],
    data_root: DataRootOption = None,
    domains: Annotated[str | None, typer.Option("--domains", help="which domain, where the data has several")] = None,
    labels: Annotated[str | None, typer.Option("--labels", help='regroup classes, "0=healthy,1-4=diseased"')] = None,
    samples_per_client: _SamplesOption = None,
    model: _ModelOption = None,
    weights: _WeightsOption = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="most rounds")] = DEFAULT_ROUNDS,
    as_json: Annotated[bool, typer.Option("--json", help="print the result as JSON, and nothing else")] = False,
) -> None:
    """Train a newcomer against what the run would send it, until it is as good as those who took part.

    Where the result is a sum over sites (fedncm, fed3r, fedcgs, fedcof, protoridge) its part is added, exactly.

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
        data_root=data_root,
        domains=domains,
        labels=labels,
        samples_per_client=samples_per_client,
    )
    content = result.as_dict()
    if as_json:
        print(json.dumps(content))
        return
    if isinstance(result, AdditionResult):
        console().print(
            f"{result.client} and its {result.images} images are in the result, which is a sum over "
            f"{len(result.sites)} sites; sent {size(result.up)} up; written to {out}"
        )
        return
    sent = f"{size(content['bytes']['up'])} up and {size(content['bytes']['down'])} down"
    when = f"reached after {result.reached} rounds" if result.reached else f"not reached in {len(result.rounds)} rounds"
    console().print(
        f"{result.client} began with {result.start}; the others' {percent(result.target)} % were {when}, "
        f"sent {sent}; written to {out}"
    )

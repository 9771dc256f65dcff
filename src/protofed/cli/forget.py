"""`protofed forget`: the result of a run without one of its sites."""

import json
from pathlib import Path
from typing import Annotated

import typer

from protofed.cli.output import console, percent
from protofed.inference.changed import FORGOTTEN
from protofed.inference.forget import forget
from protofed.text import counted


def forget_command(
    run: Annotated[Path, typer.Argument(help="the folder of a complete run")],
    client: Annotated[str, typer.Option("--client", help="the site whose part is taken out")],
    out: Annotated[Path, typer.Option("--out", help="where the result without it goes")],
    state: Annotated[
        Path | None,
        typer.Option("--state", help="of a deployment: the site's own clients/CLIENT.safetensors"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the record as JSON, and nothing else")] = False,
) -> None:
    """Take a site out of a run whose result is a sum over sites, exactly, and keep a record of it.

    Example: protofed forget my-run --client dslr-0 --out my-run-without
    """
    result = forget(run, client, out=out, state=state)
    if as_json:
        print(json.dumps(result.as_dict()))
        return
    view = None if result.accuracy is None else result.accuracy["global"]
    scored = "" if view is None else f", accuracy {percent(view['average'])} %"
    remain = counted(len(result.left), "site")
    console().print(
        f"{client} and its {counted(result.images, 'image')} are out of the result{scored}; {remain} left; "
        f"{FORGOTTEN} in {out} says what was removed and what cannot be"
    )

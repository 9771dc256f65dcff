"""`protofed forget`: the result of a run without one of its sites."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from protofed.cli.output import console, percent
from protofed.inference.changed import FORGOTTEN
from protofed.inference.forget import forget
from protofed.text import counted


def forget_command(
    run: Annotated[Path, typer.Argument(help="the folder of a complete run, or of a deployed server at work")],
    client: Annotated[str, typer.Option("--client", help="the site whose part is taken out")],
    out: Annotated[
        Path | None,
        typer.Option("--out", help="where the result without it goes; without, the server at work in RUN is asked"),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option("--state", help="of a deployment: the site's own clients/CLIENT.safetensors"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the record as JSON, and nothing else")] = False,
) -> None:
    """Take a site out of a run whose result is a sum over sites, exactly, and keep a record of it.

    Example: protofed forget my-run --client dslr-0 --out my-run-without
    """
    if out is None:
        from protofed.deploy.requests import ask_to_forget

        record = ask_to_forget(run, client, state)
        accuracy = record.pop("accuracy")
    else:
        result = forget(run, client, out=out, state=state)
        record, accuracy = result.as_dict(), result.accuracy
    if as_json:
        print(json.dumps(record))
    else:
        _show(record, accuracy, out or run)


def _show(record: dict[str, Any], accuracy: Any, place: Path) -> None:
    view = None if accuracy is None else accuracy["global"]
    scored = "" if view is None or view["average"] is None else f", accuracy {percent(view['average'])} %"
    images, remain = counted(record["images"], "image"), counted(len(record["left"]), "site")
    console().print(
        f"{record['client']} and its {images} are out of the result{scored}; {remain} left; "
        f"{FORGOTTEN} in {place} says what was removed and what cannot be"
    )

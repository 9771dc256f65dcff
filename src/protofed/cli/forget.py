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
    run: Annotated[Path, typer.Argument(help="the folder of a complete run, or of a running deployed server")],
    client: Annotated[str, typer.Option("--client", help="the site to remove")],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", help="where to write the result without the site; if omitted, ask the server running in RUN"
        ),
    ] = None,
    state: Annotated[
        Path | None,
        typer.Option("--state", help="for a deployment: the site's own clients/CLIENT.safetensors"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print only the record, as JSON")] = False,
) -> None:
    """Remove a site exactly from a run whose result is a sum over sites, and keep a record of it.

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
        f"{record['client']} and its {images} are removed from the result{scored}; {remain} left; {FORGOTTEN} in "
        f"{place} says what was removed and what cannot be"
    )

"""`protofed config`: the options of a run as a file for `--config`."""

import json
from pathlib import Path
from typing import Annotated

import typer

from protofed.cli.options import options_of
from protofed.cli.output import console
from protofed.runs.config_file import config_text, given_text
from protofed.system import write_atomically


def config_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="the folder of a run, finished or not")],
    out: Annotated[Path | None, typer.Option("--out", help="write it to this file instead of printing it")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the options as JSON")] = False,
) -> None:
    """Print the options of a run as a TOML file with comments, for `protofed run --config`.

    Comments of the file that the run was given are kept, with the values in force.

    Example: protofed config my-run --out study.toml
    """
    folder = run.parent if run.name == "run.json" else run
    options = options_of(folder / "run.json")
    text = config_text(options, given_text(folder))
    if as_json:
        print(json.dumps(options))
    elif out is None:
        print(text, end="")
    else:
        write_atomically(out, text.encode())
        console().print(f"written to {out}; use it with protofed run --config {out}", soft_wrap=True)

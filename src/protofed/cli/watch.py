"""`protofed watch`: the report page of runs that are going on."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from protofed.cli.output import console
from protofed.errors import UserError


def watch_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="of a run or a comparison, finished or not")],
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any free port")] = 0,
    show: Annotated[bool, typer.Option("--open", help="open it in a browser")] = False,
) -> None:
    """Serve the live report page of a folder, on this machine only, with a button to stop its runs.

    Example: protofed watch runs/demo
    """
    from protofed.report.server import ReportServer

    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}; start a run with --out {folder} first")
    with ReportServer(folder, port) as server:
        console().print(f"{server.address} shows {folder}; Ctrl-C stops this page, not the runs", soft_wrap=True)
        sys.stdout.flush()  # also into a pipe, where nothing would be read until much more was written
        if show:
            typer.launch(server.address)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            console().print("no longer watching; runs continue")

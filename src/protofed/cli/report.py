"""`protofed report`: the page one sends to a colleague."""

from pathlib import Path
from typing import Annotated

import typer

from protofed.cli.options import TrainingImagesOption
from protofed.cli.output import console


def report_command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="of a run, a comparison, a reproduction or a sweep")],
    out: Annotated[Path | None, typer.Option("--out", help="the file to write (default: DIR/report.html)")] = None,
    notes: Annotated[
        list[str] | None,
        typer.Option("--note", metavar="TEXT", help="a paragraph for the page's readers; repeat for more"),
    ] = None,
    with_training_images: TrainingImagesOption = False,
    show: Annotated[bool, typer.Option("--open", help="open it in a browser")] = False,
) -> None:
    """Write one self-contained page with everything a run, a comparison, a reproduction or a sweep found.

    Example: protofed report runs/demo --note "Second try, with a smaller learning rate."
    """
    from protofed.report import write_report

    path = write_report(folder, out, with_training_images=with_training_images, notes=notes or ())
    use = "open it in a browser, or send it; it is self-contained"
    if with_training_images:
        use = "open it in a browser; it may show training images, so send it only to people who may see them"
    console().print(f"report written to {path}: {use}", soft_wrap=True)
    if show:
        typer.launch(str(path))

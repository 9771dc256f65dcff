"""`protofed export`: a run's model for other programs."""

import json
from pathlib import Path
from typing import Annotated

import typer

from protofed.cli import completion
from protofed.cli.options import ModelOfOption
from protofed.cli.output import console


def export_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="folder of a complete run")],
    format: Annotated[
        str, typer.Option("--format", help="onnx | safetensors", autocompletion=completion.formats)
    ] = "onnx",
    out: Annotated[Path | None, typer.Option("--out", help="the file (default: RUN/export/model.FORMAT)")] = None,
    client: Annotated[
        str | None, typer.Option("--client", help="write this client's model (default: the server's)")
    ] = None,
    model_of: ModelOfOption = "last",
    images: Annotated[
        Path | None, typer.Option("--images", help="folder of images to check it on (default: noise)")
    ] = None,
) -> None:
    """Export a run's model for other programs, with a card of its preprocessing and classes, and check its
    predictions.

    Example: protofed export my-run --format onnx
    """
    from protofed.inference import Classifier, card_of, export

    path = export(Classifier(run, client, model_of), format, out, images)
    check = json.loads(card_of(path).read_text())["check"]
    console().print(
        f"written to {path}, its model card to {card_of(path)}; on {check['images']} images its predictions equal "
        f"the run's to {check['largest_difference']:.1e}",
        soft_wrap=True,
    )

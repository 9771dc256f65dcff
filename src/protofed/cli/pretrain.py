"""`protofed pretrain`: weights for --weights, by centralised training."""

import json
from typing import Annotated, Any

import typer

from protofed.cli.options import QuietOption, takes_run_options
from protofed.cli.output import ProgressBar, console, percent
from protofed.errors import UserError
from protofed.runs.pretrain import DEFAULT_EPOCHS, pretrain

_FEDERATED = ("method", "rounds", "epochs", "plan", "ensemble", "participation", "preset", "evaluate_local", "project")


@takes_run_options(without=_FEDERATED)
def pretrain_command(
    *,
    run_options: dict[str, Any],
    out: Annotated[str, typer.Option("--out", help="the file to write, .safetensors")],
    epochs: Annotated[int, typer.Option("--epochs", min=1, help="passes over all images")] = DEFAULT_EPOCHS,
    quiet: QuietOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="print only the summary, as JSON")] = False,
) -> None:
    """Train one model on all images of a data set and save its weights for --weights of other commands.

    Example: protofed pretrain --data cifar10 --data-root DATA --model resnet10 --epochs 30 --out backbone.safetensors
    """
    if "data" not in run_options:
        raise UserError("pretrain needs --data, the images to train on")
    progress = ProgressBar()
    try:
        done = pretrain(out=out, epochs=epochs, callbacks=[] if quiet or as_json else [progress], **run_options)
    finally:
        progress.stop()
    summary = done.summary
    if as_json:
        print(json.dumps(summary))
    elif not quiet:
        accuracy = percent(summary["accuracy_final"]["global"]["average"])
        console().print(
            f"accuracy {accuracy} % on test images; weights written to {out}, their run folder to {done.path}"
        )

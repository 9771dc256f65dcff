"""`protofed predict`: class probabilities for images without labels."""

import json
from pathlib import Path
from typing import Annotated

import typer

from protofed.cli.options import ModelOfOption
from protofed.cli.output import show_table
from protofed.text import Table, counted


def predict_command(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="folder of a complete run")],
    images: Annotated[Path, typer.Option("--images", help="folder of images, including its subfolders")],
    out: Annotated[Path, typer.Option("--out", help="the csv file to write")],
    client: Annotated[
        str | None, typer.Option("--client", help="use this client's model (default: the server's)")
    ] = None,
    model_of: ModelOfOption = "last",
    as_json: Annotated[bool, typer.Option("--json", help="print only images per class, as JSON")] = False,
) -> None:
    """Predict the class of every image in a folder, with the probability of each class; labels are not needed.

    Example: protofed predict my-run --images new-images --out predictions.csv
    """
    from protofed.inference import Classifier, predict

    counts = predict(Classifier(run, client, model_of), images, out)
    if as_json:
        print(json.dumps(counts))
        return
    rows = [[name, str(count)] for name, count in counts.items() if count]
    show_table(Table(f"{counted(sum(counts.values()), 'image')}, written to {out}", ["predicted", "images"], rows))

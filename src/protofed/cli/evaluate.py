"""`protofed evaluate`: a run's models on data they have never seen."""

import json
from pathlib import Path
from typing import Annotated

import typer

from protofed.cli.options import DataRootOption, ModelOfOption
from protofed.cli.output import console, percent, show_table
from protofed.text import Table, split_names


def evaluate_command(
    run: Annotated[Path, typer.Argument(help="the folder of a finished run")],
    data: Annotated[str, typer.Option("--data", help="a data set's name, a folder or a manifest")],
    data_root: DataRootOption = None,
    domains: Annotated[str | None, typer.Option("--domains", help="use only these domains")] = None,
    labels: Annotated[str | None, typer.Option("--labels", help="regroup classes, as in run")] = None,
    part: Annotated[str, typer.Option("--part", help="test | train | all images of the data")] = "test",
    clients: Annotated[str | None, typer.Option("--clients", help="a,b (default: all, and global)")] = None,
    model_of: ModelOfOption = "last",
    out: Annotated[Path | None, typer.Option("--out", help="also write the figures to this JSON file")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the figures as JSON, and nothing else")] = False,
) -> None:
    """Score every client's model on other data: accuracy, balanced accuracy, AUC and confusion matrix.

    Example: protofed evaluate my-run --data external-site --part all --labels "0=healthy,1-4=diseased"
    """
    from protofed.inference import evaluate

    content = evaluate(
        run,
        data,
        data_root=data_root,
        domains=domains,
        labels=labels,
        part=part,
        clients=split_names(clients),
        out=out,
        model_of=model_of,
    )
    if as_json:
        print(json.dumps(content))
        return
    rows = [
        [name, *(percent(scores[key]) for key in ("accuracy", "balanced_accuracy", "auc"))]
        for name, scores in content["models"].items()
    ]
    title = f"{content['images']} images of {content['data']} ({content['part']}), in %"
    show_table(Table(title, ["model", "accuracy", "balanced accuracy", "AUC"], rows))
    for name, scores in content["models"].items():
        console().print(f"{name}: confusion (rows: truth, columns: prediction) {scores['confusion']}")

"""`protofed evaluate`: a run's models on data they have never seen."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from protofed.cli.metric_tables import confusion_table
from protofed.cli.options import DataRootOption, ModelOfOption
from protofed.cli.output import percent, show_table
from protofed.metrics import METRICS, main_metric
from protofed.text import Table, counted, interval, split_names

_MOST_CLASSES = 12
"""Of a confusion matrix in a terminal; --json has them all."""


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
    as_json: Annotated[bool, typer.Option("--json", help="print only the figures, as JSON")] = False,
) -> None:
    """Score every client's model on other data: accuracy, AUC and the other metrics, with confusion matrices.

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
    _show(content)


def _show(content: Mapping[str, Any]) -> None:
    """All metrics of every model, and its confusion matrix where that fits on a screen."""
    classes, models = content["classes"], content["models"]
    names = [name for name in METRICS if name in next(iter(models.values()))]
    rows = [
        [
            name,
            *(percent(scores[key]) for key in names),
            interval(scores["intervals"][main_metric(classes).name]),
        ]
        for name, scores in models.items()
    ]
    title = f"{counted(content['images'], 'image')} of {content['data']} ({content['part']}), in %"
    columns = ["model", *(METRICS[name].title for name in names), f"95 % interval of {main_metric(classes).title}"]
    show_table(Table(title, columns, rows))
    for name, scores in models.items() if len(classes) <= _MOST_CLASSES else ():
        show_table(confusion_table(f"{name}: images by class and prediction", scores["confusion"], classes))

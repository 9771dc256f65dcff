"""`protofed models`: the networks, or one of them explained."""

import inspect
import json
from typing import Annotated, Any

import typer

from protofed.cli import completion
from protofed.cli.output import console, show_table
from protofed.models import ModelInfo, describe, model_names
from protofed.registry import load_plugin


def models_command(
    name: Annotated[str | None, typer.Argument(help="explain this one", autocompletion=completion.models)] = None,
    plugin: Annotated[list[str] | None, typer.Option("--plugin", help="a Python file that registers models")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="for machines")] = False,
) -> None:
    """List the networks, or show the options of one.

    Example: protofed models resnet10
    """
    for path in plugin or []:
        load_plugin(path)
    listed = [describe(name)] if name is not None else [describe(each) for each in model_names()]
    if as_json:
        content = [_plain(info) for info in listed]
        print(json.dumps(content if name is None else content[0]))
    elif name is None:
        rows = [[info.name, info.description, ", ".join(info.options)] for info in listed]
        show_table("Models (--model NAME)", ["name", "what it is", "options"], rows, figures=False)
    else:
        console().print(f"{listed[0].name}: {listed[0].description}\n")
        rows = [
            [key, _text(option.default), option.values, option.description] for key, option in listed[0].options.items()
        ]
        columns = ["option", "default", "values", "what it does"]
        show_table("Options (--set model.NAME=VALUE)", columns, rows, figures=False)


def _plain(info: ModelInfo) -> dict[str, Any]:
    options = {
        key: {"type": option.values, "default": _text(option.default), "doc": option.description}
        for key, option in info.options.items()
    }
    return {"name": info.name, "description": info.description, "options": options}


def _text(default: object) -> str:
    if default is None or default is inspect.Parameter.empty:
        return "unset"
    return str(default)

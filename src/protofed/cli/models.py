"""`protofed models`: the networks, or one of them explained."""

import inspect
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from protofed.cli import completion
from protofed.cli.options import JsonOption
from protofed.cli.output import console, show_or_dump, show_table
from protofed.models import ModelInfo, describe, model_names
from protofed.registry import load_plugin
from protofed.text import Table


def models_command(
    name: Annotated[str | None, typer.Argument(help="explain this one", autocompletion=completion.models)] = None,
    plugin: Annotated[list[str] | None, typer.Option("--plugin", help="a Python file that registers models")] = None,
    as_json: JsonOption = False,
) -> None:
    """List the networks, or show the options of one.

    Example: protofed models resnet10
    """
    for path in plugin or []:
        load_plugin(path)
    if name is not None:
        show_or_dump(_described(describe(name)), as_json, _show)
    else:
        show_or_dump([_described(describe(each)) for each in model_names()], as_json, _show_all)


def _show_all(entries: Sequence[dict[str, Any]]) -> None:
    rows = [[entry["name"], entry["description"], ", ".join(entry["options"])] for entry in entries]
    show_table(Table("Models (--model NAME)", ["name", "what it is", "options"], rows, numeric=False))


def _show(entry: dict[str, Any]) -> None:
    console().print(f"{entry['name']}: {entry['description']}\n")
    rows = [[key, option["default"], option["type"], option["doc"]] for key, option in entry["options"].items()]
    columns = ["option", "default", "values", "what it does"]
    show_table(Table("Options (--set model.NAME=VALUE)", columns, rows, numeric=False))


def _described(info: ModelInfo) -> dict[str, Any]:
    options = {key: {**option._asdict(), "default": _text(option.default)} for key, option in info.options.items()}
    return {"name": info.name, "description": info.description, "options": options}


def _text(default: object) -> str:
    if default is None or default is inspect.Parameter.empty:
        return "unset"
    return str(default)

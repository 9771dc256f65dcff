"""`protofed models`: the networks, or one of them explained."""

import inspect
from collections.abc import Sequence
from typing import Any

from protofed.cli import completion
from protofed.cli.catalogue import catalogue_command
from protofed.cli.output import console, show_table
from protofed.models import describe, model_names
from protofed.text import Table


def _show_all(entries: Sequence[dict[str, Any]]) -> None:
    rows = [[entry["name"], entry["description"], ", ".join(entry["options"])] for entry in entries]
    show_table(Table("Models (--model NAME)", ["name", "description", "options"], rows, numeric=False))


def _show(entry: dict[str, Any]) -> None:
    console().print(f"{entry['name']}: {entry['description']}\n")
    rows = [[key, option["default"], option["type"], option["doc"]] for key, option in entry["options"].items()]
    columns = ["option", "default", "values", "description"]
    show_table(Table("Options (--set model.NAME=VALUE)", columns, rows, numeric=False))


def _describe(name: str) -> dict[str, Any]:
    info = describe(name)
    options = {
        key: {"type": option.values, "default": _text(option.default), "doc": option.description}
        for key, option in info.options.items()
    }
    return {"name": info.name, "description": info.description, "options": options}


def _text(default: object) -> str:
    if default is None or default is inspect.Parameter.empty:
        return "unset"
    return str(default)


models_command = catalogue_command(
    "models",
    help="""List the networks, or show the options of one.

    Example: protofed models resnet10
    """,
    names=model_names,
    complete=completion.models,
    describe=_describe,
    show=_show,
    show_all=_show_all,
)

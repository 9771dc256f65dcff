"""`protofed methods`: the methods, or one of them explained."""

import inspect
import json
from typing import Annotated, Any

import typer

from protofed.cli import completion
from protofed.cli.output import console, show_table
from protofed.method import Method
from protofed.registry import find_method, knobs, load_plugin, method_names


def methods_command(
    name: Annotated[str | None, typer.Argument(help="explain this one", autocompletion=completion.methods)] = None,
    plugin: Annotated[list[str] | None, typer.Option("--plugin", help="a Python file that registers methods")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="for machines")] = False,
) -> None:
    """List the methods, or explain one: paper, what travels, hyper-parameters, contradictions.

    Example: protofed methods i2pfl
    """
    for path in plugin or []:
        load_plugin(path)
    if name is not None:
        described = _described(name, find_method(name))
        print(json.dumps(described)) if as_json else _show(described)
        return
    listed = [_described(each, find_method(each)) for each in method_names()]
    if as_json:
        print(json.dumps(listed))
        return
    rows = [[entry["name"], entry["kind"], entry["sends_up"], entry["summary"]] for entry in listed]
    table_columns = ["name", "model", "sends up", "in short"]
    show_table("Methods (protofed methods NAME explains one)", table_columns, rows, figures=False)


def _described(name: str, cls: type[Method]) -> dict[str, Any]:
    return {
        "name": name,
        "kind": cls().kind,
        "summary": " ".join((inspect.getdoc(cls) or "").split("\n\n")[0].split()),
        "paper": cls.paper,
        "sends_up": cls.sends_up,
        "sends_down": cls.sends_down,
        "hyper_parameters": [
            {"name": knob.name, "values": knob.values, "default": knob.default, "description": knob.description}
            for knob in knobs(cls)
        ],
        "not_vectorised": cls.not_vectorised,
        "readings": list(cls.readings),
        "presets": {preset: dict(values) for preset, values in cls.presets.items()},
    }


def _show(entry: dict[str, Any]) -> None:
    out = console()
    out.print(f"{entry['name']} ({entry['kind']}): {entry['summary']}")
    out.print(f"Paper: {entry['paper']}")
    out.print(f"Up:    {entry['sends_up']}\nDown:  {entry['sends_down']}\n")
    rows = [[k["name"], _text(k["default"]), k["values"], k["description"]] for k in entry["hyper_parameters"]]
    show_table(
        "Hyper-parameters (--set NAME=VALUE)", ["name", "default", "values", "what it does"], rows, figures=False
    )
    for preset, values in entry["presets"].items():
        out.print(f"--preset {preset}: " + ", ".join(f"{key}={_text(value)}" for key, value in values.items()))
    if entry["not_vectorised"]:
        out.print(f"\nNot on the engine vmap: {entry['not_vectorised']}.")
    if entry["readings"]:
        out.print("\nWhere the paper is silent or contradicts itself:")
        for reading in entry["readings"]:
            out.print(f"- {reading}")


def _text(value: object) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)

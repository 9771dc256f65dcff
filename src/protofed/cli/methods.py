"""`protofed methods`: the methods, or one of them explained."""

import inspect
from collections.abc import Sequence
from typing import Any

from protofed.cli import completion
from protofed.cli.catalogue import catalogue_command
from protofed.cli.output import console, show_table
from protofed.registry import find_method, knobs, method_names
from protofed.text import Table, setting


def _show_all(entries: Sequence[dict[str, Any]]) -> None:
    rows = [[entry["name"], entry["kind"], entry["sends_up"], entry["summary"]] for entry in entries]
    columns = ["name", "model", "sends up", "in short"]
    show_table(Table("Methods (protofed methods NAME describes one)", columns, rows, numeric=False))


def _describe(name: str) -> dict[str, Any]:
    cls = find_method(name)
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
        "trains": "what --train selects" if cls.trains_backbone else "what its paper prescribes, regardless of --train",
        "not_vectorised": cls.not_vectorised,
        "readings": list(cls.readings),
        "presets": {preset: dict(values) for preset, values in cls.presets.items()},
    }


def _show(entry: dict[str, Any]) -> None:
    out = console()
    out.print(f"{entry['name']} ({entry['kind']}): {entry['summary']}")
    out.print(f"Paper: {entry['paper']}")
    out.print(f"Up:    {entry['sends_up']}\nDown:  {entry['sends_down']}")
    out.print(f"Trains {entry['trains']}; only trained weights are sent.\n")
    rows = [[k["name"], setting(k["default"]), k["values"], k["description"]] for k in entry["hyper_parameters"]]
    columns = ["name", "default", "values", "description"]
    show_table(Table("Hyper-parameters (--set NAME=VALUE)", columns, rows, numeric=False))
    for preset, values in entry["presets"].items():
        out.print(f"--preset {preset}: " + ", ".join(f"{key}={setting(value)}" for key, value in values.items()))
    if entry["not_vectorised"]:
        out.print(f"\nNot available with --engine vmap: {entry['not_vectorised']}.")
    if entry["readings"]:
        out.print("\nWhere the paper is silent or contradicts itself:")
        for reading in entry["readings"]:
            out.print(f"- {reading}")


methods_command = catalogue_command(
    "methods",
    help=(
        "List the methods, or describe one: paper, what it sends, hyper-parameters, contradictions.\n\n    "
        "Example: protofed methods i2pfl\n    "
    ),
    names=method_names,
    complete=completion.methods,
    describe=_describe,
    show=_show,
    show_all=_show_all,
)

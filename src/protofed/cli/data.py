"""`protofed data`: the data sets at hand, or one of them described."""

import json
from dataclasses import asdict
from typing import Annotated

import typer

from protofed.cli.output import console, show_table
from protofed.data import available, describe
from protofed.registry import load_plugin


def data_command(
    name: Annotated[str | None, typer.Argument(help="a name, a folder or a manifest to describe")] = None,
    data_root: Annotated[str | None, typer.Option("--data-root", help="where data sets lie by name")] = None,
    plugin: Annotated[list[str] | None, typer.Option("--plugin", help="a Python file that registers data sets")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="for machines")] = False,
) -> None:
    """List the data sets that can be used by name, or describe one of them or a folder of your own.

    Example: protofed data digits
    """
    for path in plugin or []:
        load_plugin(path)
    if name is None:
        infos = available(data_root)
        if as_json:
            print(json.dumps([asdict(info) for info in infos]))
        else:
            rows = [[info.name, ", ".join(info.domains), info.description] for info in infos]
            show_table("Data sets (--data NAME)", ["name", "domains", "what it is"], rows, figures=False)
            console().print(
                "Your own: --data FOLDER with DOMAIN.npz files or DOMAIN/train/CLASS/ images, or a manifest."
            )
        return
    summary = describe(name, data_root)
    if as_json:
        print(json.dumps(asdict(summary)))
        return
    out = console()
    channels, height, width = summary.image_shape
    out.print(f"{summary.name}: {summary.description}")
    out.print(f"{len(summary.classes)} classes: {', '.join(summary.classes)}; images {height}x{width}x{channels}")
    out.print(f"Source: {summary.source}\nLicence: {summary.licence}")
    rows = [[domain.name, str(domain.train), str(domain.test)] for domain in summary.domains]
    show_table("Domains", ["domain", "train", "test"], rows)
    for warning in summary.warnings:
        out.print(f"warning: {warning}")

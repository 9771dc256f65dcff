"""Commands that list everything registered of a kind, or explain one of it."""

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from protofed.cli.options import JsonOption
from protofed.cli.output import show_or_dump
from protofed.registry import load_plugin

Described = dict[str, Any]


def catalogue_command(
    plural: str,
    *,
    help: str,
    names: Callable[[], Sequence[str]],
    complete: Callable[[str], list[str]],
    describe: Callable[[str], Described],
    show: Callable[[Described], None],
    show_all: Callable[[Sequence[Described]], None],
) -> Callable[..., None]:
    """A command of `names`, each of which `describe` can explain."""

    def command(
        name: Annotated[str | None, typer.Argument(help="the one to describe", autocompletion=complete)] = None,
        plugin: Annotated[
            list[str] | None, typer.Option("--plugin", help=f"a Python file that registers {plural}")
        ] = None,
        as_json: JsonOption = False,
    ) -> None:
        for path in plugin or []:
            load_plugin(path)
        if name is not None:
            show_or_dump(describe(name), as_json, show)
        else:
            show_or_dump([describe(each) for each in names()], as_json, show_all)

    command.__doc__ = help
    return command

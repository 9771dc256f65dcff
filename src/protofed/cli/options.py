"""Command-line options made from the definition of `Options`, so that nothing is said twice."""

import inspect
import json
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic.fields import FieldInfo

from protofed.cli import completion
from protofed.errors import UserError
from protofed.runs import Options

QuietOption = Annotated[bool, typer.Option("--quiet", help="say nothing but warnings")]
JsonOption = Annotated[bool, typer.Option("--json", help="for machines")]
ModelOfOption = Annotated[
    str, typer.Option("--model-of", help="last | best: the models after the last round, or after the best where kept")
]
DataRootOption = Annotated[str | None, typer.Option("--data-root", help="where data sets lie by name")]
MovedDataOption = Annotated[
    str | None, typer.Option("--data-root", help="a folder that has the run's images now, under the name they had")
]
ShardOption = Annotated[
    str | None, typer.Option("--shard", metavar="K/N", help="do the K-th of N parts; machines share --out")
]
StrictOption = Annotated[
    bool, typer.Option("--strict", help="exit code 3 where a run ends with a warning about its outcome")
]
TensorBoardOption = Annotated[
    bool, typer.Option("--tensorboard", help="also write event files, to tensorboard/ in every run folder")
]

_REPEATED = ("set", "plugin")


def parse_integers(text: str, flag: str = "--seeds") -> list[int]:
    """The numbers in 0,1,2."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"{flag} takes whole numbers separated by commas, not {text!r}") from None


def takes_run_options(without: tuple[str, ...] = ()) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: the command gets every option of a run, and receives those the user gave as the dict `run_options`."""

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        names = [name for name in Options.model_fields if name not in without]

        @wraps(command)
        def with_options(**values: Any) -> Any:
            run_options = {name: values.pop(name) for name in names}
            return command(
                run_options={name: value for name, value in run_options.items() if value not in (None, [])}, **values
            )

        own = [entry for entry in inspect.signature(command).parameters.values() if entry.name != "run_options"]
        parameters = [*own, *(_parameter(name, Options.model_fields[name]) for name in names)]
        with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        with_options.__annotations__ = {entry.name: entry.annotation for entry in parameters}
        return with_options

    return decorate


def options_of(run_json: Path) -> dict[str, Any]:
    """The options stored in a run.json, to run it again."""
    try:
        described = json.loads(run_json.read_text())
        stored = dict(described["options"])
        # A relative path means something else from another folder.
        place = described["data"].get("place") or {}
        if place.get("path") and Path(place["path"]).exists():
            stored["data"] = place["path"]
        if stored["engine"] == "auto" and described["engine"]["name"] == "vmap":
            stored["engine"] = "vmap"  # the one choice of `auto` on which the last bits depend
    except FileNotFoundError:
        raise UserError(f"no such file: {run_json}; --from takes the run.json of an earlier run") from None
    except (ValueError, KeyError, TypeError, IsADirectoryError):
        raise UserError(f"{run_json} is not the run.json of a run") from None
    return stored


def _tab(name: str) -> dict[str, Any]:
    """What a shell offers as its value."""
    return {"autocompletion": completion.OPTIONS[name]} if name in completion.OPTIONS else {}


def _parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    flag = f"--{name.replace('_', '-')}"
    default = field.get_default(call_default_factory=True)
    text = field.description or ""
    if default not in (None, [], {}, False):
        text += f" (default: {default})"
    if field.annotation is bool:
        annotation: Any = Annotated[bool | None, typer.Option(flag, help=text, show_default=False)]
    elif name in _REPEATED:
        metavar = "KEY=VALUE" if name == "set" else "FILE.py"
        annotation = Annotated[list[str] | None, typer.Option(flag, help=text, metavar=metavar, show_default=False)]
    else:
        # Values are texts here; `Options` checks them and says what is wrong in the same words as in Python.
        annotation = Annotated[
            str | None, typer.Option(flag, help=text, metavar="VALUE", show_default=False, **_tab(name))
        ]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)

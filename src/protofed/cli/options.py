"""Command-line options made from the definition of `Options`, so that nothing is said twice."""

import inspect
import json
import logging
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from protofed.cli import completion
from protofed.errors import UserError
from protofed.runs import Options
from protofed.runs.config_file import options_to_repeat, read_config

log = logging.getLogger("protofed")

QuietOption = Annotated[bool, typer.Option("--quiet", help="print only warnings")]
JsonOption = Annotated[bool, typer.Option("--json", help="for machines")]
ModelOfOption = Annotated[
    str,
    typer.Option(
        "--model-of", help="last | best: the models after the last round, or after the best one if it was kept"
    ),
]
DataRootOption = Annotated[str | None, typer.Option("--data-root", help="the folder that contains data sets by name")]
MovedDataOption = Annotated[
    str | None, typer.Option("--data-root", help="a folder that now contains the run's images, under their old name")
]
TrainingImagesOption = Annotated[
    bool,
    typer.Option("--with-training-images", help="include pictures of training images; do not send the page then"),
]
ShardOption = Annotated[
    str | None, typer.Option("--shard", metavar="K/N", help="do the K-th of N parts; the machines share --out")
]
StrictOption = Annotated[
    bool, typer.Option("--strict", help="exit with code 3 if a run ends with a warning about its result")
]
ConfigOption = Annotated[
    Path | None, typer.Option("--config", help="a TOML file with options; the command line takes precedence")
]
TrackOption = Annotated[
    list[str] | None, typer.Option("--track", metavar="NAME", help="also log to mlflow | tensorboard | wandb; repeat")
]
TensorBoardOption = Annotated[
    bool, typer.Option("--tensorboard", help="same as --track tensorboard: event files in every run folder")
]

_REPEATED = ("set", "plugin")


def trackers_of(track: list[str] | None, tensorboard: bool) -> list[str]:
    """Names of trackers, from both ways of giving them."""
    return [*(track or []), *(["tensorboard"] if tensorboard else [])]


def parse_integers(text: str, flag: str = "--seeds") -> list[int]:
    """The numbers in 0,1,2."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"{flag} takes whole numbers separated by commas, not {text!r}") from None


def takes_run_options(
    without: tuple[str, ...] = (), config: tuple[str, ...] = ()
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Decorator: the command gets every option of a run, and receives those the user gave as the dict `run_options`.

    A command that has the option `config` takes them from a file as well, with those of its own that are named here.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        names = [name for name in Options.model_fields if name not in without]

        @wraps(command)
        def with_options(**values: Any) -> Any:
            given = {name: values.pop(name) for name in names}
            run_options = {name: value for name, value in given.items() if value not in (None, [])}
            if (path := values.get("config")) is not None:
                content = read_config(path, [*Options.model_fields, *config])
                others = [name for name in content if name in without and name not in config]
                if others:
                    log.warning("%s: %s is not an option of this command and was ignored", path, ", ".join(others))
                content = {name: value for name, value in content.items() if name not in others}
                for entry in own:
                    if entry.name in config and entry.name in content:
                        stored = _own_value(path, entry, content.pop(entry.name))
                        if values[entry.name] in (entry.default, []):
                            values[entry.name] = stored
                run_options = over_stored(content, run_options)
            return command(run_options=run_options, **values)

        own = [entry for entry in inspect.signature(command).parameters.values() if entry.name != "run_options"]
        parameters = [*own, *(_parameter(name, Options.model_fields[name]) for name in names)]
        with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        with_options.__annotations__ = {entry.name: entry.annotation for entry in parameters}
        return with_options

    return decorate


def over_stored(stored: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Stored options, and over them those of the command line; settings are joined key by key."""
    settings = [f"{key}={value}" for key, value in stored.get("set", {}).items()]
    return {**stored, **given, "set": [*settings, *given.get("set", [])]}


def options_of(run_json: Path) -> dict[str, Any]:
    """The options stored in a run.json, to run it again."""
    try:
        return options_to_repeat(json.loads(run_json.read_text()))
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"no such file: {run_json}; give the run.json of an earlier run") from None
    except (ValueError, KeyError, TypeError, IsADirectoryError):
        raise UserError(f"{run_json} is not the run.json of a run") from None


def _own_value(path: Path, entry: inspect.Parameter, value: Any) -> Any:
    """A value of a file for an option of the command itself; lists where the command line has commas."""
    if isinstance(value, list) and "list" not in str(entry.annotation):
        value = ",".join(map(str, value))
    try:
        return TypeAdapter(entry.annotation).validate_python(value)
    except ValidationError:
        raise UserError(f"{path}: {entry.name}={value} is not valid") from None


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

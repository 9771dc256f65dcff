"""Settings of a data set: what the keyword arguments of its reader say, for `--set data.KEY=VALUE`."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from protofed.data.images import RawData
from protofed.errors import UserError, unknown_name

Reader = Callable[..., RawData]


@dataclass(frozen=True)
class DataOption:
    """One setting as a user sees it: `values` says in words what it takes."""

    name: str
    values: str
    default: object
    description: str
    hint: Any = field(repr=False, compare=False)


def options_of(reader: Reader) -> dict[str, DataOption]:
    """The keyword-only arguments of a reader; each needs a type, and `Annotated[type, "text"]` describes it."""
    parameters = inspect.signature(reader).parameters.values()
    keywords = [parameter for parameter in parameters if parameter.kind is inspect.Parameter.KEYWORD_ONLY]
    hints = get_type_hints(reader, include_extras=True) if keywords else {}
    options: dict[str, DataOption] = {}
    for parameter in keywords:
        if parameter.name not in hints:
            raise UserError(
                f"the setting {parameter.name!r} of a data reader needs a type, such as {parameter.name}: int"
            )
        hint = hints[parameter.name]
        base, *notes = get_args(hint) if get_origin(hint) is Annotated else (hint,)
        description = next((note for note in notes if isinstance(note, str)), "")
        options[parameter.name] = DataOption(parameter.name, _in_words(base), parameter.default, description, hint)
    return options


def checked(options: Mapping[str, DataOption], given: Mapping[str, object], of: str) -> dict[str, Any]:
    """The settings in their own types; they may come as text, as from a command line."""
    values: dict[str, Any] = {}
    for name, value in given.items():
        if name not in options:
            if not options:
                raise UserError(f"data.{name}: the data {of} has no settings of its own; leave it out")
            raise unknown_name(f"setting of the data {of}:", name, options)
        try:
            values[name] = TypeAdapter(options[name].hint).validate_python(value)
        except ValidationError:
            raise UserError(f"data.{name}={value} is not valid; it takes {options[name].values}") from None
    return values


def _in_words(hint: Any) -> str:
    choices = "|".join(str(choice) for choice in get_args(hint))
    return choices or {bool: "on|off", int: "a whole number", float: "a number", str: "a text"}.get(hint, str(hint))

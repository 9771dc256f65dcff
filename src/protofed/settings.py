"""Settings of methods, models and data sets: what each takes, in words, and text turned into a value of its type."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from protofed.errors import UserError, unknown_name

V = TypeVar("V")

_SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}
_WORDS = {bool: "on|off", int: "a whole number", float: "a number", str: "a text"}


@dataclass(frozen=True)
class SettingInfo:
    """One setting as a user sees it; a `default` of `inspect.Parameter.empty` means that it is required."""

    name: str
    values: str
    """What it takes, in words."""
    default: object
    description: str
    hint: Any = field(repr=False, compare=False)
    """The type that values are checked against."""

    @classmethod
    def of(cls, name: str, hint: Any, default: object = None, description: str = "") -> "SettingInfo":
        """From a type; its annotations may hold bounds and a description, as pydantic's `Field` or as plain text."""
        notes = get_args(hint)[1:] if get_origin(hint) is Annotated else ()
        texts = (note if isinstance(note, str) else getattr(note, "description", None) for note in notes)
        return cls(name, in_words(hint), default, description or next(filter(None, texts), ""), hint)


def keyword_settings(function: Callable[..., Any], of: str) -> dict[str, SettingInfo]:
    """The keyword-only arguments of a function, each of which needs a type; `of` names their owner in errors."""
    parameters = inspect.signature(function).parameters.values()
    keywords = [parameter for parameter in parameters if parameter.kind is inspect.Parameter.KEYWORD_ONLY]
    hints = get_type_hints(function, include_extras=True) if keywords else {}
    for parameter in keywords:
        if parameter.name not in hints:
            raise UserError(
                f"setting {parameter.name!r} of {of} needs a type annotation, such as {parameter.name}: int"
            )
    return {each.name: SettingInfo.of(each.name, hints[each.name], each.default) for each in keywords}


def checked(
    settings: Mapping[str, SettingInfo], given: Mapping[str, object], of: str, prefix: str = ""
) -> dict[str, Any]:
    """What is given, each value in the type of its setting; it may come as text, as from a command line."""
    values: dict[str, Any] = {}
    for name, value in given.items():
        if not settings:
            raise UserError(f"{prefix}{name}: {of} has no settings; omit it")
        if name not in settings:
            raise unknown_name(f"setting of {of}:", name, settings)
        text = value.strip() if isinstance(value, str) else value
        try:
            values[name] = TypeAdapter(settings[name].hint).validate_python(text)
        except ValidationError:
            raise UserError(f"{prefix}{name}={text} is not valid; it takes {settings[name].values}") from None
    return values


def settings_below(prefix: str, settings: Mapping[str, V]) -> dict[str, V]:
    """The entries below `prefix.` by what follows it, or those without any prefix where it is empty."""
    if prefix:
        return {key.removeprefix(f"{prefix}."): v for key, v in settings.items() if key.startswith(f"{prefix}.")}
    return {key: value for key, value in settings.items() if "." not in key}


def in_words(hint: Any) -> str:
    """What a setting of this type takes, in words a user can type."""
    if get_origin(hint) is Annotated:
        base, *notes = get_args(hint)
        bounds = [bound for note in notes for bound in getattr(note, "metadata", ())]
        texts = [f"{sign} {getattr(b, key)}" for b in bounds for key, sign in _SIGNS.items() if hasattr(b, key)]
        return " ".join([in_words(base), " and ".join(texts)]).strip()
    choices = [choice for choice in get_args(hint) if choice is not NoneType]
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(in_words(choice) for choice in choices)
    if choices:
        return "|".join(str(choice) for choice in choices)
    return _WORDS.get(hint, str(hint))

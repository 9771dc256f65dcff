"""The models by name, ours and those a plugin registers, with their options."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, get_type_hints

from pydantic import TypeAdapter, ValidationError

from protofed.errors import UserError, unknown_name
from protofed.models.split import ImageShape, Split

Builder = TypeVar("Builder", bound=Callable[..., Split])


class OptionInfo(NamedTuple):
    """One option of a model as it is shown to a user; a `default` of `inspect.Parameter.empty` means required."""

    type: str
    default: object
    doc: str


@dataclass(frozen=True)
class ModelInfo:
    """What there is to say about a model."""

    name: str
    description: str
    options: Mapping[str, OptionInfo]


@dataclass(frozen=True)
class _Entry:
    builder: Callable[..., Split]
    info: ModelInfo
    parsers: Mapping[str, TypeAdapter[Any]]


_models: dict[str, _Entry] = {}


def register_model(name: str, *, description: str) -> Callable[[Builder], Builder]:
    """Offer `build(image_shape, classes, *, options...) -> Split` under `name`; each option needs a type annotation."""

    def register(builder: Builder) -> Builder:
        if name in _models and _origin(_models[name].builder) != _origin(builder):
            raise UserError(f"a model named {name!r} exists already; register yours under another name")
        hints = get_type_hints(builder, include_extras=True)
        parsers: dict[str, TypeAdapter[Any]] = {}
        options: dict[str, OptionInfo] = {}
        for option, parameter in inspect.signature(builder).parameters.items():
            if parameter.kind is not inspect.Parameter.KEYWORD_ONLY:
                continue
            if option not in hints:
                raise UserError(f"option {option!r} of model {name!r} needs a type annotation, such as {option}: int")
            parsers[option] = TypeAdapter(hints[option])
            schema = parsers[option].json_schema()
            options[option] = OptionInfo(_type_text(schema), parameter.default, schema.get("description", ""))
        _models[name] = _Entry(builder, ModelInfo(name, description, options), parsers)
        return builder

    return register


def build_model(name: str, image_shape: ImageShape, classes: int, options: Mapping[str, object] | None = None) -> Split:
    """A model with fresh weights from torch's global generator; options may be text, as on a command line."""
    entry = _entry(name)
    if len(image_shape) != 3 or min(image_shape) < 1 or classes < 1:
        raise UserError(
            f"model {name!r} cannot be built for images {tuple(image_shape)} and {classes} classes; "
            "images are (channels, height, width), and all numbers at least 1"
        )
    parsed = {option: _parse(entry, option, value) for option, value in (options or {}).items()}
    for option, info in entry.info.options.items():
        if info.default is inspect.Parameter.empty and option not in parsed:
            raise UserError(f"model {name!r} needs the option {option!r} ({info.type})")
    model = entry.builder(image_shape, classes, **parsed)
    if not isinstance(model, Split):
        raise UserError(f"model {name!r} was built as a {type(model).__name__}; its builder must return a Split")
    return model


def model_names() -> tuple[str, ...]:
    """All known models, sorted."""
    return tuple(sorted(_models))


def describe(name: str) -> ModelInfo:
    """What there is to say about one model."""
    return _entry(name).info


def require_side(name: str, image_shape: ImageShape, side: int) -> None:
    """Refuse images smaller than `side` in height or width."""
    _, height, width = image_shape
    if min(height, width) < side:
        raise UserError(f"model {name!r} needs images of at least {side}x{side} pixels, not {height}x{width}")


def _origin(builder: Callable[..., Split]) -> tuple[str, str]:
    # A file that is read twice (a notebook cell, a reload) registers the same builder again.
    return builder.__module__, builder.__qualname__


def _entry(name: str) -> _Entry:
    if name not in _models:
        raise unknown_name("model", name, _models)
    return _models[name]


def _parse(entry: _Entry, option: str, value: object) -> object:
    if option not in entry.parsers:
        if not entry.parsers:
            raise UserError(f"model {entry.info.name!r} has no options, so {option!r} cannot be set")
        raise unknown_name(f"option of model {entry.info.name!r}:", option, entry.parsers)
    try:
        return entry.parsers[option].validate_python(value)
    except ValidationError:
        allowed = entry.info.options[option].type
        raise UserError(
            f"option {option!r} of model {entry.info.name!r} cannot be {value!r}; allowed: {allowed}"
        ) from None


_TYPE_WORDS = {"integer": "whole number", "number": "number", "boolean": "on or off", "string": "text"}
_BOUND_WORDS = {
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "exclusiveMaximum": "below",
}


def _type_text(schema: Mapping[str, Any]) -> str:
    """A JSON schema in plain words."""
    if "anyOf" in schema:
        return " or ".join(_type_text(choice) for choice in schema["anyOf"] if choice.get("type") != "null")
    if "enum" in schema:
        return " or ".join(str(choice) for choice in schema["enum"])
    if "const" in schema:
        return str(schema["const"])
    kind = schema.get("type", "value")
    bounds = " and ".join(f"{words} {schema[key]}" for key, words in _BOUND_WORDS.items() if key in schema)
    return f"{_TYPE_WORDS.get(kind, kind)} {bounds}".strip()

"""The models by name, ours and those a plugin registers, with their options."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from protofed.errors import UserError, unknown_name
from protofed.models.split import ImageShape, Split
from protofed.settings import SettingInfo, checked, keyword_settings

Builder = TypeVar("Builder", bound=Callable[..., Split])


@dataclass(frozen=True)
class ModelInfo:
    """A description of a model."""

    name: str
    description: str
    options: Mapping[str, SettingInfo]


@dataclass(frozen=True)
class _Entry:
    builder: Callable[..., Split]
    info: ModelInfo


_models: dict[str, _Entry] = {}


def register_model(name: str, *, description: str) -> Callable[[Builder], Builder]:
    """Offer `build(image_shape, classes, *, options...) -> Split` under `name`; each option needs a type annotation."""

    def register(builder: Builder) -> Builder:
        if name in _models and _origin(_models[name].builder) != _origin(builder):
            raise UserError(f"a model named {name!r} already exists; register yours under another name")
        options = keyword_settings(builder, f"model {name!r}")
        _models[name] = _Entry(builder, ModelInfo(name, description, options))
        return builder

    return register


def build_model(name: str, image_shape: ImageShape, classes: int, options: Mapping[str, object] | None = None) -> Split:
    """A model with fresh weights from torch's global generator; options may be text, as on a command line."""
    entry = _entry(name)
    if len(image_shape) != 3 or min(image_shape) < 1 or classes < 1:
        raise UserError(
            f"model {name!r} cannot be built for images {tuple(image_shape)} and {classes} classes; images are "
            "(channels, height, width), and all numbers must be at least 1"
        )
    settings = checked(entry.info.options, options or {}, f"model {name!r}", "model.")
    for option, info in entry.info.options.items():
        if info.default is inspect.Parameter.empty and option not in settings:
            raise UserError(f"model {name!r} needs the setting model.{option}, {info.values}")
    model = entry.builder(image_shape, classes, **settings)
    if not isinstance(model, Split):
        raise UserError(f"model {name!r} was built as a {type(model).__name__}; its builder must return a Split")
    return model


def model_names() -> tuple[str, ...]:
    """All known models, sorted."""
    return tuple(sorted(_models))


def describe(name: str) -> ModelInfo:
    """The description of one model."""
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

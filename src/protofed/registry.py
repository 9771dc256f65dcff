"""Methods by name: ours, a plugin's, or a class in a user's file. The only place that imports particular methods."""

import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import Field, dataclass, fields
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType, NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from protofed.errors import UserError, unknown_name
from protofed.method import Method

M = TypeVar("M", bound=type[Method])
V = TypeVar("V")

_methods: dict[str, type[Method]] = {}


def register(name: str) -> Callable[[M], M]:
    """Class decorator: make a method known to every command under `name`."""

    def remember(cls: M) -> M:
        if name in _methods and _methods[name].__qualname__ != cls.__qualname__:
            raise UserError(f"a method named {name!r} exists already; give {cls.__name__} another name")
        _methods[name] = cls
        return cls

    return remember


@contextmanager
def registered(cls: type[Method]) -> Iterator[str]:
    """Inside: a name by which the class can be run; that of its own, or one that is forgotten afterwards."""
    own = next((name for name in method_names() if _methods[name] is cls), None)
    if own is not None:
        yield own
        return
    name = f"unregistered-{cls.__name__.lower()}"
    _methods[name] = cls
    try:
        yield name
    finally:
        del _methods[name]


def method_names() -> list[str]:
    """All registered names, sorted."""
    _import_known_methods()
    return sorted(_methods)


def find_method(name: str) -> type[Method]:
    """The class behind a registered name or behind `file.py:Class`."""
    if ".py:" in name:
        path, _, class_name = name.rpartition(":")
        found = getattr(load_plugin(path), class_name, None)
        if not (isinstance(found, type) and issubclass(found, Method)):
            raise UserError(f"{path} has no class {class_name!r} that extends protofed.Method")
        return found
    _import_known_methods()
    if name not in _methods:
        raise unknown_name("method", name, _methods)
    return _methods[name]


@dataclass(frozen=True)
class Knob:
    """One hyper-parameter of a method, as `protofed methods NAME` shows it."""

    name: str
    values: str
    default: object
    description: str


def knobs(cls: type[Method]) -> list[Knob]:
    """The hyper-parameters of a method; its own first, then those every method has."""
    hints = get_type_hints(cls, include_extras=True)
    shared = {entry.name for entry in fields(Method)}
    listed = [
        Knob(_public_name(entry), in_words(hints[entry.name]), entry.default, entry.metadata.get("description", ""))
        for entry in fields(cls)
    ]
    return sorted(listed, key=lambda item: item.name in shared)


def make_method(cls: type[Method], settings: Mapping[str, object], preset: str | None = None) -> Method:
    """The method with a preset's and the user's settings; each is checked against its type."""
    chosen: dict[str, Any] = {**preset_settings(cls, preset), **settings}
    hints = get_type_hints(cls, include_extras=True)
    known = {_public_name(entry): entry.name for entry in fields(cls)}
    for name in chosen:
        if name not in known:
            raise unknown_name(f"setting of {cls.__name__}", name, known)
    checked: dict[str, Any] = {known[name]: _checked(name, value, hints[known[name]]) for name, value in chosen.items()}
    return cls(**checked)


def preset_settings(cls: type[Method], preset: str | None, prefix: str = "") -> dict[str, Any]:
    """What a preset sets below `prefix.`, or of the method itself where that is empty."""
    if preset is None:
        return {}
    if preset not in cls.presets:
        raise unknown_name(f"preset of {cls.__name__}", preset, cls.presets)
    return settings_below(prefix, cls.presets[preset])


def settings_below(prefix: str, settings: Mapping[str, V]) -> dict[str, V]:
    """The entries below `prefix.` by what follows it, or those without any prefix where it is empty."""
    if prefix:
        return {key.removeprefix(f"{prefix}."): v for key, v in settings.items() if key.startswith(f"{prefix}.")}
    return {key: value for key, value in settings.items() if "." not in key}


def _public_name(entry: Field[Any]) -> str:
    """What the user calls a hyper-parameter."""
    return str(entry.metadata.get("name", entry.name))


def load_plugin(path: str) -> ModuleType:
    """Run a user's Python file, so that the methods, models and data sets it registers are known."""
    file = Path(path).resolve()
    if not file.is_file():
        raise UserError(f"no such file: {path}; a plugin is a Python file")
    name = f"protofed_plugin_{file.stem}"
    if name in sys.modules and getattr(sys.modules[name], "__file__", None) == str(file):
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise UserError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise UserError(f"the plugin {path} fails when it is loaded: {type(error).__name__}: {error}") from error
    return module


@cache
def _import_known_methods() -> None:
    """Import every file of the methods room, and the entry points of installed packages."""
    package = importlib.import_module("protofed.methods")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    for plugin in entry_points(group="protofed"):
        plugin.load()


def _checked(name: str, value: object, hint: Any) -> object:
    if isinstance(value, str):
        value = value.strip()
    try:
        return TypeAdapter(hint).validate_python(value)
    except ValidationError:
        raise UserError(f"{name}={value} is not valid; {name} takes {in_words(hint)}") from None


def in_words(hint: Any) -> str:
    """What a setting of this type takes, in words a user can type."""
    if get_origin(hint) is Annotated:
        base, *constraints = get_args(hint)
        bounds = [part for item in constraints for part in getattr(item, "metadata", ())]
        texts = [f"{sign} {getattr(b, key)}" for b in bounds for key, sign in _SIGNS.items() if hasattr(b, key)]
        return " ".join([in_words(base), " and ".join(texts)]).strip()
    choices = [choice for choice in get_args(hint) if choice is not NoneType]
    if get_origin(hint) in (Union, UnionType):
        return " or ".join(in_words(choice) for choice in choices)
    if choices:
        return "|".join(str(choice) for choice in choices)
    return {bool: "on|off", int: "a whole number", float: "a number", str: "a text"}.get(hint, str(hint))


_SIGNS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}

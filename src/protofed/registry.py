"""Methods by name: ours, a plugin's, or a class in a user's file. The only place that imports particular methods."""

import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, get_type_hints

from protofed.errors import UserError, unknown_name
from protofed.method import Method
from protofed.settings import SettingInfo, checked, settings_below

M = TypeVar("M", bound=type[Method])

_methods: dict[str, type[Method]] = {}


def register(name: str) -> Callable[[M], M]:
    """Class decorator: make a method known to every command under `name`."""

    def remember(cls: M) -> M:
        if name in _methods and _methods[name].__qualname__ != cls.__qualname__:
            raise UserError(f"a method named {name!r} already exists; give {cls.__name__} another name")
        _methods[name] = cls
        return cls

    return remember


@contextmanager
def registered(cls: type[Method]) -> Iterator[str]:
    """Inside: a name by which the class can be run, its own or one that is forgotten afterwards."""
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
        cls = getattr(load_plugin(path), class_name, None)
        if not (isinstance(cls, type) and issubclass(cls, Method)):
            raise UserError(f"{path} has no class {class_name!r} that extends protofed.Method")
        return cls
    _import_known_methods()
    if name not in _methods:
        raise unknown_name("method", name, _methods)
    return _methods[name]


def knobs(cls: type[Method]) -> list[SettingInfo]:
    """The hyper-parameters of a method; its own first, then those every method has."""
    shared = {entry.name for entry in fields(Method)}
    return [setting for _, setting in sorted(_hyper_parameters(cls).items(), key=lambda item: item[0] in shared)]


def make_method(cls: type[Method], settings: Mapping[str, object], preset: str | None = None) -> Method:
    """The method with a preset's and the user's settings; each is checked against its type."""
    hyper_parameters = _hyper_parameters(cls)
    known = {setting.name: setting for setting in hyper_parameters.values()}
    values = checked(known, {**preset_settings(cls, preset), **settings}, cls.__name__)
    return cls(**{name: values[entry.name] for name, entry in hyper_parameters.items() if entry.name in values})


def _hyper_parameters(cls: type[Method]) -> dict[str, SettingInfo]:
    """The settings of a method by the names of its fields; users may know them by other names."""
    hints = get_type_hints(cls, include_extras=True)
    return {
        entry.name: SettingInfo.of(
            entry.metadata.get("name", entry.name),
            hints[entry.name],
            entry.default,
            entry.metadata.get("description", ""),
        )
        for entry in fields(cls)
    }


def preset_settings(cls: type[Method], preset: str | None, prefix: str = "") -> dict[str, Any]:
    """What a preset sets below `prefix.`, or of the method itself where that is empty."""
    if preset is None:
        return {}
    if preset not in cls.presets:
        raise unknown_name(f"preset of {cls.__name__}", preset, cls.presets)
    return settings_below(prefix, cls.presets[preset])


def load_plugin(path: str) -> ModuleType:
    """Run a user's Python file, so that the methods, models and data sets it registers are known."""
    if not Path(path).is_file():  # asked before it is resolved, which fails for names that no file can have
        raise UserError(f"no such file: {path}; a plugin is a Python file")
    file = Path(path).resolve()
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
        raise UserError(f"the plugin {path} fails to load: {type(error).__name__}: {error}") from error
    return module


@cache
def _import_known_methods() -> None:
    """Import every module of `protofed.methods`, and the entry points of installed packages."""
    package = importlib.import_module("protofed.methods")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    for plugin in entry_points(group="protofed"):
        plugin.load()

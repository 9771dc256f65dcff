"""The options of a run as a TOML file: read with `--config`, written beside every run.json.

Names are those of the command line, with underscores or dashes. `[set]` holds what `--set` takes, `[set.model]` what
begins with `model.`.
"""

import json
import math
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from protofed.errors import UserError, unknown_name
from protofed.runs.options import PLANNED, Options

CONFIG_FILE = "config.toml"

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")
_HEAD = (
    "# To repeat this run: protofed run --config THIS-FILE --out NEW\n# Options on the command line take "
    "precedence over this file. Relative paths start in the current folder.\n"
)
_DEFAULTS = """
# The other options are at their defaults.
"""


def read_config(path: str | Path, known: Iterable[str] = Options.model_fields) -> dict[str, Any]:
    """The options in a file, under the names that `protofed.run` takes; `protofed.run` checks the values."""
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as problem:
        raise UserError(f"the configuration {path} cannot be read: {problem.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise UserError(f"the configuration {path} is not valid TOML: {problem}") from None
    names = set(known)
    options: dict[str, Any] = {}
    for key, value in content.items():
        name = key.replace("-", "_")
        if name not in names:
            raise UserError(f"{path}: {unknown_name('option', key, names)}")
        options[name] = value
    if not isinstance(options.get("set", {}), dict):
        raise UserError(f"{path}: settings form a table, [set], with a line KEY = VALUE for each")
    if "set" in options:
        options["set"] = dict(_flat(options["set"]))
    return options


def config_text(options: Mapping[str, Any]) -> str:
    """A file that gives these options: those that matter first, the others commented out, each with its meaning."""
    chosen, silent = [], []
    for name, field in Options.model_fields.items():
        default = field.get_default(call_default_factory=True)
        value = options.get(name, default)
        if name == "set":
            continue
        said = f"# {field.description}\n"
        # What a method may decide is written in any case: silence would leave it to the method.
        if value != default or (name in PLANNED and name in options) or name == "method":
            chosen.append(f"{said}{name} = {_toml(value)}\n")
        else:
            shown = "" if value is None else f" {_toml(value)}"
            silent.append(f"{said}# {name} ={shown}\n")
    settings = "".join(f"{_key(key)} = {_toml(_typed(value))}\n" for key, value in options.get("set", {}).items())
    table = f"\n# {Options.model_fields['set'].description}\n[set]\n{settings}" if settings else ""
    # A table ends where another begins, so [set] has to come last.
    return "\n".join([_HEAD, *chosen]) + _DEFAULTS + "\n".join(["", *silent]) + table


def options_to_repeat(described: Mapping[str, Any]) -> dict[str, Any]:
    """The options that run it again, from wherever they are given; `described` is what run.json holds."""
    options = dict(described["options"])
    place = described["data"].get("place") or {}
    if place.get("path") and Path(place["path"]).exists():
        options["data"] = place["path"]
    if options["engine"] == "auto" and described["engine"]["name"] == "vmap":
        options["engine"] = "vmap"  # the one choice of `auto` on which the last bits depend
    return options


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _typed(text: str) -> object:
    """A number where it reads the same as the text."""
    for kind in (int, float):
        try:
            value = kind(text)
        except ValueError:
            continue
        if str(value) == text and math.isfinite(value) and abs(value) < 2**63:
            return value
    return text


def _key(name: str) -> str:
    return name if _BARE_KEY.fullmatch(name) else _toml(name)


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml, value))}]"
    # JSON escapes what TOML wants escaped, but for one control character.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")

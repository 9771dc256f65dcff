"""The options of a run as a TOML file: read with `--config`, written beside every run.json.

Names are those of the command line, with underscores or dashes. `[set]` holds what `--set` takes, `[set.model]` what
begins with `model.`. A run keeps the file that it was given, and the comments of it in its own file.
"""

import json
import math
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from protofed.errors import UserError, unknown_name
from protofed.runs.config_comments import END, Comment, comments_in
from protofed.runs.opened import Run
from protofed.runs.options import PLANNED, Options
from protofed.system import write_atomically

CONFIG_FILE = "config.toml"
GIVEN_FILE = "given.toml"
"""In a run folder: the file that was given with `--config`, as it was."""

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


def config_text(options: Mapping[str, Any], given: str = "") -> str:
    """A file that gives these options: those that matter first, the others commented out, each with its meaning.

    `given` is a configuration whose order and comments are kept.
    """
    said = {name: f"# {field.description}" for name, field in Options.model_fields.items()}
    comments = comments_in(given, [*said.values(), *_HEAD.splitlines(), *_DEFAULTS.splitlines()])
    chosen, silent = {}, []
    for name, field in Options.model_fields.items():
        default = field.get_default(call_default_factory=True)
        value = options.get(name, default)
        if name == "set":
            continue
        # What a method may decide is written in any case: silence would leave it to the method.
        if value != default or (name in PLANNED and name in options) or name == "method":
            chosen[name] = _entry(name, value, comments.get(name), said[name])
        elif value is not None and name in comments:
            chosen[name] = _entry(name, value, comments[name], said[name])
        else:
            shown = "" if value is None else f" {_toml(value)}"
            silent.append(f"{said[name]}\n# {name} ={shown}\n")
    order = [*(name for name in comments if name in chosen), *(name for name in chosen if name not in comments)]
    settings = "".join(
        _entry(_key(key), _typed(value), comments.get(f"set.{key}")) for key, value in options.get("set", {}).items()
    )
    table = f"\n{_lines(comments.get('set'), said['set'])}[set]\n{settings}" if settings else ""
    end = f"\n{_lines(comments[END])}" if END in comments else ""
    # A table ends where another begins, so [set] has to come last.
    return "\n".join([_HEAD, *(chosen[name] for name in order)]) + _DEFAULTS + "\n".join(["", *silent]) + table + end


def write_config(folder: Path, described: Mapping[str, Any]) -> None:
    """Write the file of a run, with the comments of the one that it was given."""
    write_atomically(folder / CONFIG_FILE, config_text(options_to_repeat(described), given_text(folder)).encode())


class KeepsConfig:
    """Callback: what was given with `--config` is kept in the run folder, as it was when the command was given."""

    def __init__(self, path: Path) -> None:
        self._content = path.read_bytes()

    def run_start(self, run: Run, rounds_done: int) -> None:
        """The folder is there, with a file that has no comments of the user yet."""
        if not rounds_done:
            write_atomically(run.path / GIVEN_FILE, self._content)
            write_config(run.path, run.config)


def given_text(folder: Path) -> str:
    """The configuration that a run was given; nothing where it was begun without one."""
    path = folder / GIVEN_FILE
    return path.read_text(encoding="utf-8") if path.exists() else ""


def options_to_repeat(described: Mapping[str, Any]) -> dict[str, Any]:
    """The options that run it again, from wherever they are given; `described` is what run.json holds."""
    options = dict(described["options"])
    place = described["data"].get("place") or {}
    if place.get("path") and Path(place["path"]).exists():
        options["data"] = place["path"]
    if options["engine"] == "auto" and described["engine"]["name"] == "vmap":
        options["engine"] = "vmap"  # the one choice of `auto` on which the last bits depend
    return options


def _lines(comment: Comment | None, meaning: str | None = None) -> str:
    """What stands above an option: the comment that was given, and its meaning unless that is explained there."""
    lines = list(comment.above) if comment is not None else []
    if meaning is not None and not (comment is not None and comment.explains):
        lines.append(meaning)
    return "".join(f"{line}\n" for line in lines)


def _entry(name: str, value: object, comment: Comment | None, meaning: str | None = None) -> str:
    beside = f"  {comment.beside}" if comment is not None and comment.beside else ""
    return f"{_lines(comment, meaning)}{name} = {_toml(value)}{beside}\n"


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

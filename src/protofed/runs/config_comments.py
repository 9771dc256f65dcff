"""The comments of a configuration file, by the option that they are about.

The standard library reads TOML without its comments. A library that edits documents would keep them too, but a run's
file is written anew in any case, with every value that is in force, so all that is needed is where a comment stood.
"""

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass

END = ""
"""Instead of an option: what stands after the last of them."""
_TOKENS = re.compile(
    r'"""(?:\\.|[^\\])*?"""|\'\'\'.*?\'\'\'|"(?:\\.|[^"\\\n])*"|\'[^\'\n]*\'|#[^\n]*|\n|[^"\'#\n]+|.', re.DOTALL
)


@dataclass(frozen=True)
class Comment:
    """What is said about an option: lines above it, which may be empty, and what follows its value."""

    above: tuple[str, ...] = ()
    beside: str = ""

    @property
    def explains(self) -> bool:
        """Whether something stands right above the option."""
        return bool(self.above and self.above[-1])


def comments_in(text: str, without: Iterable[str] = ()) -> dict[str, Comment]:
    """The comments of a valid TOML document for every option it gives, in its order; `set.KEY` for settings.

    Lines of `without` are left out, with a commented-out option that follows one of them directly: that is how
    protofed writes an option that is at its default.
    """
    ours = {line.strip() for line in without}
    found: dict[str, Comment] = {}
    table: tuple[str, ...] = ()
    above: list[str] = []
    for code, comments in _statements(text):
        if not code:
            above += comments or [""]
            continue
        path = _path(code)
        if code.startswith("["):
            table = path
            above += comments
            continue
        *inside, beside = comments
        found[_name((*table, *path))] = Comment(_tidy([*above, *inside], ours), beside)
        above = []
    end = _tidy("\n".join(above).rstrip().splitlines(), ours)
    return {**found, END: Comment(end)} if end else found


def _statements(text: str) -> Iterable[tuple[str, list[str]]]:
    """Code and comments of every statement and of every line without one; a value may go over several lines.

    The last comment of a statement is the one beside its end, and is there in any case.
    """
    code, comments, depth, beside = "", [], 0, ""
    for token in [*_TOKENS.findall(text.replace("\r\n", "\n")), "\n"]:
        if token.startswith("#"):
            beside = token.strip()
        elif token != "\n":
            code += token
            depth += 0 if token[0] in "\"'" else len(re.findall(r"[\[{]", token)) - len(re.findall(r"[\]}]", token))
        elif depth:
            code += "\n"
            comments += [beside] if beside else []
            beside = ""
        else:
            code = code.strip()
            key_value = code and not code.startswith("[")
            yield code, [*comments, *([beside] if beside or key_value else [])]
            code, comments, beside = "", [], ""


def _path(code: str) -> tuple[str, ...]:
    """The names of a statement, from outside to inside."""
    content, path = tomllib.loads(code), []
    while isinstance(content, dict) and len(content) == 1:
        ((name, content),) = content.items()
        path.append(name)
    return tuple(path)


def _name(path: tuple[str, ...]) -> str:
    first = path[0].replace("-", "_")
    return ".".join((first, *path[1:])) if first == "set" else first


def _tidy(lines: list[str], ours: set[str]) -> tuple[str, ...]:
    """Without our own lines, and with single empty ones between those that are left."""
    kept: list[str] = []
    after_ours = False
    for line in lines:
        if line in ours or (after_ours and re.match(r"# [a-z_]+ =", line)):
            after_ours = line in ours
        else:
            after_ours = False
            if line or (kept and kept[-1]):
                kept.append(line)
    return tuple(kept) if any(kept) else ()

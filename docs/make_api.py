"""Writes docs/api.md from docstrings: `python docs/make_api.py`; the tests compare the page with what this makes."""

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

MODULES = {
    "protofed": "What most programs need",
    "protofed.method": "For authors of methods: what a hook sees and returns",
    "protofed.verbs": "The words methods are written in",
    "protofed.records": "Messages and states",
    "protofed.models": "Networks",
    "protofed.data": "Images",
    "protofed.testing": "Checks for methods of your own",
    "protofed.inference": "Using a finished run",
    "protofed.report": "The report page",
}
PAGE = Path(__file__).with_name("api.md")


def page() -> str:
    """The whole page."""
    blocks = [
        "# Python API",
        "Made from the docstrings by `docs/make_api.py`. [Getting started](getting-started.md#from-python) has "
        "examples, [Writing a method](writing-a-method.md) explains the hooks.",
    ]
    seen: set[object] = set()
    for name, purpose in MODULES.items():
        module = importlib.import_module(name)
        blocks += [f"## `{name}`", f"{purpose}."]
        for entry, thing in _public(module):
            if thing in seen:
                continue
            seen.add(thing)
            blocks += [f"### {entry}", f"```text\n{entry}{_signature(thing)}\n```", _text(thing)]
            members = list(_members(thing)) if inspect.isclass(thing) else []
            if members:
                blocks.append("\n".join(members))
    return "\n\n".join(block for block in blocks if block) + "\n"


def _public(module: ModuleType) -> Iterator[tuple[str, object]]:
    """Classes and functions of a module that are meant for others, in its own order."""
    listed = getattr(module, "__all__", None)
    names = listed or [
        name for name, thing in vars(module).items() if getattr(thing, "__module__", "") == module.__name__
    ]
    for name in names:
        thing = getattr(module, name)
        if not name.startswith("_") and (inspect.isclass(thing) or inspect.isfunction(thing)):
            yield name, thing


def _members(cls: type) -> Iterator[str]:
    """Its own methods and properties, a line each."""
    for name, thing in vars(cls).items():
        inner = thing.fget if isinstance(thing, property) else getattr(thing, "__func__", getattr(thing, "func", thing))
        if name.startswith("_") or not inspect.isfunction(inner) or not inspect.getdoc(inner):
            continue
        bare = isinstance(thing, property) or not inspect.isfunction(getattr(thing, "__func__", thing))
        first = (inspect.getdoc(inner) or "").split("\n\n")[0].replace("\n", " ")
        yield f"- `{name}{'' if bare else _signature(inner)}`: {first}"


def _signature(thing: object) -> str:
    """With plain names of types, as a reader would write them."""
    try:
        text = str(inspect.signature(thing))  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return ""
    text = re.sub(r"<factory>|<object object at \w+>|<function \w+ at \w+>", "...", text)
    text = re.sub(r"\b(?:[a-z_]\w*\.)+(\w+)", r"\1", text)
    if inspect.isclass(thing):
        text = text.removesuffix(" -> None")
    return text.replace("self, ", "").replace("(self)", "()").replace("'", "").replace("~", "")


def _text(thing: object) -> str:
    return (inspect.getdoc(thing) or "").replace("\n\n", "\x00").replace("\n", " ").replace("\x00", "\n\n")


if __name__ == "__main__":
    PAGE.write_text(page())

"""A line on each method of the page: what it does, what travels, where it comes from."""

from collections.abc import Mapping
from inspect import getdoc
from typing import Any

from protofed.errors import UserError
from protofed.pages.elements import plain_table
from protofed.pages.markup import Html
from protofed.registry import find_method
from protofed.report.content import ReportContent


def methods_section(content: ReportContent) -> Html:
    """A row for every method that is installed here; a plugin that is not at hand has none."""
    used = {name: runs[0].options["method"] for group in content.groups for name, runs in group.runs.items() if runs}
    known = {name: found for name, method in used.items() if (found := _installed(method)) is not None}
    if not known:
        return Html("")
    columns = ["method", "description", "sent up", "sent down", "paper"]
    return plain_table("Methods on this page", columns, _rows(known), figures=False)


def _rows(methods: Mapping[str, type[Any]]) -> list[list[str]]:
    return [
        [name, _first_sentence(method), method.sends_up, method.sends_down, method.paper]
        for name, method in methods.items()
    ]


def _installed(name: str) -> type[Any] | None:
    # A path would be executed, and a page only reads.
    if ":" in name:
        return None
    try:
        return find_method(name)
    except UserError:
        return None


def _first_sentence(method: type[Any]) -> str:
    text = " ".join((getdoc(method) or "").split("\n\n")[0].split())
    return text.split(". ")[0].rstrip(".") + "."

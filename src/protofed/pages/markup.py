"""HTML from Python, escaped unless it is HTML already."""

from collections.abc import Iterable, Mapping
from functools import cache
from html import escape
from importlib.resources import files

_EMPTY = frozenset({"meta", "img", "input", "col"})


class Html(str):
    """Text that is markup already."""


def markup(value: object) -> Html:
    """Anything as markup."""
    return value if isinstance(value, Html) else Html(escape(str(value)))


def tag(element: str, *content: object, **attributes: object) -> Html:
    """One element; `class_` is class, `data_method` data-method, True stands alone, None and False are left out."""
    texts = [
        f" {name.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{escape(str(value))}"')
        for name, value in attributes.items()
        if value is not None and value is not False
    ]
    start = f"<{element}{''.join(texts)}>"
    return Html(start if element in _EMPTY else f"{start}{join(content)}</{element}>")


def join(parts: Iterable[object]) -> Html:
    """Parts one after the other."""
    return Html("".join(markup(part) for part in parts))


def document(
    title: str, *body: object, allow: Mapping[str, str] | None = None, again: int | None = None, **attributes: object
) -> str:
    """A page with the common style; `allow` adds directives to the content security policy, which forbids all else.

    `again` has it loaded anew after so many seconds.
    """
    # Nothing may be loaded from anywhere, whatever the data say.
    policy = {"default-src": "'none'", "img-src": "data:", "style-src": "'unsafe-inline'", **(allow or {})}
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag(
            "meta",
            http_equiv="Content-Security-Policy",
            content="; ".join(f"{directive} {source}" for directive, source in policy.items()),
        ),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        "" if again is None else tag("meta", http_equiv="refresh", content=again),
        tag("title", f"{title} · protofed"),
        tag("style", Html(_style())),
    )
    return f"<!doctype html>\n{tag('html', head, tag('body', *body), lang='en', **attributes)}\n"


@cache
def _style() -> str:
    return files(__package__).joinpath("page.css").read_text()

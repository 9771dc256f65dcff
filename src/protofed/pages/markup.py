"""HTML from Python, escaped unless it is HTML already."""

from collections.abc import Iterable
from html import escape

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

"""The frame that pages have in common: the kind of page, its title, a line of facts with the date, its origin."""

from collections.abc import Iterable, Sequence
from datetime import datetime
from importlib.metadata import version

from protofed.pages.markup import Html, document, tag


def framed(
    kind: str,
    title: str,
    facts: Sequence[str],
    body: Iterable[object],
    notes: Iterable[str] = (),
    again: int | None = None,
) -> str:
    """A page without scripts; `notes` stand below its facts, and `again` has it loaded anew every so many seconds."""
    header = tag(
        "header",
        tag("p", kind, class_="kind"),
        tag("h1", title),
        tag("p", " · ".join([*facts, today()]), class_="subtitle"),
        *(tag("p", note, class_="note") for note in notes),
    )
    return document(title, header, tag("main", *body), footer(), again=again)


def today() -> str:
    """The date of a page, as it is written everywhere."""
    now = datetime.now()
    return f"{now.day} {now:%B %Y}"


def footer(source: str = "") -> Html:
    """Where a page comes from; `source` says what it was made of."""
    return tag("footer", tag("p", f"Written by protofed {version('protofed')}{source}. This page loads nothing."))

"""A whole page: one file that holds its style and pictures, and may load nothing."""

from collections.abc import Mapping
from functools import cache
from importlib.resources import files

from protofed.pages.markup import Html, tag


def document(title: str, *body: object, allow: Mapping[str, str] | None = None, **attributes: object) -> str:
    """A page with the common style; `allow` adds directives to the content security policy, which forbids all else."""
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
        tag("title", f"{title} · protofed"),
        tag("style", Html(_style())),
    )
    return f"<!doctype html>\n{tag('html', head, tag('body', *body), lang='en', **attributes)}\n"


@cache
def _style() -> str:
    return files(__package__).joinpath("page.css").read_text()

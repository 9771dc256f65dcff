"""Embeddings as one self-contained page: how to read the maps, the scores, the pictures."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from protofed.pages.elements import plain_table, sheet
from protofed.pages.frame import framed
from protofed.pages.markup import tag
from protofed.text import counted


def embeddings_page(content: Mapping[str, Any], folder: Path) -> str:
    """The page for the content of embeddings.json, whose pictures are in `folder`."""
    facts = [
        counted(content["samples"], "test image"),
        "domains " + ", ".join(content["domains"]),
        counted(len(content["panels"]), "map"),
    ]
    tables = [plain_table(each["title"], each["columns"], each["rows"]) for each in content["tables"]]
    sheets = [
        sheet((folder / each["image"]).read_bytes(), each["caption"], each["caption"], caption=True)
        for each in content["items"]
    ]
    body = [
        tag("section", tag("p", content["text"]), aria_label="How to read it"),
        tag("section", tag("h2", "Scores"), *tables),
        tag("section", tag("h2", "Maps"), *sheets),
    ]
    return framed("embeddings", content["title"], facts, body)

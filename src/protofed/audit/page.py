"""An audit as a page of its own. Its pictures show training images, so they are left out unless they are asked for."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from protofed.audit.findings import audit_tables
from protofed.pages.elements import gallery, picture, plain_table, png_source
from protofed.pages.markup import Html, document, tag
from protofed.text import counted


def audit_page(content: Mapping[str, Any], folder: Path, with_training_images: bool) -> str:
    """The page for the content of audit.json, whose pictures are in `folder`."""
    run = content["run"]
    subtitle = f"seed {run['seed']}, after {counted(run['rounds'], 'round')}; attacked: {', '.join(content['clients'])}"
    header = tag("header", tag("h1", content["title"]), tag("p", subtitle, class_="subtitle"))
    verdicts = tag("section", tag("ul", *(tag("li", text) for text in content["verdicts"])), aria_label="Verdicts")
    tables = [
        tag("section", tag("h2", table.title), plain_table("Figures", table.columns, table.rows))
        for table in audit_tables(content)
    ]
    attack, extractor = content["attack"], content["extractor"]
    how = tag(
        "section",
        tag("h2", "The attacker"),
        tag("p", f"Has {attack['attacker_has']}: {content['model']}. {attack['steps']} training steps for a decoder."),
        tag("p", f"{extractor['label']}: features of {extractor['name']}.", class_="small"),
    )
    shown = _pictures(content, folder, with_training_images)
    return document(content["title"], header, tag("main", verdicts, *tables, how, shown))


def _pictures(content: Mapping[str, Any], folder: Path, shown: bool) -> Html:
    if not content["items"]:
        return Html("")
    if not shown:
        text = (
            f"{counted(len(content['items']), 'picture')} with training images and their reconstructions are in "
            "the folder of the audit, but not on this page, so that it can be sent. --with-training-images "
            "includes them."
        )
        return tag("section", tag("h2", "Pictures"), tag("p", text))
    pictures = [
        picture(png_source((folder / item["image"]).read_bytes()), item["caption"]) for item in content["items"]
    ]
    warning = tag("p", "This page shows training images. Send it only to people who may see them.", class_="note")
    return tag("section", tag("h2", "Pictures"), warning, gallery(pictures))

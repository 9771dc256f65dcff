"""An audit as a page of its own. Its pictures show training images, so they are left out unless they are asked for."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from protofed.audit.findings import audit_tables
from protofed.pages.elements import gallery, picture, plain_table, png_source
from protofed.pages.frame import framed
from protofed.pages.markup import Html, tag
from protofed.text import counted


def audit_page(content: Mapping[str, Any], folder: Path, with_training_images: bool) -> str:
    """The page for the content of audit.json, whose pictures are in `folder`."""
    run = content["run"]
    facts = [f"seed {run['seed']}", counted(run["rounds"], "round"), f"attacked: {', '.join(content['clients'])}"]
    verdicts = tag(
        "section", *(_verdict(text) for text in content["verdicts"]), class_="headline", aria_label="Verdicts"
    )
    tables = [plain_table(table.title, table.columns, table.rows) for table in audit_tables(content)]
    figures = tag("section", tag("h2", "Figures"), *tables) if tables else ""
    shown = _pictures(content, folder, with_training_images)
    return framed("audit", content["title"], facts, [verdicts, figures, _attacker(content), shown])


def _verdict(text: str) -> Html:
    """What comes before the colon is what a reader looks for."""
    word, colon, reason = text.partition(": ")
    return tag("p", tag("strong", word + colon), reason) if colon else tag("p", text)


def _attacker(content: Mapping[str, Any]) -> Html:
    """Who attacked, with what."""
    attack, extractor = content["attack"], content["extractor"]
    measure = f"{extractor['label']}: features of {extractor['name']}."
    return tag(
        "section",
        tag("h2", "The attacker"),
        tag("p", f"Knows {attack['attacker_has']} ({content['model']})."),
        tag("p", f"Where features or prototypes travel, trains a decoder for {counted(attack['steps'], 'step')}."),
        tag("p", measure, class_="small") if content["reconstruction"] else "",
    )


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

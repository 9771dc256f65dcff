"""One self-contained page of explanations: pictures inside, no scripts, nothing loaded from elsewhere."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from protofed.explain.wording import about, tables
from protofed.pages.elements import details, gallery, picture, plain_table, png_source, sheet
from protofed.pages.frame import framed
from protofed.pages.markup import Html, tag
from protofed.text import counted, percent


def page(content: Mapping[str, Any], folder: Path) -> str:
    """The page for the content of explanations.json, whose pictures are in `folder`."""
    sections = [*_images(content, folder), *_tables(content, folder)]
    facts = [
        counted(len(content["images"]), "image"),
        f"seen by {counted(len(content['clients']), 'model')} after {counted(content['run']['rounds'], 'round')}",
        *(["prototypes moved onto training patches"] if content["projected"] else []),
    ]
    return framed("explanations", content["title"], facts, [_findings(content), *sections])


def _findings(content: Mapping[str, Any]) -> Html:
    """How to read the pictures, and how far they can be believed."""
    return tag(
        "section",
        tag("p", about(content)),
        tag("ul", *(tag("li", text) for text in content["findings"])),
        *(tag("p", _sentence(note), class_="note") for note in (*_on_training_images(content), *content["notes"])),
    )


def _on_training_images(content: Mapping[str, Any]) -> list[str]:
    if not any(item.get("training_images") for item in content["items"]):
        return []
    return ["This page shows pieces of training images. Send it only to people who may see them"]


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:].rstrip('.')}."


def _images(content: Mapping[str, Any], folder: Path) -> Iterator[Html]:
    """Every image with what the models say about it."""
    for number, image in enumerate(content["images"]):
        agreement = content["agreement"]["images"][number] if content["agreement"] else None
        first, *others = image["pictures"]
        yield tag(
            "section",
            tag("h2", ": ".join(filter(None, (image["name"], image["label"])))),
            tag("p", _votes(image, agreement)),
            _sheet(folder / first, image, 1),
            *(
                details(f"Prototype {rank} of each client", _sheet(folder / name, image, rank))
                for rank, name in enumerate(others, start=2)
            ),
            details("Figures of this evidence", _logits(image))
            if content["evidence"] == "exact"
            else details("Figures of these prototypes", _prototypes(image)),
        )


def _tables(content: Mapping[str, Any], folder: Path) -> Iterator[Html]:
    """Agreement, faithfulness and projection, as far as there are, with their charts."""
    charts = {
        "agreement": content["agreement_pictures"],
        "faithfulness": content["faithfulness"]["pictures"] if content["faithfulness"] else [],
    }
    for name, table in tables(content).items():
        yield tag(
            "section",
            tag("h2", name.capitalize()),
            plain_table(table.title, table.columns, table.rows),
            gallery(_picture(folder / chart, table.title) for chart in charts.get(name, [])),
        )


def _votes(image: Mapping[str, Any], agreement: Mapping[str, Any] | None) -> str:
    """Who predicts what, and how far those who predict the same point at the same part."""
    views = image["clients"]
    if len(views) == 1:
        return f"The model says {views[0]['predicted']} ({100 * views[0]['probability']:.0f} %)."
    counts = {view["predicted"]: sum(each["predicted"] == view["predicted"] for each in views) for view in views}
    votes = ", ".join(f"{count} of {len(views)} models predict {name}" for name, count in counts.items())
    if agreement is None or agreement["iou"] is None:
        return f"{votes}."
    return (
        f"{votes}. Where two agree, their boxes overlap by {agreement['iou']:.2f} (random boxes by "
        f"{agreement['iou_random']:.2f}), and the rank correlation of their maps is "
        f"{agreement['rank_correlation']:.2f}."
    )


def _prototypes(image: Mapping[str, Any]) -> Html:
    columns = ["client", "prediction", "%", "prototype", "of class", "similarity", "contribution", "lift", "box"]
    rows = [
        [
            view["client"],
            view["predicted"],
            percent(view["probability"]),
            f"#{prototype['prototype']}",
            prototype["class"],
            f"{prototype['similarity']:.3f}",
            f"{prototype['contribution']:+.3f}",
            f"{prototype['lift']:+.3f}",
            "flat map" if prototype["box"] is None else "rows {}-{}, columns {}-{}".format(*prototype["box"]),
        ]
        for view in image["clients"]
        for prototype in view["prototypes"]
    ]
    return plain_table(f"Most important prototypes for {image['name']}", columns, rows)


def _logits(image: Mapping[str, Any]) -> Html:
    columns = [
        "model",
        "prediction",
        "%",
        "evidence for",
        "sum over positions",
        "bias",
        "logit or lead",
        "strongest place",
    ]
    rows = [
        [
            view["client"],
            view["predicted"],
            percent(view["probability"]),
            each["class"] + ("" if each["rival"] is None else f", not {each['rival']}"),
            f"{each['contribution']:+.4f}",
            f"{each['bias']:+.4f}",
            f"{each['logit']:+.4f}",
            "none" if each["box"] is None else "rows {}-{}, columns {}-{}".format(*each["box"]),
        ]
        for view in image["clients"]
        for each in view["prototypes"]
    ]
    return plain_table(f"What adds up to the logits of {image['name']}", columns, rows)


def _sheet(path: Path, image: Mapping[str, Any], rank: int) -> Html:
    """The picture of an image, and for those who do not see it what the picture shows."""
    seen = []
    for view in image["clients"]:
        says = f"{view['client']} says {view['predicted']}, {100 * view['probability']:.0f} %"
        box = view["prototypes"][rank - 1]["box"] if rank <= len(view["prototypes"]) else None
        seen.append(says if box is None else says + ", its box spans rows {} to {} and columns {} to {}".format(*box))
    name = image["name"] if rank == 1 else f"{image['name']}, prototype {rank}"
    return sheet(path.read_bytes(), f"{name}: {'; '.join(seen)}", name)


def _picture(path: Path, text: str) -> Html:
    return picture(png_source(path.read_bytes()), text, caption=False)

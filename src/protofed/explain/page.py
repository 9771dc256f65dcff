"""One self-contained page of explanations: pictures inside, no scripts, nothing loaded from elsewhere."""

import base64
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from protofed.experiments.figures import percent

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1e1e1e; background: #fff; margin: 2rem auto; max-width: 72rem;
  padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2.2rem; border-top: 1px solid #ddd; padding-top: 1rem }
img { max-width: 100%; height: auto }
table { border-collapse: collapse; margin: .6rem 0 } th, td { padding: .15rem .7rem; text-align: right }
th { border-bottom: 2px solid #888 } th:first-child, td:first-child { text-align: left }
tr:nth-child(even) td { background: #f5f5f5 } .note { color: #8a3b00 } .warm { color: #b8430b } .cool { color: #2171b5 }
summary { cursor: pointer }
"""


def page(content: Mapping[str, Any], folder: Path) -> str:
    """The page for the content of explanations.json, whose pictures lie in `folder`."""
    run = content["run"]
    blocks = [
        f"<h1>Why: {escape(run['method'])} on {escape(run['data'])}</h1>",
        f"<p>{len(content['images'])} images, {len(content['clients'])} models. The red box is around the "
        "places where the prototype that spoke most was found, the upper 5 % of its map. In maps "
        '<b class="warm">warm</b> places speak for the prediction, <b class="cool">cool</b> ones against it.</p>',
        *(f'<p class="note">{escape(note)}</p>' for note in content["notes"]),
        *_agreement(content, folder),
        *_faithfulness(content["faithfulness"], folder),
        *_projection(content["projection"]),
    ]
    for image in content["images"]:
        blocks += _image(image, folder)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Explanations</title>'
        f"<style>{_STYLE}</style></head><body>{''.join(blocks)}</body></html>\n"
    )


def _image(image: Mapping[str, Any], folder: Path) -> list[str]:
    truth = f", in truth {escape(image['label'])}" if image["label"] else ""
    blocks = [f"<h2>{escape(image['name'])}{truth}</h2>", _picture(folder / image["pictures"][0], image["name"])]
    blocks.append(
        _table(
            ["client", "prediction", "%", "prototype", "of class", "similarity", "contribution", "lift", "box"],
            [
                [
                    view["client"],
                    view["predicted"],
                    percent(view["probability"]),
                    f"#{spoken['prototype']}",
                    spoken["class"],
                    f"{spoken['similarity']:.3f}",
                    f"{spoken['contribution']:+.3f}",
                    f"{spoken['lift']:+.3f}",
                    "flat map" if spoken["box"] is None else "rows {}-{}, columns {}-{}".format(*spoken["box"]),
                ]
                for view in image["clients"]
                for spoken in view["prototypes"]
            ],
        )
    )
    for rank, name in enumerate(image["pictures"][1:], start=2):
        blocks.append(f"<details><summary>prototype {rank} of each client</summary>")
        blocks.append(_picture(folder / name, f"{image['name']}, prototype {rank}") + "</details>")
    return blocks


def _agreement(content: Mapping[str, Any], folder: Path) -> list[str]:
    found = content["agreement"]
    if found is None:
        return []
    rows = [
        *([" and ".join(pair["clients"]), *_figures(pair)] for pair in found["pairs"]),
        *([f"class {name}", *_figures(entry)] for name, entry in found["classes"].items()),
        ["overall", *_figures(found["overall"])],
    ]
    heading = ["", "compared", "same class", "boxes, IoU", "maps, rank correlation"]
    pictures = [_picture(folder / name, "agreement") for name in content["agreement_pictures"]]
    return ["<h2>Agreement between clients</h2>", _table(heading, rows), *pictures]


def _figures(entry: Mapping[str, Any]) -> list[str]:
    return [
        str(entry["images"]),
        *("-" if entry[key] is None else f"{entry[key]:.2f}" for key in ("same_class", "iou", "rank_correlation")),
    ]


def _faithfulness(found: Mapping[str, Any] | None, folder: Path) -> list[str]:
    if found is None:
        return []
    heading = ["client", "boxes", "blurred: box", "random", "put in: box", "random"]
    ends = ("deletion", "deletion_random", "insertion", "insertion_random")
    rows = [
        [client, str(curves["images"]), *(f"{curves[key][-1]:.3f}" for key in ends)]
        for client, curves in found["clients"].items()
    ]
    return [
        "<h2>Does the box matter?</h2>",
        "<p>Probability of the predicted class after the box, or a random one of its size, is blurred away in the "
        "image or put into the blurred image.</p>",
        _table(heading, rows),
        *(_picture(folder / name, "deletion and insertion curves") for name in found["pictures"]),
    ]


def _projection(found: Mapping[str, Any] | None) -> list[str]:
    if found is None:
        return []
    rows = [[client, percent(found["before"][client]), percent(after)] for client, after in found["after"].items()]
    text = "<p>Accuracy (%) before and after every prototype is moved onto the nearest training patch.</p>"
    return ["<h2>Projection</h2>", text, _table(["client", "before", "after"], rows)]


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _picture(path: Path, words: str) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<p><img alt="{escape(words)}" src="data:image/png;base64,{data}"></p>'

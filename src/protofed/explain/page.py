"""One self-contained page of explanations: pictures inside, no scripts, nothing loaded from elsewhere."""

import base64
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from protofed.explain.wording import ABOUT, tables
from protofed.text import percent

_STYLE = """
:root { color-scheme: light }
body { font: 15px/1.5 system-ui, sans-serif; color: #1e1e1e; background: #fff; margin: 2rem auto; max-width: 62rem;
  padding: 0 1rem }
h1 { font-size: 1.6rem; margin-bottom: .2rem }
h2 { font-size: 1.2rem; margin-top: 2.4rem; border-top: 1px solid #ddd; padding-top: 1.2rem }
p, li { max-width: 46rem } img { max-width: 100%; height: auto; display: block } .side img { margin-right: 2rem }
.side { display: flex; flex-wrap: wrap } .scroll { overflow-x: auto }
table { border-collapse: collapse; margin: .6rem 0; font-size: .92rem; font-variant-numeric: tabular-nums }
th, td { padding: .2rem .7rem; text-align: right } th { border-bottom: 2px solid #888; vertical-align: bottom }
th:first-child, td:first-child { text-align: left; white-space: nowrap }
tr:nth-child(even) td { background: #f5f5f5 } tr:last-child td { border-bottom: 1px solid #bbb }
.note { color: #8a3b00 } .about { color: #555 } summary { cursor: pointer; color: #2171b5; margin: .4rem 0 }
"""


def page(content: Mapping[str, Any], folder: Path) -> str:
    """The page for the content of explanations.json, whose pictures lie in `folder`."""
    run, images = content["run"], content["images"]
    models = "1 model" if len(content["clients"]) == 1 else f"{len(content['clients'])} models"
    blocks = [
        f"<h1>{escape(content['title'])}</h1>",
        f'<p class="about">{len(images)} images seen by {models} after {run["rounds"]} rounds'
        f"{', with prototypes moved onto training patches' if content['projected'] else ''}.</p>",
        f"<p>{escape(ABOUT)}</p>",
        f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in content['findings'])}</ul>",
        *(f'<p class="note">{escape(note)}</p>' for note in content["notes"]),
    ]
    for number, image in enumerate(images):
        blocks += _image(image, content["agreement"]["images"][number] if content["agreement"] else None, folder)
    pictures = {
        "agreement": content["agreement_pictures"],
        "faithfulness": content["faithfulness"]["pictures"] if content["faithfulness"] else [],
    }
    for name, table in tables(content).items():
        blocks += [f"<h2>{escape(table.title)}</h2>", _table(table.columns, table.rows)]
        shown = (_picture(folder / picture, table.title) for picture in pictures.get(name, []))
        blocks.append(f'<div class="side">{"".join(shown)}</div>')
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(content['title'])}</title>"
        f"<style>{_STYLE}</style></head><body>{''.join(blocks)}</body></html>\n"
    )


def _image(image: Mapping[str, Any], agreed: Mapping[str, Any] | None, folder: Path) -> list[str]:
    truth = f": {escape(image['label'])}" if image["label"] else ""
    blocks = [
        f"<h2>{escape(image['name'])}{truth}</h2>",
        f"<p>{escape(_said(image, agreed))}</p>",
        _picture(folder / image["pictures"][0], image["name"]),
    ]
    for rank, name in enumerate(image["pictures"][1:], start=2):
        blocks.append(f"<details><summary>Prototype {rank} of each client</summary>")
        blocks.append(_picture(folder / name, f"{image['name']}, prototype {rank}") + "</details>")
    blocks.append(f"<details><summary>Figures of these prototypes</summary>{_prototypes(image)}</details>")
    return blocks


def _said(image: Mapping[str, Any], agreed: Mapping[str, Any] | None) -> str:
    """Who says what, and how far those who say the same point at the same part."""
    views = image["clients"]
    votes = {view["predicted"]: sum(each["predicted"] == view["predicted"] for each in views) for view in views}
    said = ", ".join(f"{count} of {len(views)} models say {name}" for name, count in votes.items())
    if agreed is None or agreed["iou"] is None:
        return f"{said}."
    return (
        f"{said}. Where two agree, their boxes overlap by {agreed['iou']:.2f} (random ones by "
        f"{agreed['iou_random']:.2f}), the rank correlation of their maps is {agreed['rank_correlation']:.2f}."
    )


def _prototypes(image: Mapping[str, Any]) -> str:
    columns = ["client", "prediction", "%", "prototype", "of class", "similarity", "contribution", "lift", "box"]
    rows = [
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
    ]
    return _table(columns, rows)


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def _picture(path: Path, words: str) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<img alt="{escape(words)}" src="data:image/png;base64,{data}">'

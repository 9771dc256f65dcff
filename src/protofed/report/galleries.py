"""Pictures that other commands left in a run folder: embeddings, explanations, audits."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from protofed.report.content import ReportedRun
from protofed.text import Table

GALLERIES = {
    "embeddings": "Embeddings",
    "explanations": "Explanations",
    "audit": "What leaks",
}
"""Folder and file name without suffix; `NAME/NAME.json` is {"title", "text", "items": [{"image", "caption"}], "tables":
[{"title", "columns", "rows"}]}, of which only items or tables must be there; images are PNG files beside it."""

_SHEETS = ("embeddings", "explanations")
_MOST_IMAGES = 24
_MOST_BYTES = 3_000_000
"""Of all pictures of one gallery, so that the page can still be sent."""


@dataclass(frozen=True)
class Gallery:
    """What one command found about one run."""

    name: str
    title: str
    run: str
    text: str
    pictures: list["EmbeddedPicture"]
    left_out: int
    tables: list[Table]
    verdicts: list[str]
    of_training_images: int
    """Pictures that show training images and are therefore not on the page."""

    @property
    def wide(self) -> bool:
        """Whether its pictures are sheets with text inside, which cannot be read when they are small."""
        return self.name in _SHEETS


class EmbeddedPicture(NamedTuple):
    """One image inside the page."""

    png: bytes
    caption: str


def galleries(runs: list[ReportedRun], with_training_images: bool = False) -> Iterator[Gallery]:
    """Of all runs, in the order of the kinds; one whose index cannot be read is passed over."""
    for name, title in GALLERIES.items():
        for run in runs:
            index = _index(run.path / name / f"{name}.json")
            if index is not None:
                yield _gallery(run, name, title, index, with_training_images)


def _index(path: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def _gallery(run: ReportedRun, name: str, title: str, index: dict[str, Any], with_training_images: bool) -> Gallery:
    every = [item for item in index.get("items", []) if isinstance(item, dict) and "image" in item]
    items = [item for item in every if with_training_images or not _shows_training_images(name, item)]
    pictures: list[EmbeddedPicture] = []
    room = _MOST_BYTES
    for item in items[:_MOST_IMAGES]:
        content = _picture(run.path / name, str(item["image"]))
        if content is not None and len(content) <= room:
            room -= len(content)
            pictures.append(EmbeddedPicture(content, str(item.get("caption", ""))))
    tables = [
        Table(str(each.get("title", "")), list(map(str, each["columns"])), [list(row) for row in each["rows"]])
        for each in index.get("tables", [])
        if isinstance(each, dict) and "columns" in each and "rows" in each
    ]
    of = f"{run.config['method']['name']}, seed {run.seed}"
    shown = str(index.get("title", title))
    return Gallery(
        name,
        shown,
        of,
        str(index.get("text", "")),
        pictures,
        len(items) - len(pictures),
        tables,
        [str(verdict) for verdict in index.get("verdicts", [])],
        len(every) - len(items),
    )


def _shows_training_images(name: str, item: dict[str, Any]) -> bool:
    """An audit shows nothing else, and those of earlier versions do not say so."""
    return name == "audit" or bool(item.get("training_images"))


def _picture(folder: Path, name: str) -> bytes | None:
    """A PNG file of the folder itself; a name that leads elsewhere is not followed."""
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()) or path.suffix.lower() != ".png" or not path.is_file():
        return None
    return path.read_bytes()

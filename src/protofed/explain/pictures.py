"""Explanations as pictures: made of pixels only, so they cost milliseconds and need no plotting library.

Warm colours speak for the decision, cool ones against it; orange and blue stay apart for the colour-blind.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from protofed.explain.evidence import Evidence, Explanation
from protofed.explain.maps import Box

Pixels = NDArray[np.uint8]

WARM, COOL = (230, 85, 13), (33, 113, 181)
_RED = (220, 20, 30)
_PAPER, _INK = (255, 255, 255), (30, 30, 30)
_CELL, _GAP, _LINE, _MARGIN = 144, 8, 16, 64
_STRENGTH = 0.75


@dataclass(frozen=True)
class Column:
    """One client's view of an image, for one prototype."""

    title: str
    explanation: Explanation
    evidence: Evidence
    source: Pixels | None


def overlay(image: Pixels, evidence: Evidence) -> Pixels:
    """The map over the image: warm where the place speaks for the prediction, cool where it speaks against it."""
    away = evidence.map - evidence.map.mean()
    reach = np.abs(away).max()
    value = (away / reach if reach > 0 else away) * (1 if evidence.speaks_for else -1)
    grey = np.repeat(image.mean(2, keepdims=True), 3, axis=2) * 0.8 + 25
    colour = np.where(value[..., None] > 0, WARM, COOL)
    strength = _STRENGTH * np.abs(value)[..., None]
    mixed = grey * (1 - strength) + colour * strength
    return np.asarray(mixed.clip(0, 255), dtype=np.uint8)


def figure(image: Pixels, columns: Sequence[Column], classes: Sequence[str]) -> Image.Image:
    """The image with each client's box, the map, the boxed part enlarged, and the prototype's own patch."""
    rows = ["image", "map", "part"]
    if any(column.source is not None for column in columns):
        rows.append("prototype")
    head = 3 * _LINE
    width = _MARGIN + len(columns) * (_CELL + _GAP)
    sheet = Image.new("RGB", (width, head + len(rows) * (_CELL + _GAP)), _PAPER)
    draw = ImageDraw.Draw(sheet)
    for number, row in enumerate(rows):
        draw.text((4, head + number * (_CELL + _GAP) + _CELL // 2), row, fill=_INK, font=_font())
    for number, column in enumerate(columns):
        left = _MARGIN + number * (_CELL + _GAP)
        for line, text in enumerate(_lines(column, classes)):
            draw.text((left, line * _LINE), text, fill=_INK, font=_font())
        cells = _cells(image, column)
        for position, row in enumerate(rows):
            place = (left, head + position * (_CELL + _GAP))
            if row in cells:
                sheet.paste(cells[row], place)
            else:
                text = "flat map" if row in ("image", "part") else "not looked up"
                draw.text((place[0] + 20, place[1] + _CELL // 2), text, fill=_INK, font=_font())
    return sheet


def colour(image: NDArray[np.uint8]) -> Pixels:
    """[C, H, W] as [H, W, 3]."""
    return np.ascontiguousarray(np.broadcast_to(image.transpose(1, 2, 0), (*image.shape[1:], 3)))


def _cells(image: Pixels, column: Column) -> dict[str, Image.Image]:
    box = column.evidence.box
    cells = {"image": _scaled(image), "map": _scaled(overlay(image, column.evidence))}
    if box is not None:
        _frame(cells["image"], box, image.shape[:2])
        cells["part"] = _scaled(image[box.top : box.bottom, box.left : box.right])
    if column.source is not None:
        cells["prototype"] = _scaled(np.broadcast_to(column.source, (*column.source.shape[:2], 3)))
    return cells


def _scaled(pixels: NDArray[np.uint8]) -> Image.Image:
    """To the size of a cell, keeping the proportions."""
    scale = _CELL / max(pixels.shape[:2])
    size = (max(1, round(pixels.shape[1] * scale)), max(1, round(pixels.shape[0] * scale)))
    picture = Image.fromarray(np.ascontiguousarray(pixels)).resize(size, Image.Resampling.BICUBIC)
    cell = Image.new("RGB", (_CELL, _CELL), _PAPER)
    cell.paste(picture, ((_CELL - size[0]) // 2, (_CELL - size[1]) // 2))
    return cell


def _frame(cell: Image.Image, box: Box, shape: tuple[int, ...]) -> None:
    """A red box with a white edge, so that it shows on any ground."""
    scale = _CELL / max(shape[0], shape[1])
    across, down = (_CELL - shape[1] * scale) / 2, (_CELL - shape[0] * scale) / 2
    corners = [box.left * scale + across, box.top * scale + down]
    corners += [box.right * scale + across - 1, box.bottom * scale + down - 1]
    draw = ImageDraw.Draw(cell)
    draw.rectangle([corners[0] - 1, corners[1] - 1, corners[2] + 1, corners[3] + 1], outline=_PAPER)
    draw.rectangle(corners, outline=_RED, width=2)


def _lines(column: Column, classes: Sequence[str]) -> list[str]:
    explanation, evidence = column.explanation, column.evidence
    probability = explanation.probabilities[explanation.predicted]
    return [
        column.title,
        f"{classes[explanation.predicted]} {100 * probability:.0f} %",
        f"{'for' if evidence.speaks_for else 'against'}: {classes[evidence.label]} #{evidence.prototype}",
    ]


def _font() -> ImageFont.ImageFont | ImageFont.FreeTypeFont:
    return ImageFont.load_default(12)


def matrix(values: Mapping[tuple[str, str], float | None], names: Sequence[str], title: str) -> Image.Image:
    """A table of agreement between clients as a picture: the darker, the more two clients agree."""
    cell, margin = 56, 96
    side = margin + len(names) * cell
    sheet = Image.new("RGB", (max(side, 220) + _GAP, side + _LINE), _PAPER)
    draw = ImageDraw.Draw(sheet)
    draw.text((4, 2), title, fill=_INK, font=_font())
    for row, left in enumerate(names):
        draw.text((4, _LINE + margin - 12 + row * cell), left[:14], fill=_INK, font=_font())
        draw.text((margin + row * cell + 4, _LINE + (row % 2) * _LINE + 8), left[:9], fill=_INK, font=_font())
        for column, right in enumerate(names):
            value = 1.0 if row == column else values.get((left, right), values.get((right, left)))
            place = (margin + column * cell, _LINE + margin - 32 + row * cell)
            share = 0.0 if value is None else max(0.0, min(1.0, value))
            shade = tuple(round(255 + share * (end - 255)) for end in COOL)
            draw.rectangle([*place, place[0] + cell - 2, place[1] + cell - 2], fill=shade)
            ink = _PAPER if share > 0.5 else _INK
            draw.text((place[0] + 12, place[1] + 20), "-" if value is None else f"{value:.2f}", fill=ink, font=_font())
    return sheet

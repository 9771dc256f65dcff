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
Colour = tuple[int, int, int]

WARM, COOL = (230, 85, 13), (33, 113, 181)
_RED, _INK = (220, 20, 30), (30, 30, 30)
_PAPER, _PALE, _FAINT = (255, 255, 255), (238, 238, 238), (110, 110, 110)
# One per client where all boxes are in one image: Okabe and Ito's, less those that the maps have.
_CLIENTS: tuple[Colour, ...] = ((86, 180, 233), (240, 228, 66), (0, 158, 115), (204, 121, 167), (255, 255, 255))
_CELL, _GAP, _LINE, _MARGIN = 160, 10, 18, 84
_TEXT = 13
_STRENGTH = 0.8


@dataclass(frozen=True)
class Column:
    """One client's view of an image, for one prototype."""

    title: str
    explanation: Explanation
    evidence: Evidence
    source: Pixels | None
    """The patch behind the prototype."""
    right: bool | None = None
    """Whether the prediction is right; None without a label."""

    @property
    def strength(self) -> float:
        """How much the prototype's place says, beside that of the client's loudest one."""
        strongest = max(abs(each.lift) for each in self.explanation.evidence)
        return abs(self.evidence.lift) / strongest if strongest > 0 else 0.0


def overlay(image: Pixels, evidence: Evidence, strength: float = 1.0) -> Pixels:
    """The map over the image: coloured where the place is more like the prototype than an average one is.

    Warm where the prototype speaks for the prediction, cool where it speaks against it. A place that is not like it
    says nothing, and stays grey.
    """
    above = np.maximum(evidence.map - evidence.map.mean(), 0)
    share = _STRENGTH * strength * above[..., None] / max(float(above.max()), 1e-12)
    grey = np.repeat(image.mean(2, keepdims=True), 3, axis=2) * 0.8 + 25
    mixed = grey * (1 - share) + np.array(WARM if evidence.speaks_for else COOL) * share
    return np.asarray(mixed.clip(0, 255), dtype=np.uint8)


def figure(image: Pixels, columns: Sequence[Column], classes: Sequence[str]) -> Image.Image:
    """A column for each client: the image with its box, the map, the boxed part enlarged, the prototype's own patch.

    Before them the image as it is, and where there are several clients all their boxes in it.
    """
    rows = ["image", "map", "part"]
    if any(column.source is not None for column in columns):
        rows.append("prototype")
    head = _GAP // 2 + 3 * _LINE + 4
    width = _MARGIN + (1 + len(columns)) * (_CELL + _GAP)
    sheet = Image.new("RGB", (width, head + len(rows) * (_CELL + _GAP)), _PAPER)
    draw = ImageDraw.Draw(sheet)
    for number, row in enumerate(rows):
        draw.text((4, head + number * (_CELL + _GAP) + _CELL // 2), row, fill=_FAINT, font=_font(), anchor="lm")
    _together(sheet, image, columns, head)
    for number, column in enumerate(columns):
        left = _MARGIN + (1 + number) * (_CELL + _GAP)
        _headed(draw, column, classes, left, _CLIENTS[number % len(_CLIENTS)] if len(columns) > 1 else None)
        cells = _cells(image, column)
        for position, row in enumerate(rows):
            place = (left, head + position * (_CELL + _GAP))
            if row in cells:
                sheet.paste(cells[row], place)
            else:
                middle = (place[0] + _CELL // 2, place[1] + _CELL // 2)
                text = "flat map: no box" if row == "part" else "not looked up"
                draw.text(middle, text, fill=_FAINT, font=_font(), anchor="mm")
    return sheet


def colour(image: NDArray[np.uint8]) -> Pixels:
    """[C, H, W] as [H, W, 3]."""
    return np.ascontiguousarray(np.broadcast_to(image.transpose(1, 2, 0), (*image.shape[1:], 3)))


def _together(sheet: Image.Image, image: Pixels, columns: Sequence[Column], head: int) -> None:
    """The column before the clients': the plain image, then all clients' boxes, and what the colours mean."""
    draw = ImageDraw.Draw(sheet)
    draw.text((_MARGIN, head - 4), "unmarked", fill=_FAINT, font=_font(), anchor="lb")
    sheet.paste(_scaled(image), (_MARGIN, head))
    top = head + _CELL + _GAP
    if len(columns) > 1:
        cell = _scaled(image)
        for number, column in enumerate(columns):
            if column.evidence.box is not None:
                _frame(cell, column.evidence.box, image.shape[:2], _CLIENTS[number % len(_CLIENTS)])
        sheet.paste(cell, (_MARGIN, top))
        draw.text((_MARGIN, top + _CELL + 4), "boxes of all", fill=_FAINT, font=_font())
        top += _CELL + _GAP
    for line, (meaning, shade) in enumerate((("speaks for", WARM), ("speaks against", COOL))):
        y = top + 36 + line * (_LINE + 6)
        draw.rectangle([_MARGIN, y, _MARGIN + 14, y + 14], fill=shade)
        draw.text((_MARGIN + 22, y + 7), meaning, fill=_INK, font=_font(), anchor="lm")


def _headed(draw: ImageDraw.ImageDraw, column: Column, classes: Sequence[str], left: int, mark: Colour | None) -> None:
    """Whose column it is, what that client says, and the prototype that is shown."""
    top = _GAP // 2
    if mark is not None:
        draw.rectangle([left, top + 3, left + 10, top + 13], fill=mark, outline=_FAINT)
    draw.text((left + (16 if mark else 0), top), _short(column.title, 20), fill=_INK, font=_font(_TEXT + 1))
    explanation, evidence = column.explanation, column.evidence
    prediction = (
        f"{_short(classes[explanation.predicted], 14)} {100 * explanation.probabilities[explanation.predicted]:.0f} %"
    )
    draw.text((left, top + _LINE), prediction + (", wrong" if column.right is False else ""), fill=_INK, font=_font())
    speaks = "for" if evidence.speaks_for else "against"
    text = f"{speaks}: {_short(classes[evidence.label], 12)} #{evidence.prototype}"
    draw.text((left, top + 2 * _LINE), text, fill=WARM if evidence.speaks_for else COOL, font=_font())


def _cells(image: Pixels, column: Column) -> dict[str, Image.Image]:
    box = column.evidence.box
    cells = {"image": _scaled(image), "map": _scaled(overlay(image, column.evidence, column.strength))}
    if box is not None:
        _frame(cells["image"], box, image.shape[:2], _RED)
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


def _frame(cell: Image.Image, box: Box, shape: tuple[int, ...], ink: Colour) -> None:
    """A box with a dark and a light edge, so that it shows on any ground."""
    scale = _CELL / max(shape[0], shape[1])
    across, down = (_CELL - shape[1] * scale) / 2, (_CELL - shape[0] * scale) / 2
    left, top = box.left * scale + across, box.top * scale + down
    right, bottom = box.right * scale + across - 1, box.bottom * scale + down - 1
    draw = ImageDraw.Draw(cell)
    draw.rectangle([left - 1, top - 1, right + 1, bottom + 1], outline=_PAPER if ink == _RED else _INK)
    draw.rectangle([left, top, right, bottom], outline=ink, width=2)


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}."


def _font(size: int = _TEXT) -> ImageFont.ImageFont | ImageFont.FreeTypeFont:
    return ImageFont.load_default(size)


def matrix(values: Mapping[tuple[str, str], float | None], names: Sequence[str], title: str) -> Image.Image:
    """A table of agreement between clients as a picture: the darker, the more two clients agree."""
    shown = [_short(name, 16) for name in names]
    margin = max(int(_font().getlength(name)) for name in shown) + 2 * _GAP
    height, head = 48, 2 * _LINE + _GAP
    width = _GAP + max(margin + len(names) * margin, int(_font(_TEXT + 1).getlength(title)))
    sheet = Image.new("RGB", (width + _GAP, head + len(names) * height + _GAP), _PAPER)
    draw = ImageDraw.Draw(sheet)
    draw.text((_GAP, 2), title, fill=_INK, font=_font(_TEXT + 1))
    for row, left in enumerate(names):
        top = head + row * height
        draw.text((_GAP, top + height // 2), shown[row], fill=_INK, font=_font(), anchor="lm")
        draw.text((margin + row * margin + margin // 2, head - 6), shown[row], fill=_INK, font=_font(), anchor="ms")
        for column, right in enumerate(names):
            value = None if row == column else values.get((left, right), values.get((right, left)))
            _agreed(draw, value, [margin + column * margin, top, margin + (column + 1) * margin - 2, top + height - 2])
    return sheet


def _agreed(draw: ImageDraw.ImageDraw, value: float | None, place: Sequence[int]) -> None:
    """One cell of the table; pale where there is nothing to compare."""
    share = 0.0 if value is None else max(0.0, min(1.0, value))
    shade = tuple(round(255 + share * (end - 255)) for end in COOL)
    draw.rectangle(list(place), fill=_PALE if value is None else shade, outline=_PALE)
    middle = ((place[0] + place[2]) // 2, (place[1] + place[3]) // 2)
    ink = _PAPER if share > 0.5 else _INK
    draw.text(middle, "" if value is None else f"{value:.2f}", fill=ink, font=_font(_TEXT + 1), anchor="mm")

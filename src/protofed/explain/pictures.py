"""Explanations as pictures: made of pixels only, so they cost milliseconds and need no plotting library.

Warm colours speak for the decision, cool ones against it; orange and blue stay apart for the colour-blind.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from protofed.explain.explanation import Evidence, Explanation
from protofed.explain.maps import Box

Pixels = NDArray[np.uint8]
Colour = tuple[int, int, int]

WARM, COOL = (230, 85, 13), (33, 113, 181)
RED, INK = (220, 20, 30), (30, 30, 30)
PAPER, _PALE, FAINT = (255, 255, 255), (238, 238, 238), (110, 110, 110)
# One per client where all boxes are in one image: Okabe and Ito's, less those that the maps have.
_CLIENTS: tuple[Colour, ...] = ((86, 180, 233), (240, 228, 66), (0, 158, 115), (204, 121, 167), (255, 255, 255))
CELL, GAP, LINE, _MARGIN = 224, 10, 21, 92
"""Four cells are as wide as a page, and a photograph for a pretrained network keeps its pixels."""
_TEXT = 15
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
    """The map over the image: warm where a place speaks for the prediction, cool where it speaks against it.

    A place that says nothing stays grey.
    """
    spoken = evidence.spoken[..., None]
    share = _STRENGTH * strength * np.abs(spoken) / max(float(np.abs(spoken).max()), 1e-12)
    grey = np.repeat(image.mean(2, keepdims=True), 3, axis=2) * 0.8 + 25
    mixed = grey * (1 - share) + np.where(spoken > 0, WARM, COOL) * share
    return np.asarray(mixed.clip(0, 255), dtype=np.uint8)


def figure(image: Pixels, columns: Sequence[Column], classes: Sequence[str]) -> Image.Image:
    """A column for each client: the image with its box, the map, the boxed part enlarged, the prototype's own patch.

    Before them the image as it is, and where there are several clients all their boxes in it.
    """
    rows = ["image", "map", "part"]
    if any(column.source is not None for column in columns):
        rows.append("prototype")
    head = GAP // 2 + 3 * LINE + 4
    width = _MARGIN + (1 + len(columns)) * (CELL + GAP)
    sheet = Image.new("RGB", (width, head + len(rows) * (CELL + GAP)), PAPER)
    draw = ImageDraw.Draw(sheet)
    for number, row in enumerate(rows):
        draw.text((4, head + number * (CELL + GAP) + CELL // 2), row, fill=FAINT, font=font(), anchor="lm")
    _together(sheet, image, columns, head)
    for number, column in enumerate(columns):
        left = _MARGIN + (1 + number) * (CELL + GAP)
        _headed(draw, column, classes, left, _CLIENTS[number % len(_CLIENTS)] if len(columns) > 1 else None)
        cells = _cells(image, column)
        for position, row in enumerate(rows):
            place = (left, head + position * (CELL + GAP))
            if row in cells:
                sheet.paste(cells[row], place)
            else:
                middle = (place[0] + CELL // 2, place[1] + CELL // 2)
                text = "flat map: no box" if row == "part" else "not looked up"
                draw.text(middle, text, fill=FAINT, font=font(), anchor="mm")
    return sheet


def colour(image: NDArray[np.uint8]) -> Pixels:
    """[C, H, W] as [H, W, 3]."""
    return np.ascontiguousarray(np.broadcast_to(image.transpose(1, 2, 0), (*image.shape[1:], 3)))


def _together(sheet: Image.Image, image: Pixels, columns: Sequence[Column], head: int) -> None:
    """The column before the clients': the plain image, then all clients' boxes, and what the colours mean."""
    draw = ImageDraw.Draw(sheet)
    draw.text((_MARGIN, head - 4), "unmarked", fill=FAINT, font=font(), anchor="lb")
    sheet.paste(scaled(image), (_MARGIN, head))
    top = head + CELL + GAP
    if len(columns) > 1:
        cell = scaled(image)
        for number, column in enumerate(columns):
            if column.evidence.box is not None:
                frame(cell, column.evidence.box, image.shape[:2], _CLIENTS[number % len(_CLIENTS)])
        sheet.paste(cell, (_MARGIN, top))
        draw.text((_MARGIN, top + CELL + 4), "all boxes", fill=FAINT, font=font())
        top += CELL + GAP
    for line, (meaning, shade) in enumerate((("supports", WARM), ("opposes", COOL))):
        y = top + 36 + line * (LINE + 6)
        draw.rectangle([_MARGIN, y, _MARGIN + 14, y + 14], fill=shade)
        draw.text((_MARGIN + 22, y + 7), meaning, fill=INK, font=font(), anchor="lm")


def _headed(draw: ImageDraw.ImageDraw, column: Column, classes: Sequence[str], left: int, mark: Colour | None) -> None:
    """Whose column it is, what that client says, and the prototype that is shown."""
    top = GAP // 2
    if mark is not None:
        draw.rectangle([left, top + 3, left + 10, top + 13], fill=mark, outline=FAINT)
    draw.text((left + (16 if mark else 0), top), short(column.title, 24), fill=INK, font=font(_TEXT + 1))
    explanation, evidence = column.explanation, column.evidence
    sure = 100 * explanation.probabilities[explanation.predicted]
    prediction = f"says {short(classes[explanation.predicted], 14)} ({sure:.0f} %)"
    draw.text((left, top + LINE), prediction + (", wrong" if column.right is False else ""), fill=INK, font=font())
    speaks = "for" if evidence.speaks_for else "against"
    text = f"{speaks}: {evidence.words([short(name, 16) for name in classes])}"
    draw.text((left, top + 2 * LINE), short(text, 30), fill=WARM if evidence.speaks_for else COOL, font=font())


def _cells(image: Pixels, column: Column) -> dict[str, Image.Image]:
    box = column.evidence.box
    cells = {"image": scaled(image), "map": scaled(overlay(image, column.evidence, column.strength))}
    if box is not None:
        frame(cells["image"], box, image.shape[:2], RED)
        cells["part"] = scaled(image[box.top : box.bottom, box.left : box.right])
    if column.source is not None:
        cells["prototype"] = scaled(np.broadcast_to(column.source, (*column.source.shape[:2], 3)))
    return cells


def scaled(pixels: NDArray[np.uint8]) -> Image.Image:
    """To the size of a cell, keeping the proportions."""
    scale = CELL / max(pixels.shape[:2])
    size = (max(1, round(pixels.shape[1] * scale)), max(1, round(pixels.shape[0] * scale)))
    picture = Image.fromarray(np.ascontiguousarray(pixels)).resize(size, Image.Resampling.BICUBIC)
    cell = Image.new("RGB", (CELL, CELL), PAPER)
    cell.paste(picture, ((CELL - size[0]) // 2, (CELL - size[1]) // 2))
    return cell


def frame(cell: Image.Image, box: Box, shape: tuple[int, ...], ink: Colour) -> None:
    """A box with a dark and a light edge, so that it shows on any ground."""
    scale = CELL / max(shape[0], shape[1])
    across, down = (CELL - shape[1] * scale) / 2, (CELL - shape[0] * scale) / 2
    left, top = box.left * scale + across, box.top * scale + down
    right, bottom = box.right * scale + across - 1, box.bottom * scale + down - 1
    draw = ImageDraw.Draw(cell)
    draw.rectangle([left - 1, top - 1, right + 1, bottom + 1], outline=PAPER if ink == RED else INK)
    draw.rectangle([left, top, right, bottom], outline=ink, width=2)


def short(text: str, most: int) -> str:
    """The text, cut where it is longer than `most`."""
    return text if len(text) <= most else f"{text[: most - 1]}."


def font(size: int = _TEXT) -> ImageFont.ImageFont | ImageFont.FreeTypeFont:
    """The letters of all pictures."""
    return ImageFont.load_default(size)


def matrix(values: Mapping[tuple[str, str], float | None], names: Sequence[str], title: str) -> Image.Image:
    """A table of agreement between clients as a picture: the darker, the more two clients agree."""
    shown = [short(name, 16) for name in names]
    margin = max(int(font().getlength(name)) for name in shown) + 2 * GAP
    height, head = 48, 2 * LINE + GAP
    width = GAP + max(margin + len(names) * margin, int(font(_TEXT + 1).getlength(title)))
    sheet = Image.new("RGB", (width + GAP, head + len(names) * height + GAP), PAPER)
    draw = ImageDraw.Draw(sheet)
    draw.text((GAP, 2), title, fill=INK, font=font(_TEXT + 1))
    for row, left in enumerate(names):
        top = head + row * height
        draw.text((GAP, top + height // 2), shown[row], fill=INK, font=font(), anchor="lm")
        draw.text((margin + row * margin + margin // 2, head - 6), shown[row], fill=INK, font=font(), anchor="ms")
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
    ink = PAPER if share > 0.5 else INK
    draw.text(middle, "" if value is None else f"{value:.2f}", fill=ink, font=font(_TEXT + 1), anchor="mm")

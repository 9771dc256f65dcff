"""Exact evidence as pictures: a row for each model, in it the image and the maps that add up to its logits."""

from collections.abc import Sequence
from typing import cast

from PIL import Image, ImageDraw

from protofed.explain.exact import LogitEvidence
from protofed.explain.explanation import Explanation
from protofed.explain.pictures import (
    CELL,
    COOL,
    FAINT,
    GAP,
    INK,
    LINE,
    PAPER,
    RED,
    WARM,
    Pixels,
    font,
    frame,
    overlay,
    scaled,
    short,
)

_WIDE = CELL + 16
"""Pixels of a column: room for the names of two classes."""
_HEAD = 2 * LINE + 8
_FOOT = 2 * LINE + 8
_LEGEND = LINE + GAP


def exact_figure(image: Pixels, views: Sequence[Explanation], classes: Sequence[str], label: int) -> Image.Image:
    """For each model: what it says; the image with the box of the strongest place; then map by map what adds up."""
    columns = 1 + max(len(view.evidence) for view in views)
    row = _HEAD + CELL + _FOOT
    sheet = Image.new("RGB", (GAP + columns * (_WIDE + GAP), len(views) * row + _LEGEND), PAPER)
    for number, view in enumerate(views):
        _view(sheet, image, view, classes, label, number * row)
    _legend(ImageDraw.Draw(sheet), len(views) * row)
    return sheet


def _view(sheet: Image.Image, image: Pixels, view: Explanation, classes: Sequence[str], label: int, top: int) -> None:
    draw = ImageDraw.Draw(sheet)
    verdict = "" if label < 0 else ", right" if view.predicted == label else f", in truth {short(classes[label], 16)}"
    probability = 100 * view.probabilities[view.predicted]
    text = f"{view.client}: {short(classes[view.predicted], 24)}, {probability:.0f} %{verdict}"
    draw.text((GAP, top + 4), text, fill=INK, font=font(17))
    cell = scaled(image)
    if (box := view.strongest.box) is not None:
        frame(cell, box, image.shape[:2], RED)
    sheet.paste(cell, (GAP, top + _HEAD))
    for number, each in enumerate(view.evidence, start=1):
        evidence, left = cast("LogitEvidence", each), GAP + number * (_WIDE + GAP)
        names = [short(name, 15) for name in classes]
        ink = WARM if evidence.is_prediction else COOL
        draw.text((left, top + LINE + 6), evidence.words(names), fill=ink, font=font())
        sheet.paste(scaled(overlay(image, evidence)), (left, top + _HEAD))
        sums = f"places {evidence.contribution:+.3f}, bias {evidence.bias:+.3f}"
        total = "lead" if evidence.rival is not None else "logit"
        for line, words in enumerate((sums, f"= {total} {evidence.logit:+.3f}")):
            draw.text((left, top + _HEAD + CELL + 2 + line * LINE), words, fill=INK if line else FAINT, font=font())


def _legend(draw: ImageDraw.ImageDraw, top: int) -> None:
    left = GAP
    for meaning, shade in (("supports the prediction", WARM), ("opposes it", COOL), ("strongest place", RED)):
        draw.rectangle([left, top + 3, left + 12, top + 15], fill=shade)
        draw.text((left + 18, top + 9), meaning, fill=INK, font=font(), anchor="lm")
        left += 34 + int(font().getlength(meaning))

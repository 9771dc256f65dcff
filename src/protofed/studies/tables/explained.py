"""What the explanations in a run's folder come to: whether models agree and whether boxes matter, beside chance."""

import json
from collections.abc import Mapping
from typing import Any, TypedDict

from protofed.errors import UserError
from protofed.explain.explaining import FOLDER, INDEX
from protofed.runs.opened import Run

_DIGITS = 6


class ExplanationScores(TypedDict, total=False):
    """Empty where a run has no explanations.

    `agreement` has for each pair of models, `a and b`, and for `all` of them: `same_class`, and where that is so `iou`,
    `iou_random` and `rank_correlation`; it is empty for a single model. `models` has for each the share of images it is
    `right` about, and mean probabilities of what it predicts: `whole` for the image, `blurred` and `blurred_random`
    without the box or a random one, `nothing` for the image all blurred, `pasted` and `pasted_random` for that with the
    box or a random one put in. None where there is nothing to compare: flat maps, images without labels.
    """

    images: int
    agreement: dict[str, dict[str, float | None]]
    models: dict[str, dict[str, float | None]]


ALL = "all"
AGREEMENT = ("same_class", "iou", "iou_random", "rank_correlation")
_CURVES = {
    "whole": ("deletion", 0),
    "blurred": ("deletion", -1),
    "blurred_random": ("deletion_random", -1),
    "nothing": ("insertion", 0),
    "pasted": ("insertion", -1),
    "pasted_random": ("insertion_random", -1),
}
FAITHFULNESS = ("right", *_CURVES)


def explanation_scores(run: Run) -> ExplanationScores:
    """From the explanations that were drawn of a run."""
    index = run.path / FOLDER / INDEX
    if not index.is_file():
        return {}
    try:
        content = json.loads(index.read_bytes())
    except ValueError:
        raise UserError(f"{index} is damaged; remove it to explain the run again") from None
    agreed = content["agreement"]
    compared = {} if agreed is None else {**{_pair(each): each for each in agreed["pairs"]}, ALL: agreed["overall"]}
    return {
        "images": len(content["images"]),
        "agreement": {who: {key: _rounded(each[key]) for key in AGREEMENT} for who, each in compared.items()},
        "models": {name: _model(content, number, name) for number, name in enumerate(content["clients"])},
    }


def _model(content: Mapping[str, Any], number: int, name: str) -> dict[str, float | None]:
    known = [verdict for image in content["images"] if (verdict := image["clients"][number]["agrees"]) is not None]
    curves = (content["faithfulness"] or {"clients": {}})["clients"].get(name)
    return {
        "right": _rounded(sum(known) / len(known) if known else None),
        **{key: _rounded(None if curves is None else curves[curve][at]) for key, (curve, at) in _CURVES.items()},
    }


def _pair(compared: Mapping[str, Any]) -> str:
    return " and ".join(compared["clients"])


def _rounded(figure: float | None) -> float | None:
    return None if figure is None else round(figure, _DIGITS)

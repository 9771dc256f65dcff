"""What a folder of explanations says, in words and tables: for its page, the command line and the report of a run."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from protofed.explain.exact import LogitEvidence
from protofed.explain.explanation import Evidence
from protofed.text import Table, percent

ABOUT = (
    "The red box is around the upper 5 % of the map, where the prototype that spoke most was found; the part in it is "
    "enlarged below, and below that stands the client's own training patch that comes nearest to the prototype, if it "
    "was looked up. Warm places look like a prototype that speaks for the prediction, cool ones like one that speaks "
    "against it; grey places no more than an average place of the image. The paler a map, the less its prototype says."
)

ABOUT_EXACT = (
    "The network averages what it sees over all places and ends in one linear layer, so every logit is a sum over "
    "places: each map shows what every place adds, and its sum and the bias are the logit, not an estimate of it. The "
    "first map is the lead of the predicted class over the runner-up, which is what decides; the others are of single "
    "classes. Warm places speak for the prediction, cool ones against it, each map by its own strongest place; the red "
    "box is around the upper 5 % of the first. A place is what one position of the last feature maps sees, which is "
    "more than the square it is drawn at."
)

_MATTERS = 0.02
"""Probability by which a box must beat random ones to matter."""
_DECIDED = 1.5
"""Times the probability that every class would have by chance."""
_COSTLY = 0.05
"""Accuracy that a projection may cost without a note."""


def about(content: Mapping[str, Any]) -> str:
    """How to read the pictures."""
    if content["evidence"] != "exact":
        return ABOUT
    if content["shifts"] == 1:
        return ABOUT_EXACT
    return (
        f"{ABOUT_EXACT} Maps are drawn from {content['shifts']} x {content['shifts']} copies of the image that are "
        "shifted by parts of a place, and so add up to the mean of the copies' logits; the figures below them are of "
        "the image itself."
    )


def tables(content: Mapping[str, Any]) -> dict[str, Table]:
    """By name: `agreement`, `faithfulness`, `projection`, as far as there are."""
    made = {
        "agreement": _agreement(content["agreement"]),
        "faithfulness": _faithfulness(content["faithfulness"]),
        "projection": _projection(content["projection"]),
    }
    return {name: table for name, table in made.items() if table is not None}


def _agreement(figures: Mapping[str, Any] | None) -> Table | None:
    if figures is None:
        return None
    entries = {
        **{" and ".join(pair["clients"]): pair for pair in figures["pairs"]},
        **{f"class {name}": entry for name, entry in figures["classes"].items()},
        "overall": figures["overall"],
    }
    keys = ("same_class", "iou", "iou_random", "rank_correlation")
    columns = ["", "compared", "same class", "boxes: IoU", "IoU of random boxes", "maps: rank correlation"]
    rows = [[name, str(each["compared"]), *(_number(each[key]) for key in keys)] for name, each in entries.items()]
    return Table("Agreement between clients", columns, rows)


def _faithfulness(figures: Mapping[str, Any] | None) -> Table | None:
    if figures is None:
        return None
    rows = []
    for client, curves in figures["clients"].items():
        row = [client, str(curves["images"])]
        for kind in ("deletion", "insertion"):
            ends = (curves[kind][0], curves[kind][-1], curves[f"{kind}_random"][-1])
            row += [*(f"{value:.2f}" for value in ends), f"{100 * curves[f'{kind}_wins']:.0f} %"]
        rows.append(row)
    blurred = ["image as it is", "box blurred", "random box blurred", "box costs more in"]
    put_in = ["all blurred", "box put in", "random box put in", "box brings more in"]
    columns = ["client", "boxes", *blurred, *put_in]
    return Table("Does the box matter? Probability of the prediction", columns, rows)


def _projection(figures: Mapping[str, Any] | None) -> Table | None:
    if figures is None:
        return None
    title = "Accuracy (%) before and after every prototype is moved onto its nearest training patch"
    rows = [[client, percent(figures["before"][client]), percent(after)] for client, after in figures["after"].items()]
    return Table(title, ["client", "before", "after"], rows)


def findings(content: Mapping[str, Any]) -> list[str]:
    """How far the pictures can be believed, in sentences."""
    return [*_on_predictions(content), *_on_agreement(content["agreement"]), *_on_boxes(content["faithfulness"])]


def _on_predictions(content: Mapping[str, Any]) -> Iterator[str]:
    known = [image for image in content["images"] if image["label"] is not None]
    if known:
        right = {
            client: sum(image["clients"][number]["agrees"] for image in known)
            for number, client in enumerate(content["clients"])
        }
        counted = ", ".join(f"{client} {count}" for client, count in right.items())
        yield f"Correct predictions out of {len(known)}: {counted}."


def _on_agreement(figures: Mapping[str, Any] | None) -> Iterator[str]:
    overall = figures["overall"] if figures is not None else None
    if overall is None:
        return
    text = f"Two clients predict the same class in {100 * overall['same_class']:.0f} % of the cases"
    if overall["iou"] is None:
        yield f"{text}; where they do, there are no two boxes to compare."
        return
    yield (
        f"{text}; where they do, their boxes overlap by {overall['iou']:.2f} (IoU; random boxes of these sizes by "
        f"{overall['iou_random']:.2f}) and their maps have the rank correlation {overall['rank_correlation']:.2f}."
    )


def _on_boxes(figures: Mapping[str, Any] | None) -> Iterator[str]:
    if figures is None:
        yield "Whether the boxes matter to the decision has not been tried; --faithfulness does."
        return
    for client, curves in figures["clients"].items():
        costs, brings = curves["deletion_gap"], curves["insertion_gap"]
        verdict = "the box matters" if min(costs, brings) > _MATTERS else "the box hardly explains the decision"
        if max(costs, brings) > _MATTERS >= min(costs, brings):
            verdict = "the two disagree on whether the box matters"
        yield (
            f"{client}: blurring the box away costs {costs:+.2f} of probability beyond a random box, putting it into "
            f"the blurred image brings {brings:+.2f}: {verdict}."
        )


def undecided(probabilities: Sequence[Sequence[float]]) -> list[str]:
    """A note where a head gives all classes nearly the same probability, since nobody chose its temperature."""
    if any(max(each) > _DECIDED / len(each) for each in probabilities):
        return []
    return [
        "all classes are nearly as probable as each other, so probabilities and what boxes cost in them say little; "
        "where the head is computed, sites choose a temperature with --set tune=temperature"
    ]


def notes(strongest: Sequence[Evidence], blank: int, projection: Mapping[str, Any] | None) -> list[str]:
    """What to know about the strongest prototypes' maps, `blank` of whose boxes show nothing, and the projection."""
    flat = sum(each.box is None for each in strongest)
    scattered = sum(each.scattered for each in strongest)
    coarse = next((each for each in strongest if each.coarse), None)
    lines = []
    if projection and projection["after"]["average"] < projection["before"]["average"] - _COSTLY:
        lines.append(
            "projection costs much accuracy: prototypes lie far from any training patch; train longer before it"
        )
    if coarse is not None:
        height, width = coarse.positions
        lines.append(
            f"maps have {height}x{width} positions only: boxes say little about the place; use larger images or a "
            "network with fewer strides (the cifar stem), so that there are 8x8 or more"
            + ("; --shifts 4 draws them finer" if isinstance(coarse, LogitEvidence) else "")
        )
    if flat and isinstance(strongest[0], LogitEvidence):
        lines.append(f"in {flat} of {len(strongest)} images no place speaks for the class: its bias does")
    elif flat:
        lines.append(f"{flat} of {len(strongest)} maps are flat: nothing stands out, so they have no box")
    if scattered:
        lines.append(
            f"{scattered} of {len(strongest)} maps have peaks far apart: the box is around the highest, so look at "
            "the map as well"
        )
    if blank:
        lines.append(
            f"{blank} of {len(strongest)} boxes are around an even part of the image, such as its dark rim: what "
            "the model goes by there is nothing that a reader sees"
        )
    return lines


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"

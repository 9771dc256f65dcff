"""What a folder of explanations says, in words and tables: for its page, the command line and the report of a run."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from protofed.explain.exact import LogitEvidence
from protofed.explain.explanation import Evidence
from protofed.text import Table, percent

ABOUT = (
    "The red box surrounds the top 5 % of the map, where the most important prototype was found. The part inside "
    "the box is enlarged below; below that is the client's own training patch nearest to the prototype, if it "
    "was looked up. Warm positions resemble a prototype that supports the prediction, cool ones resemble one "
    "that opposes it; grey positions resemble neither more than an average position of the image. The paler a "
    "map, the less its prototype matters."
)

ABOUT_EXACT = (
    "The network averages its features over all positions and ends in one linear layer, so every logit is a sum "
    "over positions. Each map shows what every position adds; the map and the bias add up to the logit exactly, "
    "not as an estimate. The first map is the lead of the predicted class over the runner-up, which is what "
    "decides; the others show single classes. Warm positions support the prediction, cool ones oppose it, and "
    "each map is scaled by its own strongest position; the red box surrounds the top 5 % of the first map. The "
    "features at a position come from its whole receptive field, which is larger than the square at which they "
    "are drawn."
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
        f"{ABOUT_EXACT} Maps are drawn from {content['shifts']} x {content['shifts']} copies of the image, "
        "shifted by fractions of a position, and so add up to the mean of the copies' logits; the figures below "
        "the maps are those of the image itself."
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
    blurred = ["original image", "box blurred", "random box blurred", "box costs more in"]
    put_in = ["all blurred", "box pasted in", "random box pasted in", "box gains more in"]
    columns = ["client", "boxes", *blurred, *put_in]
    return Table("Does the box matter? Probability of the prediction", columns, rows)


def _projection(figures: Mapping[str, Any] | None) -> Table | None:
    if figures is None:
        return None
    title = "Accuracy (%) before and after moving every prototype onto its nearest training patch"
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
        yield f"{text}; in these cases there are no two boxes to compare."
        return
    yield (
        f"{text}; in these cases their boxes overlap by {overall['iou']:.2f} (IoU; random boxes of these sizes by "
        f"{overall['iou_random']:.2f}), and the rank correlation of their maps is "
        f"{overall['rank_correlation']:.2f}."
    )


def _on_boxes(figures: Mapping[str, Any] | None) -> Iterator[str]:
    if figures is None:
        yield "Whether the boxes matter to the decision was not tested; use --faithfulness to test it."
        return
    for client, curves in figures["clients"].items():
        costs, brings = curves["deletion_gap"], curves["insertion_gap"]
        verdict = "the box matters" if min(costs, brings) > _MATTERS else "the box hardly explains the decision"
        if max(costs, brings) > _MATTERS >= min(costs, brings):
            verdict = "the two tests disagree on whether the box matters"
        yield (
            f"{client}: blurring the box costs {costs:+.2f} of probability more than a random box, pasting it "
            f"into the blurred image gains {brings:+.2f}: {verdict}."
        )


def undecided(probabilities: Sequence[Sequence[float]]) -> list[str]:
    """A note where a head gives all classes nearly the same probability, since nobody chose its temperature."""
    if any(max(each) > _DECIDED / len(each) for each in probabilities):
        return []
    return [
        "all classes are nearly equally probable, so probabilities, and what boxes cost in them, mean little; if "
        "the head is computed, sites can choose a temperature with --set tune=temperature"
    ]


def notes(strongest: Sequence[Evidence], blank: int, projection: Mapping[str, Any] | None) -> list[str]:
    """What to know about the strongest prototypes' maps, `blank` of whose boxes show nothing, and the projection."""
    flat = sum(each.box is None for each in strongest)
    scattered = sum(each.scattered for each in strongest)
    coarse = next((each for each in strongest if each.coarse), None)
    lines = []
    if projection and projection["after"]["average"] < projection["before"]["average"] - _COSTLY:
        lines.append("projection costs much accuracy: prototypes lie far from any training patch; train longer first")
    if coarse is not None:
        height, width = coarse.positions
        lines.append(
            f"maps have only {height}x{width} positions: boxes localise poorly; use larger images or a network "
            "with fewer strides (the cifar stem), so that there are 8x8 or more"
            + ("; --shifts 4 draws them finer" if isinstance(coarse, LogitEvidence) else "")
        )
    if flat and isinstance(strongest[0], LogitEvidence):
        lines.append(f"in {flat} of {len(strongest)} images no position supports the class: only its bias does")
    elif flat:
        lines.append(f"{flat} of {len(strongest)} maps are flat: nothing stands out, so they have no box")
    if scattered:
        lines.append(
            f"{scattered} of {len(strongest)} maps have peaks far apart: the box surrounds the highest one, so "
            "look at the map as well"
        )
    if blank:
        lines.append(
            f"{blank} of {len(strongest)} boxes surround a uniform part of the image, such as its dark rim: a "
            "reader sees nothing there that could explain the decision"
        )
    return lines


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"

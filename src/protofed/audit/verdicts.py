"""What the figures of an audit mean, in words; one sentence for each kind of message."""

from collections.abc import Mapping
from typing import Any

from protofed.audit.membership import Auc
from protofed.audit.reconstruction import RISK
from protofed.guards import Guard

_BETTER = 0.95
"""A rebuilt image must be this much nearer than the class mean to count as more than the label."""


def of_features(stage: str, figures: Mapping[str, Any], sent: bool) -> str:
    """Embeddings of single samples."""
    what = f"features of stage {stage}" + ("" if sent else " (which were not sent in this run)")
    near, guess = figures["rms"], figures["class_mean_rms"]
    distance = f"RMS {near:.3f} to the original on average, {guess:.3f} when guessing the class mean"
    reason = f"{distance}; {_shares(figures)}"
    nearer, more = near < _BETTER * guess, _more_given_away(figures)
    if nearer and more:
        return f"At risk: images reconstructed from {what} come close to the originals ({reason})."
    if more:
        return (
            f"At risk: some images reconstructed from {what} come close to the originals, though most do not "
            f"({reason})."
        )
    if nearer:
        return f"Some leakage: images reconstructed from {what} show more than their class alone reveals ({reason})."
    return (
        f"Nothing found: images reconstructed from {what} are no closer to the originals than class means ({reason})."
    )


def of_prototypes(field: str, figures: Mapping[str, Any]) -> str:
    """Class means and cluster centres."""
    near, guess = figures["rms_to_nearest"], figures["rms_of_class_mean_to_nearest"]
    distance = f"RMS {near:.3f} to the nearest training image, {guess:.3f} when guessing the class mean"
    reason = f"{distance}; {_shares(figures)}"
    fewest = figures["fewest_samples_behind_one"]
    single = "" if fewest is None or fewest > 1 else " One of them comes from a single sample and is its embedding."
    nearer, more = near < _BETTER * guess, _more_given_away(figures)
    if more:
        some = "" if nearer else "some of "
        return (
            f"At risk: {some}the prototypes {field}, when decoded, come close to single training images "
            f"({reason}).{single}"
        )
    if nearer:
        return f"Some leakage: the prototypes {field} reveal more than the class mean does ({reason}).{single}"
    return f"Nothing found: the prototypes {field} reveal no image better than the class mean does ({reason}).{single}"


def _more_given_away(figures: Mapping[str, Any]) -> bool:
    """Whether more come within the risk line than the label alone would bring there."""
    return bool(figures["below_risk_line"] > figures["class_mean_below_risk_line"])


def _shares(figures: Mapping[str, Any]) -> str:
    """Both shares: images that are alike come within the line of their class mean, which gives nothing away."""
    share, guess = figures["below_risk_line"], figures["class_mean_below_risk_line"]
    return f"{_points(share)} % come within {RISK:g}, against {_points(guess)} % of class means"


def _points(share: float) -> str:
    """As the tables have it, to a tenth."""
    return f"{round(100 * share, 1):g}"


def of_single_images(clients: Mapping[str, list[str]]) -> list[str]:
    """Where a class mean is no mean."""
    if not clients:
        return []
    named = ", ".join(f"{client} ({', '.join(classes)})" for client, classes in clients.items())
    return [f"At risk: a class with one image sends that image's embedding itself, with its label: {named}."]


def of_guard(guard: Guard) -> list[str]:
    """What the figures mean where something stands between the client and the server."""
    if not guard.secure:
        return []
    return [
        "Secure aggregation hides single uploads from the server: these figures apply to anyone who sees one "
        "before that."
    ]


def of_membership(what: str, result: Auc) -> str:
    """Whether an attacker knows who took part."""
    figure = f"AUC {result.auc:.3f}, 95 % interval {result.low:.3f} to {result.high:.3f}"
    if result.low <= 0.5:
        return f"Membership by {what}: no better than chance ({figure})."
    word = "slightly" if result.auc < 0.6 else "clearly" if result.auc < 0.75 else "strongly"
    return (
        f"Membership by {what}: an attacker distinguishes members from other images, {word} better than chance "
        f"({figure})."
    )


def of_weights(sent: bool) -> str:
    """What is said of weights, on which no reconstruction is tried."""
    if not sent:
        return "Weights: none were sent."
    return (
        "Weights: sent. They were attacked for membership only; the audit did not try to invert updates into "
        "images and says nothing about that."
    )

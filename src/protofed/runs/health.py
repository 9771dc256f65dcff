"""Whether a run went well: a loss that explodes, clients that are lost, an accuracy that is no better than chance.

All is read from `run.json` and `rounds.jsonl`, so a run that is going on can be judged like one that has ended. Nothing
here changes what a run does.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypedDict

from protofed.federation.best import BestRound, shown_loss
from protofed.federation.chance import at_chance
from protofed.federation.folder import BEST_MODEL
from protofed.text import percent

Kind = Literal["diverged", "loss_exploded", "fell_to_chance", "never_above_chance", "clients_lost", "site_at_chance"]

COLLAPSES = ("diverged", "loss_exploded", "fell_to_chance", "never_above_chance")
"""What concerns the whole run: its last model is of no use."""

_TIMES = 3.0
"""A loss so many times the larger of its first value and that of guessing has exploded."""
_BELOW_GUESSING = 0.9
"""A loss below this part of what guessing has is one that has learned something."""
_STAYS = 3
"""So many scored rounds at chance, and the accuracy stays there."""
_COLOURS = 3
_MOST_NAMES = 5
_NOT_SITES = ("average", "pooled", "held_out", "quantiles")


class RunWarning(TypedDict):
    """One entry of `warnings` in summary.json."""

    kind: Kind
    round: int
    """In which it began."""
    text: str
    """What happened, in a sentence."""
    advice: str
    """What is likely to help."""


def diagnose(config: Mapping[str, Any], rounds: Sequence[Mapping[str, Any]]) -> list[RunWarning]:
    """What a reader must know before the figures of a run; `config` is its run.json."""
    collapse = _exploded(config, rounds) or _whole_run_at_chance(config, rounds)
    found = [collapse] if collapse else [*_sites_at_chance(config, rounds)]
    lost = _clients_lost(config, rounds)
    return [*found, lost] if lost and not collapse else found


def divergence(config: Mapping[str, Any], rounds: Sequence[Mapping[str, Any]], round: int, what: str) -> RunWarning:
    """The warning of a run that could not go on."""
    first = _first_above_chance(config, rounds)
    so_far = "" if first else "; accuracy had not been above chance before" if rounds else ""
    return {
        "kind": "diverged",
        "round": round,
        "text": f"{_name(config)} diverged in round {round}: {what}{so_far}.",
        "advice": _lower_rate(config),
    }


def with_kept_round(warnings: Iterable[RunWarning], best: BestRound | None, has_model: bool) -> list[RunWarning]:
    """The warnings of a run that collapsed, with what is left of it."""
    if best is None:
        return list(warnings)
    judged = "the clients' validation images" if best.by == "validation" else "training loss"
    where = f"{BEST_MODEL}, " if has_model else ""
    kept = f"Round {best.round}, the best by {judged}, is kept ({where}--model-of best)."
    return [{**each, "advice": f"{each['advice']} {kept}"} if each["kind"] in COLLAPSES else each for each in warnings]


def line_of(warning: RunWarning) -> str:
    """A warning as one line."""
    return f"{warning['text']} {warning['advice']}"


def _exploded(config: Mapping[str, Any], rounds: Sequence[Mapping[str, Any]]) -> RunWarning | None:
    losses = {line["round"]: _loss(line) for line in rounds if _loss(line) is not None}
    finite = [loss for loss in losses.values() if loss is not None and math.isfinite(loss)]
    if not losses:
        return None
    guessing = math.log(len(config["data"]["classes"]))
    start = max(finite[0] if finite else 0.0, guessing)
    number = next((number for number, loss in losses.items() if loss is not None and loss > _TIMES * start), None)
    last = list(losses.values())[-1]
    if number is None or last is None or last < max(finite[0] if finite else 0.0, _BELOW_GUESSING * guessing):
        return None
    loss = losses[number]
    became = f"rose to {loss:.3g}" if loss is not None and math.isfinite(loss) else "became non-finite"
    since = _at_chance_since(config, rounds)
    then = f", and accuracy has been at chance since round {since}" if since is not None else ""
    return {
        "kind": "loss_exploded",
        "round": number,
        "text": f"The training loss of {_name(config)} {became} in round {number} (round 1: {_first(finite)}){then}.",
        "advice": _lower_rate(config),
    }


def _first(losses: Sequence[float]) -> str:
    return f"{losses[0]:.3g}" if losses else "also not finite"


def _whole_run_at_chance(config: Mapping[str, Any], rounds: Sequence[Mapping[str, Any]]) -> RunWarning | None:
    since = _at_chance_since(config, rounds)
    if since is None:
        return None
    view = _main_view(config, rounds)
    chance = percent(config["chance"][view]["average"])
    before = _first_above_chance(config, rounds)
    if before is None:
        accuracy, last = percent(_scored(rounds, view)[-1][1]["average"]), rounds[-1]["round"]
        when = f"rounds {since} to {last}" if since < last else f"round {last}"
        return {
            "kind": "never_above_chance",
            "round": since,
            "text": f"{_name(config)} is no better than chance: accuracy never rose above {chance} % in {when} "
            f"(last: {accuracy} %).",
            "advice": _nothing_learned(config, rounds),
        }
    best = max(values["average"] for _, values in _scored(rounds, view))
    return {
        "kind": "fell_to_chance",
        "round": since,
        "text": f"{_name(config)} collapsed: accuracy fell to chance, {chance} %, in round {since} and stayed there; "
        f"it had reached {percent(best)} %.",
        "advice": _lower_rate(config),
    }


def _sites_at_chance(config: Mapping[str, Any], rounds: Sequence[Mapping[str, Any]]) -> Iterable[RunWarning]:
    """Domains or clients on which the model is no better than chance, while it is on average."""
    view = _main_view(config, rounds)
    if view is None:
        return
    scored = _scored(rounds, view)[-_STAYS:]
    chance = config["chance"][view]
    sites = [part for part in chance if part not in _NOT_SITES and part not in config["partition"]["held_out"]]
    # Nothing is better than always saying the only class of a test set.
    told = [site for site in sites if chance[site] is not None and chance[site] < 1]
    bad = [site for site in told if _stays_at_chance(scored, site, chance[site])]
    if not bad or len(sites) < 2:
        return
    named = ", ".join(f"{site} (chance {percent(chance[site])} %)" for site in bad[:_MOST_NAMES])
    more = f" and {len(bad) - _MOST_NAMES} more" if len(bad) > _MOST_NAMES else ""
    yield {
        "kind": "site_at_chance",
        "round": scored[0][0],
        "text": f"{_name(config)} is no better than chance on {named}{more}.",
        "advice": f"Check the labels and images there, {_for_one_site(config, rounds)}.",
    }


def _for_one_site(config: Mapping[str, Any], rounds: Sequence[Mapping[str, Any]]) -> str:
    if not _trains(rounds):
        return "or try --weights of another backbone, or a method that trains, such as fedavg"
    if config["method"]["kind"] != "global":
        return "or train for more rounds"
    return f"train for more rounds, {_changed_colours(config)}or try a method with local parts such as fedbn"


def _changed_colours(config: Mapping[str, Any]) -> str:
    """What makes networks from scratch bear averaged batch statistics of sites whose images look different."""
    data, start = config["data"], config.get("model", {}).get("start") or {"from": "none"}
    augment = data.get("augment", "none")
    if start["from"] != "none" or "jitter" in augment or data.get("image_shape", (0,))[0] != _COLOURS:
        return ""
    steps = ["jitter", "grey"] if augment == "none" else [augment, "jitter", "grey"]
    return f"change colours in training if sites look different (--set data.augment={','.join(steps)}), "


def _clients_lost(config: Mapping[str, Any], rounds: Sequence[Mapping[str, Any]]) -> RunWarning | None:
    """Clients whose weights were not finite, while others went on."""
    lost = [(line["round"], event["client"]) for line in rounds for event in line["events"] if event.get("not_finite")]
    if not lost:
        return None
    clients = sorted({client for _, client in lost})
    named = ", ".join(clients[:_MOST_NAMES]) + (", ..." if len(clients) > _MOST_NAMES else "")
    times = len({number for number, _ in lost})
    return {
        "kind": "clients_lost",
        "round": lost[0][0],
        "text": f"{_name(config)} continued without {named} in {times} of {len(rounds)} rounds, from round "
        f"{lost[0][0]} on: their weights were not finite.",
        "advice": _lower_rate(config),
    }


def _lower_rate(config: Mapping[str, Any]) -> str:
    rate = config["plan"]["lr"]
    return f"The learning rate ({rate:g}) is likely too high: try --lr {rate / 10:g}."


def _nothing_learned(config: Mapping[str, Any], rounds: Sequence[Mapping[str, Any]]) -> str:
    """A loss above that of guessing tells of large steps, one that has hardly moved of too small or too few ones."""
    if (config.get("guard") or {}).get("noise"):
        return "The noise of --guard may drown out what clients learn: try less noise, more clients or more rounds."
    if not _trains(rounds):
        return (
            "It trains nothing, so features have to tell the classes apart as they are: try --weights of a backbone "
            "that has seen such images, or a method that trains, such as fedavg."
        )
    guessing = math.log(len(config["data"]["classes"]))
    last = next((loss for line in reversed(rounds) if (loss := _loss(line)) is not None), None)
    if last is not None and last > 1.01 * guessing:
        return _lower_rate(config)
    averages = config["method"]["kind"] == "global" and len(config["partition"]["clients"]) > 1
    if last is not None and last < _BELOW_GUESSING * guessing and averages:
        return (
            f"Clients learn (loss {last:.2g}, guessing has {guessing:.2g}), but their averaged model does not: "
            f"{_changed_colours(config)}train fewer epochs between exchanges, or try a method with local parts such as "
            "fedbn."
        )
    rate = config["plan"]["lr"]
    return f"Try more rounds or epochs, --lr {rate * 10:g} or --lr {rate / 10:g} (now {rate:g}), or --optimizer adam."


def _at_chance_since(config: Mapping[str, Any], rounds: Sequence[Mapping[str, Any]]) -> int | None:
    """The round since which the average is no better than chance; None where it is, or has not been for long."""
    view = _main_view(config, rounds)
    if view is None:
        return None
    chance = config["chance"][view]["average"]
    scored = _scored(rounds, view)
    since: int | None = None
    length = 0
    for number, values in scored:
        if values["average"] is not None and at_chance(values["average"], chance):
            since, length = since or number, length + 1
        else:
            since, length = None, 0
    return since if length >= min(_STAYS, len(scored)) else None


def _first_above_chance(config: Mapping[str, Any], rounds: Sequence[Mapping[str, Any]]) -> int | None:
    view = _main_view(config, rounds)
    if view is None:
        return None
    chance = config["chance"][view]["average"]
    above = (number for number, values in _scored(rounds, view) if not at_chance(values["average"] or 0.0, chance))
    return next(above, None)


def _stays_at_chance(scored: Sequence[tuple[int, Mapping[str, Any]]], part: str, chance: float) -> bool:
    known = [values[part] for _, values in scored if values.get(part) is not None]
    return bool(known) and all(at_chance(value, chance) for value in known)


def _main_view(config: Mapping[str, Any], rounds: Sequence[Mapping[str, Any]]) -> str | None:
    """The view a run is judged by: that of the server's model where there is one."""
    accuracies = [line["accuracy"] for line in rounds if line["accuracy"] is not None]
    for view in ("global", "personal"):
        known = (config.get("chance") or {}).get(view)
        if accuracies and accuracies[-1][view] is not None and known and known["average"] is not None:
            return view
    return None


def _scored(rounds: Sequence[Mapping[str, Any]], view: str | None) -> list[tuple[int, Mapping[str, Any]]]:
    return [
        (line["round"], line["accuracy"][view])
        for line in rounds
        if line["accuracy"] is not None and line["accuracy"][view] is not None
    ]


def _trains(rounds: Sequence[Mapping[str, Any]]) -> bool:
    """Whether clients took steps; a head that was computed has no loss."""
    return any(line["loss_parts"] for line in rounds)


def _loss(line: Mapping[str, Any]) -> float | None:
    """The loss that is shown, infinite where it was not finite; None where none was reported."""
    if not line["loss_parts"]:
        return None
    if any(part is None for part in line["loss_parts"].values()):
        return math.inf
    return shown_loss(line)


def _name(config: Mapping[str, Any]) -> str:
    return str(config["method"]["name"])

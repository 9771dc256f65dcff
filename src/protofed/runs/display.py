"""A run as Python shows it: one line, a table with a row per round, curves."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from protofed.errors import UserError, unknown_name
from protofed.federation.best import shown_loss
from protofed.pages.drawing import Drawing, line_chart
from protofed.pages.notebook import notebook_html
from protofed.runs.figures import figures_of
from protofed.text import Table, percent, size

if TYPE_CHECKING:
    from protofed.runs.opened import Run

What = Literal["accuracy", "loss", "bytes"]
"""What can be drawn over the rounds."""

_WHAT = ("accuracy", "loss", "bytes")
_NOT_DRAWN = ("held_out", "quantiles", "pooled")
_MOST_LINES = 12
_VIEWS = {"global": "global model", "personal": "clients' models"}


def run_line(run: "Run") -> str:
    """What it is and how far it is."""
    try:
        config, rounds = run.config, run.rounds
        text = f"{config['method']['name']} on {config['data']['name']}, {len(rounds)} of {run.planned_rounds} rounds"
    except UserError:
        return "nothing to read yet"
    view, accuracy = _last_accuracy(rounds)
    return text if accuracy is None else f"{text}, {percent(accuracy['average'])} % ({_VIEWS[view]})"


def run_rows(run: "Run") -> list[dict[str, Any]]:
    """A row per round with all its figures, such as `accuracy.global.mnist` and `bytes.up.total`."""
    return [{"round": record["round"], **figures_of(record)} for record in run.rounds]


def draw_run(run: "Run", what: What = "accuracy") -> Drawing:
    """Accuracy of every domain or client, the loss, or the bytes sent so far, round by round."""
    if what not in _WHAT:
        raise unknown_name("chart", what, _WHAT)
    rounds = run.rounds
    title = f"{run.config['method']['name']} on {run.config['data']['name']}"
    if what == "loss":
        losses = [(record["round"], value) for record in rounds if (value := shown_loss(record)) is not None]
        return line_chart(f"{title}: training loss (cross-entropy)", "round", {"loss": losses}, percent=False)
    if what == "bytes":
        return line_chart(f"{title}: bytes sent so far", "round", _sent(rounds), percent=False)
    view, last = _last_accuracy(rounds)
    names = [name for name in last or {} if name not in _NOT_DRAWN]
    names = names if len(names) <= _MOST_LINES else ["average"]
    lines = {
        name: [
            (record["round"], value)
            for record in rounds
            if record["accuracy"] and (value := (record["accuracy"][view] or {}).get(name)) is not None
        ]
        for name in names
    }
    return line_chart(f"{title}: accuracy of the {_VIEWS[view]} (%)", "round", lines)


def run_html(run: "Run") -> str:
    """The newest accuracies, what was sent, and the curves."""
    line = run_line(run)
    if not run.begun or not run.rounds:
        return notebook_html(line, [])
    view, accuracy = _last_accuracy(run.rounds)
    shown = {name: value for name, value in (accuracy or {}).items() if not isinstance(value, Mapping)}
    sent = {way: size(values[-1][1]) for way, values in _sent(run.rounds).items()}
    tables = [
        Table(f"The {_VIEWS[view]} (%)", ["", *shown], [["accuracy", *map(percent, shown.values())]] if shown else []),
        Table("Until now", ["", *sent], [["sent", *sent.values()]]),
    ]
    return notebook_html(line, tables, draw_run(run) if accuracy else None)


def _last_accuracy(rounds: list[dict[str, Any]]) -> tuple[str, dict[str, Any] | None]:
    """The view that a reader wants first, and its newest figures."""
    for record in reversed(rounds):
        for view in _VIEWS:
            if record["accuracy"] and record["accuracy"].get(view):
                return view, record["accuracy"][view]
    return "global", None


def _sent(rounds: list[dict[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """Bytes up and down until every round."""
    lines: dict[str, list[tuple[float, float]]] = {"up": [], "down": []}
    for way, line in lines.items():
        total = 0
        for record in rounds:
            total += record["bytes"][way]["total"]
            line.append((record["round"], float(total)))
    return lines

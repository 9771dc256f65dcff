"""What a person sees: progress while a run goes on, tables when it is done. Plain text where there is no terminal."""

import json
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table as RichTable

from protofed.cli.metric_tables import fairness_lines, run_tables
from protofed.federation.best import shown_loss
from protofed.federation.chance import at_chance
from protofed.guards import promise_in_words
from protofed.runs import Run
from protofed.runs.config_file import KeepsConfig
from protofed.studies.schedule import Failure
from protofed.text import Table, counted, duration
from protofed.text import percent as percent
from protofed.text import size as size

T = TypeVar("T")

_PLAIN_WIDTH = 160
_LONG = 60.0
"""Seconds after which a person wants to have been told."""
WENT_WRONG = 3
"""Exit code where what came out is not to be trusted."""
_SHOWN_DIFFERENCE = 5e-4
"""Between two losses that are printed with three digits."""
_MOST_ROWS, _MOST_COLUMNS = 20, 12


def console() -> Console:
    """Standard output; wide where it is not a terminal, so that tables do not wrap."""
    return Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH, highlight=False)


def show_table(table: Table) -> None:
    """One table, with its title above."""
    shown = RichTable()
    for index, column in enumerate(table.columns):
        shown.add_column(column, justify="right" if table.numeric and index else "left", no_wrap=not index)
    for row in table.rows:
        shown.add_row(*row)
    # A title inside the table would be broken to the table's width.
    console().print(table.title)
    console().print(shown)


def show_or_dump(content: T, as_json: bool, show: Callable[[T], None]) -> None:
    """Content as one line of JSON for machines, or shown to a person."""
    if as_json:
        print(json.dumps(content))
    else:
        show(content)


def _show_partition(config: dict[str, Any]) -> None:
    """Who holds what, where that fits on a screen."""
    clients, classes = config["partition"]["clients"], config["data"]["classes"]
    columns = ["client", "train", *(classes if len(classes) <= _MOST_COLUMNS else [])]
    rows = [
        [client, str(entry["train"]), *map(str, entry["per_class"][: len(columns) - 2])]
        for client, entry in list(clients.items())[:_MOST_ROWS]
    ]
    more = f", the first {_MOST_ROWS} of {len(clients)}" if len(clients) > _MOST_ROWS else ""
    title = f"Training images of each client by class ({config['partition']['protocol']}{more})"
    show_table(Table(title, columns, rows))


def bars(auto_refresh: bool = True) -> Progress:
    """Bars with a title, how far they are, a status and the time left."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[status]}"),
        TimeRemainingColumn(compact=True),
        console=Console(highlight=False),
        auto_refresh=auto_refresh,
    )


class ProgressBar:
    """Callback: a bar on a terminal, a line per round elsewhere."""

    def __init__(self) -> None:
        self._bar: Progress | None = None
        self._bytes = 0

    def run_estimate(self, run: Run, seconds: float) -> None:
        """Before long work."""
        warn_of_time(seconds)

    def run_start(self, run: Run, rounds_done: int) -> None:
        """Show where the run begins."""
        config = run.config
        self._rounds = len(config["plan"]["epochs"])
        title = f"{config['method']['name']} on {config['data']['name']}"
        _show_partition(config)
        if (config["model"].get("start") or {}).get("reason"):
            print(config["model"]["start"]["reason"], flush=True)
        if config["data"]["augment"] != "none" and "data.augment" not in config["options"]["set"]:
            augment = config["data"]["augment"]
            print(f"training images are augmented by {augment}; --set data.augment=none turns this off", flush=True)
        if wanted := config["method"].get("run_defaults"):
            named = ", ".join(f"{name} {value}" for name, value in wanted.items())
            print(f"{config['method']['name']} trains with {named}, its own default", flush=True)
        self._bytes = sum(_exchanged(record) for record in run.rounds)
        if sys.stdout.isatty():
            self._bar = bars()
            self._task = self._bar.add_task(title, total=self._rounds, completed=rounds_done, status="")
            self._bar.start()
        else:
            clients = counted(len(config["partition"]["clients"]), "client")
            print(f"{title}: {counted(self._rounds, 'round')}, {clients}", flush=True)

    def round_end(self, run: Run, record: dict[str, Any]) -> None:
        """Loss, average accuracy and bytes so far."""
        self._bytes += _exchanged(record)
        status = f"{progress_of(record)}{_chance_reached(run, record)}  sent {size(self._bytes)}"
        if self._bar is not None:
            self._bar.update(self._task, advance=1, status=status)
        else:
            seconds = record["seconds"]["total"]
            print(f"  round {record['round']}/{self._rounds}  {status}  {seconds:.1f} s", flush=True)

    def run_end(self, run: Run) -> None:
        """Leave the terminal as it was."""
        self.stop()

    def stop(self) -> None:
        """Also when the run was interrupted."""
        if self._bar is not None:
            with suppress(Exception):
                self._bar.stop()
            self._bar = None


def show_summary(run: Run) -> None:
    """The final tables of a run."""
    summary = run.summary
    method, accuracy = summary["method"], summary["accuracy"] or {"global": None, "personal": None}
    chance = summary.get("chance") or {"global": None, "personal": None}
    if accuracy["global"] is not None:
        view = {key: value for key, value in accuracy["global"].items() if key != "held_out"}
        title = f"{method}: accuracy of the global model per domain (%), mean of the last rounds"
        rows = [["accuracy", *(percent(value) for value in view.values())]]
        if chance["global"] is not None:
            rows.append(["chance", *(percent(chance["global"].get(part)) for part in view)])
        show_table(Table(title, ["", *view], rows))
    # The personal view of a global model would say the same again.
    if accuracy["personal"] is not None and (accuracy["global"] is None or run.config["method"]["kind"] != "global"):
        guessed = chance["personal"] or {}
        rows = [
            [client, percent(value), percent(guessed.get(client))]
            for client, value in accuracy["personal"].items()
            if client != "quantiles"
        ]
        title = f"{method}: accuracy of each client's model (%), {run.config['personal_test']}"
        show_table(Table(title, ["client", "accuracy", "chance"], rows))
    if chance["global"] or chance["personal"]:
        console().print(
            "chance: always predicting a test set's most frequent class; guessing uniformly: "
            f"{percent(chance['uniform'])} %"
        )
    for table in run_tables(run):
        show_table(table)
    for line in fairness_lines(run):
        console().print(line)
    if best := summary.get("best"):
        judged = f"validation accuracy {percent(best['score'])} %" if best["by"] == "validation" else "training loss"
        console().print(f"best round: {best['round']}, by {judged}; use it with --model-of best")
    if summary["status"] == "flat":
        console().print(f"stopped after {summary['rounds']} of {run.planned_rounds} rounds: no further improvement")
    total = {way: size(summary["bytes"][way]["total"]) for way in ("up", "down")}
    console().print(
        f"{counted(summary['rounds'], 'round')} in {summary['seconds']['total']:.1f} s, sent {total['up']} up and "
        f"{total['down']} down; written to {run.path}"
    )
    if "privacy" in summary:
        console().print(promise_in_words(summary["privacy"]))


def exit_code(run: Run, strict: bool = False) -> int:
    """3 where the rounds that were asked for could not be done, or where --strict minds a warning about the outcome."""
    summary = run.summary
    return WENT_WRONG if summary["status"] == "diverged" or (strict and summary["warnings"]) else 0


def report_failures(failures: Sequence[Failure]) -> int:
    """Say which runs of a study failed, after everything else; the exit code."""
    for failure in failures:
        if failure.trace:
            print(failure.trace, file=sys.stderr)
    for failure in failures:
        print(f"error: {failure.title}: {' '.join(failure.reason.split())}", file=sys.stderr)
    return 1 if failures else 0


def followers(progress: object, silent: bool, trackers: Iterable[str] = (), config: Path | None = None) -> list[object]:
    """The callbacks of a command: what a person sees, trackers of experiments by name, and who keeps the file given."""
    from protofed.runs.trackers import make_tracker

    watching = [] if silent else [progress]
    keeping = [] if config is None else [KeepsConfig(config)]
    return [*watching, *keeping, *(make_tracker(name) for name in dict.fromkeys(trackers))]


def warn_of_time(seconds: float) -> None:
    """How long it will take, where that is worth knowing."""
    if seconds > _LONG:
        print(f"this takes about {duration(seconds)} here, estimated from one batch; Ctrl-C keeps what can be resumed")


def _exchanged(record: dict[str, Any]) -> int:
    return int(record["bytes"]["up"]["total"] + record["bytes"]["down"]["total"])


def _chance_reached(run: Run, record: dict[str, Any]) -> str:
    """A remark where the average accuracy of a round is no better than chance."""
    for view in ("global", "personal"):
        parts = (record["accuracy"] or {}).get(view)
        if parts is not None:
            chance = (run.config.get("chance") or {}).get(view)
            return " (chance)" if chance and at_chance(parts["average"], chance["average"]) else ""
    return ""


def progress_of(record: dict[str, Any]) -> str:
    """Loss and average accuracy of a round, where it was evaluated; all terms of the loss where there are others."""
    loss, total = shown_loss(record), record["train_loss"]
    text = f"loss {'-' if loss is None else format(loss, '.3f')}"
    if loss is not None and total is not None and abs(total - loss) >= _SHOWN_DIFFERENCE:
        text += f" ({total:.3f} with all terms)"
    views = record["accuracy"]
    view = None if views is None else views["global"] or views["personal"]
    return text if view is None else f"{text}  accuracy {percent(view['average'])} %"

"""What a person sees: progress while a run goes on, tables when it is done. Plain text where there is no terminal."""

import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from protofed.experiments import Run

_PLAIN_WIDTH = 160


def console() -> Console:
    """Standard output; wide where it is not a terminal, so that tables do not wrap."""
    return Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH, highlight=False)


def show_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], figures: bool = True) -> None:
    """One table; with figures all columns but the first are set to the right."""
    table = Table()
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if figures and index else "left")
    for row in rows:
        table.add_row(*row)
    # A title inside the table would be broken to the table's width.
    console().print(title)
    console().print(table)


def percent(value: float | None) -> str:
    """An accuracy as people read it."""
    return "-" if value is None else f"{100 * value:.2f}"


def size(count: float) -> str:
    """Bytes in decimal units, as communication costs are given in papers."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


class ProgressBar:
    """Callback: a bar on a terminal, a line per round elsewhere; one after the other where several runs follow."""

    def __init__(self, show_seed: bool = False) -> None:
        self._show_seed = show_seed
        self._bar: Progress | None = None
        self._bytes = 0

    def run_start(self, run: Run, rounds_done: int) -> None:
        """Show where the run begins."""
        config = run.config
        self._rounds = len(config["plan"]["epochs"])
        title = f"{config['method']['name']} on {config['data']['name']}"
        if self._show_seed:
            title += f", seed {config['seed']}"
        self._bytes = sum(_exchanged(record) for record in run.rounds)
        if sys.stdout.isatty():
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[status]}"),
                TimeRemainingColumn(compact=True),
                console=Console(highlight=False),
            )
            self._task = self._bar.add_task(title, total=self._rounds, completed=rounds_done, status="")
            self._bar.start()
        else:
            print(f"{title}: {self._rounds} rounds, {len(config['partition']['clients'])} clients", flush=True)

    def round_end(self, run: Run, record: dict[str, Any]) -> None:
        """Loss, average accuracy and bytes so far."""
        self._bytes += _exchanged(record)
        loss = record["train_loss"]
        status = f"loss {'-' if loss is None else format(loss, '.3f')}{_accuracy(record)}  sent {size(self._bytes)}"
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
    accuracy = summary["accuracy"]
    shown = False
    if accuracy["global"] is not None:
        view = {key: value for key, value in accuracy["global"].items() if key != "held_out"}
        show_table(
            f"{summary['method']}: accuracy of the global model per domain (%), mean of the last rounds",
            list(view),
            [[percent(value) for value in view.values()]],
        )
        shown = True
    personal = accuracy["personal"]
    if personal is not None and (not shown or run.config["method"]["kind"] != "global"):
        rows = [[client, percent(value)] for client, value in personal.items() if client != "quantiles"]
        show_table(
            f"{summary['method']}: accuracy of each client's model (%), {run.config['personal_test']}",
            ["client", "accuracy"],
            rows,
        )
    total = {way: size(summary["bytes"][way]["total"]) for way in ("up", "down")}
    console().print(
        f"{summary['rounds']} rounds in {summary['seconds']['total']:.1f} s, sent {total['up']} up and "
        f"{total['down']} down; written to {run.path}"
    )


def _exchanged(record: dict[str, Any]) -> int:
    return int(record["bytes"]["up"]["total"] + record["bytes"]["down"]["total"])


def _accuracy(record: dict[str, Any]) -> str:
    views = record["accuracy"]
    if views is None:
        return ""
    view = views["global"] or views["personal"]
    return "" if view is None else f"  accuracy {percent(view['average'])} %"

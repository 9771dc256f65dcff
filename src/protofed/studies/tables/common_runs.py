"""Runs that tables have in common, such as FedAvg on the same clients: made for one, entered in the files of all.

`reproduce` makes such runs once if it makes the tables together. Results files of tables that were made apart, on other
days or machines, are completed here.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from protofed.studies.tables.fixtures import row_options, run_key
from protofed.studies.tables.preset import Preset, PublishedRow, find_preset, preset_names
from protofed.studies.tables.results import (
    ResultsContent,
    RowRecord,
    RunRecord,
    own_settings,
    read_results,
    save_results,
)


@dataclass(frozen=True)
class _Cell:
    """Where a table has runs of one kind: a row under a condition. They differ in their seed."""

    row: PublishedRow
    condition: str
    key: str
    """The same wherever a table has such runs on the same images."""


def enter_common_runs(folder: Path) -> dict[str, int]:
    """Give every file of a folder the runs that others have of its rows, for the seeds it has; how many, by file.

    A run that a file has of its own is kept.
    """
    files = {path.stem: read_results(path) for path in sorted(folder.glob("*.json"))}
    cells = {name: list(_cells(content)) for name, content in files.items()}
    known: dict[tuple[str, int], RunRecord] = {}
    for name, content in files.items():
        for cell in cells[name]:
            for run in _runs_of(content, cell):
                before = known.get((cell.key, run["seed"]))
                untimed = before is None or before["cpu_seconds"] is None  # those of earlier versions are
                if untimed and "made_for" not in run:
                    known[cell.key, run["seed"]] = {**run, "made_for": name}
    entered = {}
    for name in filter(cells.get, files):
        content = files[name]
        completed = _completed(content, cells[name], known)
        if more := len(completed["runs"]) - len(content["runs"]):
            save_results(completed, folder)
            entered[name] = more
    return entered


def _cells(content: ResultsContent) -> Iterator[_Cell]:
    """Of a table of accuracies as its preset has it today; nothing where it has been changed since."""
    if content["preset"] not in preset_names():
        return
    preset, dataset, scale = find_preset(content["preset"]), content["dataset"], content["scale"]
    if preset.kind != "accuracy" or preset.draw is not None or not content.get("images"):
        return
    conditions = preset.conditions(dataset, scale)
    for row in preset.rows_at(scale):
        recorded = content["rows"].get(row.title)
        if recorded is None or recorded["settings"] == own_settings(row, scale):
            for condition in content["conditions"] or [""]:
                options = row_options(preset, row, dataset, scale, content["options"], conditions[condition])
                yield _Cell(row, condition, f"{run_key(options)} {content['images']} {preset.value}")


def _runs_of(content: ResultsContent, cell: _Cell) -> list[RunRecord]:
    return [run for run in content["runs"] if (run["row"], run["condition"]) == (cell.row.title, cell.condition)]


def _seeds_of(content: ResultsContent, cell: _Cell) -> set[int]:
    return {run["seed"] for run in _runs_of(content, cell)}


def _completed(
    content: ResultsContent, cells: list[_Cell], known: Mapping[tuple[str, int], RunRecord]
) -> ResultsContent:
    """With the runs that complete a row for one of its seeds, rows in the order of the table."""
    preset, scale = find_preset(content["preset"]), content["scale"]
    seeds = sorted({run["seed"] for run in content["runs"]})
    rows, runs = dict(content["rows"]), list(content["runs"])
    for row, seed in product(preset.rows_at(scale), seeds):
        lacking = [cell for cell in cells if cell.row == row and seed not in _seeds_of(content, cell)]
        if all((cell.key, seed) in known for cell in lacking):
            for cell in lacking:
                run = known[cell.key, seed]
                runs.append({**run, "row": row.title, "condition": cell.condition})
                rows.setdefault(row.title, _row_record(preset, row, content, run))
    order = [row.title for row in preset.rows_at(scale) if row.title in rows]
    return {**content, "rows": {title: rows[title] for title in order}, "runs": runs}


def _row_record(preset: Preset, row: PublishedRow, content: ResultsContent, run: RunRecord) -> RowRecord:
    """Of a row of which the file had nothing."""
    view = row.view if row.view and row.view in run["accuracy"] else preset.views[0]
    paper = preset.published(row, content["dataset"], content["scale"], view, content["conditions"])
    return {"method": row.method, "settings": own_settings(row, content["scale"]), "paper": paper}

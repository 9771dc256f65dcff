"""The papers' tables that take no training: numbers of parameters, bytes of messages, who holds what."""

from collections.abc import Mapping
from typing import Any

from protofed.data import load
from protofed.runs.options import make_options
from protofed.studies.schema import ComputedBlock, Scale
from protofed.studies.tables.fixtures import fixture, partition_of
from protofed.studies.tables.preset import Preset, PublishedRow
from protofed.studies.tables.traffic import traffic


def compute(
    preset: Preset, scale: Scale, dataset: str, rows: list[PublishedRow], overrides: Mapping[str, Any]
) -> ComputedBlock:
    """One data set of a table."""
    tables = {"parameters": _shared_parameters, "traffic": communication, "partition": _partition_table}
    return tables[preset.kind](preset, scale, dataset, rows, overrides)


def _shared_parameters(
    preset: Preset, scale: Scale, dataset: str, rows: list[PublishedRow], overrides: Mapping[str, Any]
) -> ComputedBlock:
    """Numbers that a client which holds every class sends in a round, without sample counts and headers."""

    def count(row: PublishedRow) -> int:
        with fixture(preset, row, dataset, scale, {**overrides, "rounds": 1}) as ready:
            sent = traffic(ready.assembly, {next(iter(ready.sizes)): 1}).up
        return (sent.weights + sent.prototypes + sent.features) // 4

    columns = ["method", "parameters", "paper"]
    return {"columns": columns, "rows": [[row.title, count(row), _paper_figure(row, dataset, 0)] for row in rows]}


def communication(
    preset: Preset, scale: Scale, dataset: str, rows: list[PublishedRow], overrides: Mapping[str, Any]
) -> ComputedBlock:
    """Gigabytes of all messages of a run: as the paper counts, and every byte."""

    def cells(row: PublishedRow) -> list[Any]:
        with fixture(preset, row, dataset, scale, overrides) as ready:
            sent = traffic(ready.assembly, ready.sizes)
            rounds = ready.assembly.context.plan.rounds
        counted = sum(way.weights + way.features for way in (sent.up, sent.down)) / 1e9
        exact = (sent.up.total + sent.down.total) / 1e9
        printed = [_paper_figure(row, dataset, preset.columns.index(column)) for column in ("GB", "accuracy")]
        return [row.title, rounds, round(counted, 3), round(exact, 3), *printed]

    columns = ["method", "rounds", "GB as the paper counts", "GB exactly", "paper", "paper's accuracy in %"]
    return {"columns": columns, "rows": [cells(row) for row in rows]}


def _partition_table(
    preset: Preset, scale: Scale, dataset: str, _rows: list[PublishedRow], overrides: Mapping[str, Any]
) -> ComputedBlock:
    """Who holds how many images of each class."""
    options = make_options(preset.run_options(dataset, scale, overrides))
    data = load(options.data, data_root=options.data_root, domains=options.domains, labels=options.labels)
    rows = partition_of(data, options, holdout=0).rows(data.pooled_labels(), data.classes)
    columns = ["client", "train", *data.classes]
    return {"columns": columns, "rows": [[row[column] for column in columns] for row in rows]}


def _paper_figure(row: PublishedRow, dataset: str, column: int) -> float | None:
    figures = row.figures.get(dataset, [])
    return figures[column] if column < len(figures) else None

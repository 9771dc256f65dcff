"""Several tables at once, as far as their images are at hand: which, and what they take."""

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from protofed.data.catalog import available
from protofed.errors import unknown_name
from protofed.runs.assembly import method_of
from protofed.runs.options import Options
from protofed.studies.schema import Scale
from protofed.studies.tables.estimate import ImageCost, cost_key, measured_cost
from protofed.studies.tables.fixtures import real_partition, row_options, run_key, training_sizes
from protofed.studies.tables.preset import Preset, PublishedRow, find_preset, preset_names
from protofed.studies.tables.reproduce import checked_overrides
from protofed.system import cores, one_thread
from protofed.text import split_names

_ALL = "ALL"


@dataclass(frozen=True)
class TableAtHand:
    """A table with those of its data sets and rows that can be run here."""

    preset: Preset
    scale: Scale
    datasets: list[str]
    rows: list[PublishedRow]


@dataclass(frozen=True)
class WholeEstimate:
    """What all tables take together, each run counted once however many tables have it."""

    runs: int
    hours: float


def names_several(text: str) -> bool:
    """Whether a user means more than one table: `ALL`, `a,b` or `i2pfl.table*`."""
    return text == _ALL or "," in text or "*" in text


def tables_at_hand(
    names: str,
    scale: Scale,
    data_root: str | None,
    datasets: Sequence[str] | None = None,
    methods: Sequence[str] | None = None,
) -> tuple[list[TableAtHand], list[str]]:
    """Those of the tables that are trained and whose images are there; and a line for everything that is left out.

    `datasets` and `methods` choose some, by the names that any table has for them.
    """
    known = {info.name: set(info.domains) for info in available(data_root)}
    presets = [preset for name in _expanded(names) if (preset := find_preset(name)).trains]
    _refuse_unknown("data set", datasets, {name for preset in presets for name in preset.datasets})
    rows = [row for preset in presets for row in preset.rows_at(scale)]
    _refuse_unknown("method", methods, {name for row in rows for name in (row.title, row.method)})
    found, left_out = [], []
    for preset in presets:
        wanted = [name for name in preset.datasets if not datasets or name in datasets]
        lacking = {name: _lacking(preset, name, scale, known) for name in wanted}
        left_out += [f"{preset.name}, {name}: {why}" for name, why in lacking.items() if why]
        there = [name for name in wanted if not lacking[name]]
        names_here = {name for row in preset.rows_at(scale) for name in (row.title, row.method)}
        wanted_here = None if methods is None else [name for name in methods if name in names_here]
        chosen = [] if wanted_here == [] else preset.selected_rows(wanted_here, scale)
        if there and chosen:
            found.append(TableAtHand(preset, scale, there, chosen))
    return found, left_out


def estimate_all(
    tables: Sequence[TableAtHand],
    seeds: Sequence[int] | None,
    tried: Callable[[int, int], None] | None = None,
    **options: Any,
) -> WholeEstimate:
    """From one batch of every kind of run on generated images; `tried` is told how many there were, and of how many."""
    overrides = checked_overrides(options)
    rows = [_RowAtHand(table, dataset, row) for table in tables for dataset in table.datasets for row in table.rows]
    costs = _measured_costs(rows, overrides, tried)
    seconds: dict[str, float] = {}
    shared: dict[tuple[str, int], float] = {}
    for each in rows:
        preset, scale, dataset = each.table.preset, each.table.scale, each.dataset
        declared, first = preset.images(dataset, scale), each.options(overrides)
        cost = costs[each.cost_key(overrides)]
        sizes = training_sizes(real_partition(preset, dataset, scale, first), first.method)
        plan = method_of(first).plan(first.training_plan())
        spent = cost.of_run(plan, first, sizes, declared.test_images)
        shared[declared.data or dataset, cost.frozen] = cost.of_extraction(sizes, declared.test_images)
        for condition in preset.conditions(dataset, scale).values():
            key = run_key(each.options(overrides, condition))
            seconds |= {f"{key}/{seed}": spent for seed in (preset.seeds[scale] if seeds is None else seeds)}
    hours = (sum(seconds.values()) + sum(shared.values())) / cores() / 3600
    return WholeEstimate(len(seconds), hours)


@dataclass(frozen=True)
class _RowAtHand:
    """A row of a table on one of its data sets."""

    table: TableAtHand
    dataset: str
    row: PublishedRow

    def options(self, overrides: Mapping[str, Any], condition: Mapping[str, Any] | None = None) -> Options:
        """Of its runs under a condition, which is the first unless it is given."""
        return row_options(self.table.preset, self.row, self.dataset, self.table.scale, overrides, condition)

    def cost_key(self, overrides: Mapping[str, Any]) -> str:
        """The same for rows whose runs take as long for an image."""
        return cost_key(self.table.preset, self.dataset, self.table.scale, self.options(overrides))


def _measured_costs(
    rows: Sequence[_RowAtHand], overrides: Mapping[str, Any], tried: Callable[[int, int], None] | None
) -> dict[str, ImageCost]:
    """By what decides them; each is measured once."""
    kinds: dict[str, _RowAtHand] = {}
    for each in rows:
        kinds.setdefault(each.cost_key(overrides), each)
    costs = {}
    with one_thread():
        for key, each in kinds.items():
            costs[key] = measured_cost(each.table.preset, each.row, each.dataset, each.table.scale, overrides)
            if tried is not None:
                tried(len(costs), len(kinds))
    return costs


def _expanded(text: str) -> list[str]:
    """The names that are meant, in the order in which they are given."""
    every = preset_names()
    found: list[str] = []
    for pattern in split_names(text) or ():
        matching = every if pattern == _ALL else fnmatch.filter(every, pattern)
        if not matching:
            raise unknown_name("table", pattern, every)
        found += [name for name in matching if name not in found]
    return found


def _refuse_unknown(what: str, names: Sequence[str] | None, known: set[str]) -> None:
    for name in names or ():
        if name not in known:
            raise unknown_name(what, name, known)


def _lacking(preset: Preset, dataset: str, scale: Scale, known: Mapping[str, set[str]]) -> str | None:
    """Why a data set cannot be run here; None where it can."""
    declared = preset.suite.data[dataset].at(scale)
    if declared is None:
        return f"it has no {scale} scale"
    name = declared.data or dataset
    if name not in known:
        return f"the data root has no {name}"
    if absent := [domain for domain in declared.images if domain not in known[name]]:
        return f"{name} lacks {', '.join(absent)}"
    return None

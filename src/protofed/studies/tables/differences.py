"""Paired differences of results files as marks of a forest plot."""

from collections.abc import Iterable, Iterator

from protofed.pages.forest_plot import Mark, Origin, Row, RowGroup
from protofed.studies.schema import Scale
from protofed.studies.statistics import PairedTest
from protofed.studies.tables.result_tables import ResultTables, difference_text

_STARTS: dict[Scale, Origin] = {"lite": "scratch", "paper": "scratch", "imagenet": "ImageNet"}


def differences(files: Iterable[ResultTables]) -> Iterator[RowGroup]:
    """Of every file its rows against the baseline, in the view that most rows have."""
    for tables in files:
        content = tables.content
        start = _STARTS[content["scale"]]
        tests = tables.differences("accuracy", tables.widest_view())
        rows = [Row(row, [measured(start, test)]) for row, test in tests.items() if test is not None]
        if rows:
            against = f"{start}, against {content['baseline']}"
            yield RowGroup(f"{content['preset']}, {content['dataset']}, {against}", rows)


def measured(start: Origin, test: PairedTest) -> Mark:
    """A difference over seeds."""
    bounds = test["interval"]
    interval = None if bounds is None else (100 * bounds[0], 100 * bounds[1])
    return Mark(start, 100 * test["difference"], interval, difference_text(test))

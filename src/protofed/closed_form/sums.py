"""Class sums, the statistics of every closed-form method, and how they are added up and taken away again."""

from dataclasses import replace
from typing import Any

import torch

from protofed.records import ClassTable, Record, Sum


class ClassSums(Record):
    """What the server adds up: n_c images of class c, and s_c, the sum of their h. With a site: means, and n_c."""

    sums: ClassTable


class ClassSumsUpload(Record):
    """One site's class means by their counts, to be added up."""

    sums: Sum[ClassTable]


def added_up(table: ClassTable) -> Sum[ClassTable]:
    """A table of means of which the server sees the sums."""
    return Sum(table, table.count.double())


def means_of(sums: ClassTable) -> ClassTable:
    """The means in a table of sums."""
    return ClassTable(sums.rows / torch.where(sums.held, sums.count, 1.0)[:, None], sums.count)


def doubled(statistics: Any) -> Any:
    """Statistics in float64, as they are added up."""
    return replace(statistics, **{name: _double(table) for name, table in vars(statistics).items()})


def _double(table: ClassTable) -> ClassTable:
    return ClassTable(table.rows.double(), table.count.double())


def subtracted(total: Any, sent: Any, sign: int = 1) -> Any:
    """Sums without what one site has sent; with it for a sign of -1."""
    return replace(total, **{name: _without(table, getattr(sent, name), sign) for name, table in vars(total).items()})


def _without(sums: ClassTable, sent: ClassTable, sign: int) -> ClassTable:
    """What is left of a count by rounding alone is nothing."""
    count = sums.count - sign * sent.count.double()
    count = torch.where(count > 1e-9 * sums.count, count, 0.0)
    rows = sums.rows - sign * sent.rows.double() * sent.count.double()[:, None]
    return ClassTable(torch.where(count[:, None] > 0, rows, 0.0), count)

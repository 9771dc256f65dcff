"""Second moments beside class sums: what ridge regression and Gaussian classifiers need of a site's features."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from protofed.closed_form.one_pass import OnePass, OnePassServer
from protofed.closed_form.sums import ClassSums, added_up
from protofed.method import At, Samples, SumSensitivity, U
from protofed.models.net import Net
from protofed.records import ClassTable, Record, Sum
from protofed.verbs import exact_class_means, pack_symmetric, second_moment, unpack_symmetric


class Moments(ClassSums):
    """Class sums, and G, the sum of h h' over all images; one row of D(D+1)/2 numbers, for it is symmetric."""

    gram: ClassTable


class MomentsServer(OnePassServer):
    """The head, the rest of the model, and both sums."""

    total: Moments


class MomentsUpload(Record):
    """One site's class means and second moment, to be added up."""

    sums: Sum[ClassTable]
    gram: Sum[ClassTable]


class SecondMoments(OnePass[U]):
    """One-pass methods whose sites also send the second moment of their features."""

    def no_statistics(self, net: Net, at: At) -> Any:
        """Of nobody."""
        table = net.empty_table()
        return Moments(table, ClassTable.empty(1, at.dim * (at.dim + 1) // 2, table.rows))

    def statistics(self, net: Net, data: Samples, at: At) -> Any:
        """n_c, m_c and G / n."""
        h, y = self.rows(net, data, at)
        return Moments(exact_class_means(h, y, at.classes), second_moment(h))

    def sum_sensitivity(self, unit: Literal["sample", "client"], bound: float, at: At) -> Mapping[str, SumSensitivity]:
        """With that of the second moment."""
        return with_second_moment(super().sum_sensitivity(unit, bound, at)["sums"], at.dim)

    def packed(self, sent: Any, net: Net, at: At) -> Any:
        """Both add up."""
        return MomentsUpload(added_up(sent.sums), added_up(sent.gram))


def with_second_moment(sums: SumSensitivity, dim: int) -> Mapping[str, SumSensitivity]:
    """Of class sums and G, each with half the budget.

    h h' has the Frobenius norm |h|^2. A number off the diagonal stands for two, so it may change by 1/sqrt(2) where one
    on the diagonal may change by 1.
    """
    row, column = torch.triu_indices(dim, dim)
    scale = (row == column).double().clamp(min=0.5**0.5) * sums.scale**2
    gram = SumSensitivity(scale, rows=0.5, count=0.0, possible=lambda rows: _without_negative_variance(rows, dim))
    return {"sums": replace(sums, rows=sums.rows / 2, count=sums.count / 2), "gram": gram}


def _without_negative_variance(packed: Tensor, dim: int) -> Tensor:
    """The nearest positive semi-definite matrices, packed like those given, one in each row."""
    nearest = []
    for row in packed:
        variance, directions = torch.linalg.eigh(unpack_symmetric(row, dim))
        nearest.append(pack_symmetric((directions * variance.clamp(min=0)) @ directions.T))
    return torch.stack(nearest) if nearest else packed


def as_sums(means: Any) -> Moments:
    """Sums in float64 from the means and counts of a record that has both tables."""
    sums, gram = (
        ClassTable(table.rows.double() * table.count.double()[:, None], table.count.double())
        for table in (means.sums, means.gram)
    )
    return Moments(sums, gram)

"""Second moments beside class sums: what ridge regression and Gaussian classifiers need of a site's features."""

from typing import Any

from protofed.closed_form.one_pass import OnePass, OnePassServer
from protofed.closed_form.sums import ClassSums, added_up
from protofed.method import At, Samples, U
from protofed.models.net import Net
from protofed.records import ClassTable, Record, Sum
from protofed.verbs import exact_class_means, second_moment


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

    def packed(self, sent: Any, net: Net, at: At) -> Any:
        """Both add up."""
        return MomentsUpload(added_up(sent.sums), added_up(sent.gram))


def as_sums(means: Any) -> Moments:
    """Sums in float64 from the means and counts of a record that has both tables."""
    sums, gram = (
        ClassTable(table.rows.double() * table.count.double()[:, None], table.count.double())
        for table in (means.sums, means.gram)
    )
    return Moments(sums, gram)

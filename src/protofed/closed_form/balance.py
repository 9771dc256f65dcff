"""Moments in which sites or domains count equally, sent as they are, as a sketch, or without the second ones."""

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from protofed.closed_form.moments import Moments, with_second_moment
from protofed.closed_form.one_pass import OnePass
from protofed.closed_form.sketch import SketchedSums, moments_of, sketched, sum_of_sketches
from protofed.closed_form.sums import means_of
from protofed.errors import UserError
from protofed.method import At, Samples, SumSensitivity, U, Whole, knob
from protofed.models.net import Net
from protofed.models.unit_length import HEAD
from protofed.records import ClassTable
from protofed.verbs import exact_class_means, second_moment, unpack_symmetric


class BalancedMoments(OnePass[U]):
    """One-pass methods that balance what they add up, and let the user choose what travels of second moments.

    Where domains balance, each has rows of its own in every table: its classes, and its second moment.
    """

    gram: Literal["full", "sketch", "none"] = knob(
        "second moments: full (they add up), as an eight-bit sketch (it does not), or none", default="full"
    )
    balance: Literal["none", "domain", "site"] = knob("images, domains or sites count equally", default="none")
    rank: Whole = knob("directions of a sketch, limited to a quarter of the site's images", default=32)

    def sum_sensitivity(self, unit: Literal["sample", "client"], bound: float, at: At) -> Mapping[str, SumSensitivity]:
        """Of what adds up; a sketch does not."""
        if self.gram == "sketch":
            raise UserError("guard: no bound is known for a sketch; use gram=none or gram=full")
        if unit == "sample" and self.balance == "site":
            raise UserError(
                "guard: with balance=site one image changes the weight of all others at its site; use "
                "balance=domain, or protect the whole site: unit=client"
            )
        known = super().sum_sensitivity(unit, bound, at)
        return known if self.gram == "none" else with_second_moment(known["sums"], at.dim)

    def statistics(self, net: Net, data: Samples, at: At) -> Any:
        """Means, and n_kc in units in which a site counts; in the rows of the site's domain where domains balance."""
        h, y = self.rows(net, data, at)
        groups, group = self.groups(at)
        sums = exact_class_means(h, y + group * at.classes, at.classes * groups)
        unit = 1 / max(len(h), 1) if self.balance == "site" else 1.0
        sums = ClassTable(sums.rows, sums.count * unit)
        if self.gram == "sketch":
            within = h - sums.rows[y + group * at.classes]
            return SketchedSums(sums, sketched(within, min(self.rank, len(h) // 4)))
        gram = self.no_statistics(net, at).gram
        if self.gram == "full":
            own = second_moment(h)
            gram.rows[group], gram.count[group] = own.rows[0], own.count[0] * unit
        return Moments(sums, gram)

    def no_statistics(self, net: Net, at: At) -> Any:
        """Of nobody."""
        nobody = self.no_moments(net, at)
        return SketchedSums(nobody.sums, sketched(nobody.sums.rows[:0], 0)) if self.gram == "sketch" else nobody

    def no_moments(self, net: Net, at: At) -> Moments:
        """The sums of nobody."""
        groups, _ = self.groups(at)
        sums = ClassTable.empty(at.classes * groups, at.dim, net.empty_table().rows)
        return Moments(
            sums, ClassTable.empty(groups if self.gram != "none" else 0, at.dim * (at.dim + 1) // 2, sums.rows)
        )

    def groups(self, at: At) -> tuple[int, int]:
        """Into how many groups sites are put that balance each other, and the one of this site."""
        if self.balance != "domain":
            return 1, 0
        domains = sorted(set(at.domains.values()))
        return len(domains), domains.index(at.domains[at.client]) if at.client is not None else 0

    def as_moments(self, sent: Any, at: At) -> Moments:
        """What a site has sent, as means and counts."""
        return moments_of(sent, at.classes) if isinstance(sent, SketchedSums) else sent

    def summed(self, total: Any, like: Moments, at: At) -> Moments:
        """The sums over sites, from a round's uploads."""
        if self.gram == "sketch":
            return sum_of_sketches(total.sums, total.sketch, like, at.classes)
        return Moments(total.sums, total.gram)

    def balanced(self, total: Moments, images: int, at: At) -> tuple[Tensor, Tensor, Tensor | None]:
        """N_c = sum a_k n_kc, S_c = sum a_k s_kc, G = sum a_k G_k; a_k such that whoever balances counts equally."""
        N = total.sums.count.view(-1, at.classes)
        n = N.sum(1)
        a = {"none": n / n, "site": images / n, "domain": n.sum() / ((n > 0).sum() * n)}[self.balance]
        a = torch.where(n > 0, a, 0.0)[:, None]
        S = (a[..., None] * total.sums.rows.view(*N.shape, at.dim)).sum(0)
        G = unpack_symmetric((a * total.gram.rows).sum(0), at.dim) if len(total.gram.rows) else None
        return (a * N).sum(0), S, G

    def regrouped(self, total: Moments, at: At) -> Moments:
        """The sums with empty rows for the group of `at.client`, where nobody was in it before."""
        groups, own = self.groups(at)
        if groups * at.classes == len(total.sums.count):
            return total

        def widened(table: ClassTable, rows: int) -> ClassTable:
            empty = ClassTable.empty(rows, table.rows.shape[1], table.rows)
            return ClassTable(
                torch.cat([table.rows[: own * rows], empty.rows, table.rows[own * rows :]]),
                torch.cat([table.count[: own * rows], empty.count, table.count[own * rows :]]),
            )

        return Moments(widened(total.sums, at.classes), widened(total.gram, 1) if len(total.gram.rows) else total.gram)

    def global_prototypes(self, server: Any) -> ClassTable:
        """The class means, over all groups."""
        classes = len(server.shared.weights.params[f"{HEAD}.bias"])
        sums = server.total.sums
        rows = sums.rows.view(-1, classes, sums.rows.shape[1]).sum(0)
        return means_of(ClassTable(rows, sums.count.view(-1, classes).sum(0)))

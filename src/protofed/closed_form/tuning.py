"""Exchanges that may follow the statistics: sites choose lam and temperature, and make heads of their own."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from protofed.closed_form.balance import BalancedMoments
from protofed.closed_form.moments import Moments, MomentsUpload, as_sums
from protofed.closed_form.one_pass import ComputedHead, OnePassServer, head_weights
from protofed.closed_form.selection import LAMS, best, no_scores, scores
from protofed.closed_form.sketch import SketchUpload
from protofed.closed_form.sums import added_up, doubled, means_of, subtracted
from protofed.errors import UserError
from protofed.method import At, NonNegative, Plan, Positive, Samples, SumSensitivity, knob
from protofed.models import Group, everything, head, nothing
from protofed.models.net import Net
from protofed.records import ClassTable, Each, Mean, Record, map_tensors


class RidgeDown(ComputedHead):
    """The head; and where sites have more to do, the sums of all (as means and counts) and the chosen lam and tau."""

    sums: ClassTable
    gram: ClassTable
    chosen: Tensor


class RidgeServer(OnePassServer):
    """The head, the rest of the model, and both sums."""

    shared: RidgeDown
    total: Moments


class ScoredMomentsUpload(MomentsUpload):
    """What adds up, and how heads made without the site do there."""

    scores: Mean[Tensor]


class ScoredSketchUpload(SketchUpload):
    """What does not add up, and how heads made without the site do there."""

    scores: Mean[Tensor]


class TunedBySites(BalancedMoments[Any]):
    """One-pass methods with a regularised head that sites may tune and make their own; a subclass says which head."""

    lam: Positive = knob("ridge, in units of the mean variance", default=1.0)
    tune: Literal["none", "lam", "temperature", "both"] = knob(
        "what sites choose in a second exchange, by scoring heads computed without them", default="none"
    )
    rho: NonNegative = knob(
        "how much more a site's own images count in its own head; 0: all sites share one head", default=0.0
    )

    @property
    def loads(self) -> Group:
        """With heads of their own sites take nothing over."""
        return nothing if self.rho else self.shares

    @property
    def kind(self) -> Literal["global", "personal", "both"]:
        """Heads of their own are beside that of all."""
        return "both" if self.rho else "global"

    def sum_sensitivity(self, unit: Literal["sample", "client"], bound: float, at: At) -> Mapping[str, SumSensitivity]:
        """Of the first exchange; noise does not cover those that may follow."""
        if self.tune != "none" or self.rho:
            raise UserError("guard: noise covers one exchange of sums; omit tune and rho")
        return super().sum_sensitivity(unit, bound, at)

    def plan(self, plan: Plan) -> Plan:
        """Statistics; what sites choose; heads of their own."""
        return replace(plan, epochs=(0,) * (1 + (self.tune != "none") + (self.rho > 0)))

    def head_of(self, N: Tensor, S: Tensor, G: Tensor | None, lam: float, noise: float = 0.0) -> tuple[Tensor, Tensor]:
        """W [C, D] and b [C] from balanced counts, class sums and second moment (None: nobody sends it); `noise` is the
        variance of noise on the class sums."""
        raise TypeError(f"{type(self).__name__} must define head_of(N, S, G, lam, noise)")

    def closed_form(self, server: RidgeServer, at: At) -> tuple[Tensor, Tensor]:
        """The head of all, divided by the temperature."""
        images = sum(at.clients[client] for client in at.participants)
        lam, tau = server.shared.chosen.tolist()
        W, b = self.head_of(*self.balanced(server.total, images, at), lam, self.noise_variance(at))
        return W / tau, b / tau

    def noise_variance(self, at: At) -> float:
        """Of a guard's noise on a number of the class sums."""
        return at.noise**2 / self.sum_sensitivity("client", 1.0, at)["sums"].rows if at.noise else 0.0

    def scores(self, net: Net, data: Samples, at: At) -> Mean[Tensor]:
        """Mean log-likelihood of the site's images under heads made without it, for every lam and temperature."""
        h, y = self.rows(net, data, at)
        others = subtracted(as_sums(at.down), self.as_moments(at.memory, at))
        N, S, G = self.balanced(others, sum(at.clients.values()) - at.size, at)
        known = (N > 0)[y]
        h, y = h[known].double(), y[known]
        heads = [self.head_of(N, S, G, lam) for lam in self._lams] if len(y) else []
        return scores([(h @ W.T + b).masked_fill(N <= 0, -torch.inf) for W, b in heads], y, self._lams)

    def head_of_own(self, at: At) -> tuple[Tensor, Tensor]:
        """From N + rho n_k, S + rho s_k, G + rho G_k."""
        everybody = self.balanced(as_sums(at.down), sum(at.clients.values()), at)
        own = replace(self, balance="none")
        mine = own.balanced(as_sums(self.as_moments(at.memory, at)), at.size, at)
        unit = at.size if self.balance == "site" else 1.0
        N, S, G = (
            None if all_ is None or my is None else all_ + self.rho * unit * my
            for all_, my in zip(everybody, mine, strict=True)
        )
        lam, tau = at.down.chosen.tolist()
        W, b = self.head_of(N, S, G, lam)  # type: ignore[arg-type]
        return W / tau, b / tau

    def upload(self, net: Net, data: Samples, at: At) -> tuple[Any, Record]:
        """The statistics; then, where asked for, scores; at last it makes a head of its own."""
        if at.round == 0:
            sent = self.statistics(net, data, at)
            return self.packed(sent, net, at), sent
        told = None
        if self.tune != "none" and at.round == 1:
            told = self.scores(net, data, at)
        else:
            net.load(head_weights(*self.head_of_own(at), net.pick(head)))
        return self.packed(self.no_statistics(net, at), net, at, told), at.memory

    def packed(self, sent: Any, net: Net, at: At, told: Mean[Tensor] | None = None) -> Any:
        """As it adds up, or by itself where it does not; with scores, maybe empty, where sites are asked for any."""
        scored = () if self.tune == "none" else (told or no_scores(self._lams),)
        if self.gram == "sketch":
            return (ScoredSketchUpload if scored else SketchUpload)(Each(sent.sums), Each(sent.sketch), *scored)
        return (ScoredMomentsUpload if scored else MomentsUpload)(added_up(sent.sums), added_up(sent.gram), *scored)

    def server_state(self, net: Net, at: At) -> RidgeServer:
        """A head of zeros, nothing added up yet."""
        nobody, chosen = self.no_moments(net, at), torch.tensor([self.lam, 1.0], dtype=torch.float64)
        down = RidgeDown(net.pick(head), nobody.sums, nobody.gram, chosen)
        return RidgeServer(down, net.pick(everything - head), doubled(nobody))

    def aggregate(self, server: RidgeServer, total: Any, at: At) -> RidgeServer:
        """The head of the sums, at the lam and temperature that sites like best; what they need next goes with it."""
        if at.round == 0:
            server = replace(server, total=self.summed(total, server.total, at))
        if at.round == 1 and self.tune != "none":
            server = replace(server, shared=replace(server.shared, chosen=self._choice(total.scores)))
        server = self.with_head(server, at)
        down, sums = server.shared, server.total
        # After the last exchange nobody needs them.
        told = float(at.round + 1 < at.rounds)
        means, gram = (
            map_tensors(means_of(table), lambda tensor: (tensor * told).to(down.sums.rows))
            for table in (sums.sums, sums.gram)
        )
        return replace(server, shared=replace(down, sums=means, gram=gram))

    def forget(self, server: RidgeServer, memory: Any, at: At) -> RidgeServer:
        """A subtraction."""
        if len(at.plan.epochs) > 1:
            raise UserError("the sites chose by heads in which it took part (tune, rho); run again without it")
        left = replace(server, total=subtracted(server.total, self.as_moments(memory, at)))
        return self.with_head(left, at)

    def include(self, server: RidgeServer, memory: Any, at: At) -> RidgeServer:
        """An addition, in rows of its own where its domain is new and domains balance."""
        if len(at.plan.epochs) > 1:
            raise UserError("the others chose by heads in which it did not take part (tune, rho); run again with it")
        own = self.as_moments(memory, at)
        joined = replace(server, total=subtracted(self.regrouped(server.total, at), own, sign=-1))
        down, nobody = server.shared, map_tensors(joined.total, lambda tensor: torch.zeros_like(tensor))
        told = {name: map_tensors(getattr(nobody, name), lambda t: t.to(down.sums.rows)) for name in ("sums", "gram")}
        return self.with_head(replace(joined, shared=replace(down, **told)), at)

    def largest_weight(self, at: At) -> float:
        """Scores count by images."""
        return max(super().largest_weight(at), float(at.size))

    @property
    def _lams(self) -> tuple[float, ...]:
        return LAMS if self.tune in ("lam", "both") else (self.lam,)

    def _choice(self, told: Tensor) -> Tensor:
        """lam and tau that sites like best; as set where nobody could score."""
        lam, tau = best(told, self._lams) or (self.lam, 1.0)
        return torch.tensor([lam, tau if self.tune in ("temperature", "both") else 1.0], dtype=torch.float64)

"""ProtoRidge: a centred ridge head from class sums and second moments, sent once and added up.

New here. The head is of Fed3R's family, centred and scaled so that neither the size of a class nor that of a site or
domain decides; sites choose its regularisation and temperature on heads made without them.
"""

from dataclasses import replace
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from protofed.errors import UserError
from protofed.method import At, NonNegative, Plan, Positive, Samples, Whole, knob
from protofed.methods.fed3r import Moments, MomentsUpload
from protofed.methods.fedavg import SharedModel
from protofed.methods.fedncm import ClassSums, OnePass, OnePassServer, added_up, head_weights, means_of, subtracted
from protofed.models import Group, Split, everything, head, nothing
from protofed.models.net import Net
from protofed.models.unit_length import with_unit_features
from protofed.records import ClassTable, Each, Mean, Record, map_tensors
from protofed.registry import register
from protofed.verbs import exact_class_means, pack_symmetric, second_moment, unpack_symmetric

LAMS = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""What sites choose `lam` from."""
TEMPERATURES = tuple(10 ** (step / 6 - 3) for step in range(25))
"""From 0.001 to 10."""
_TOGETHER = 128
"""Sites whose sketches are added up at once."""
_WORST = -16.0
"""A mean log-likelihood below this is as bad as it gets."""


class Sketch(Record):
    """The class-centred features of a site by their leading directions, in eight bits, and the variance lost."""

    free_rows = frozenset({"rows", "scale"})

    rows: Tensor  # [r, D], 128 is zero
    scale: Tensor  # [r]
    lost: Tensor  # []


class SketchedSums(ClassSums):
    """Class means, and a sketch of what is around them."""

    sketch: Sketch


class RidgeDown(SharedModel):
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


class SketchUpload(Record):
    """Class means and sketch, which do not add up."""

    sums: Each[ClassTable]
    sketch: Each[Sketch]


class ScoredSketchUpload(SketchUpload):
    """The same, and how heads made without the site do there."""

    scores: Mean[Tensor]


@register("protoridge")
class ProtoRidge(OnePass[Any]):
    """One exchange: class sums and second moments add up to a centred ridge head in which classes and sites balance."""

    paper = "None: new here, after Fed3R and FedCGS"
    sends_up = "class means and counts, second moment (or a sketch, or none), once; with tune one number per candidate"
    sends_down = "weights of the head; with tune or rho also the sums of all sites"

    gram: Literal["full", "sketch", "none"] = knob(
        "second moments: as they are (they add up), by a sketch in eight bits (it does not), or none", default="full"
    )
    project: Annotated[int, Field(ge=0)] = knob(
        "dimensions to which features are brought by a random matrix known to all; 0: as they are", default=0
    )
    balance: Literal["none", "domain", "site"] = knob("images, domains or sites count equally", default="none")
    lam: Positive = knob("ridge, in units of the mean variance", default=1.0)
    tune: Literal["none", "lam", "temperature", "both"] = knob(
        "what sites choose by scoring heads made without them, in a second exchange", default="none"
    )
    rho: NonNegative = knob(
        "how much more a site's own images count in a head of its own; 0: all sites have the same", default=0.0
    )
    rank: Whole = knob("directions of a sketch, at most a quarter of the site's images", default=32)

    @property
    def loads(self) -> Group:
        """With heads of their own sites take nothing over."""
        return nothing if self.rho else self.shares

    @property
    def kind(self) -> Literal["global", "personal", "both"]:
        """Heads of their own are beside that of all."""
        return "both" if self.rho else "global"

    def plan(self, plan: Plan) -> Plan:
        """Statistics; what sites choose; heads of their own."""
        return replace(plan, epochs=(0,) * (1 + (self.tune != "none") + (self.rho > 0)))

    def build(self, base: Split, at: At) -> Split:
        """h = R phi(x) / |R phi(x)|, R a random matrix of the run's seed or the identity."""
        return with_unit_features(base, self.project or None, at.rng("projection"))

    # What a site sends

    def statistics(self, net: Net, data: Samples, at: At) -> Any:
        """Means, and n_kc in units in which a site counts; in the rows of the site's domain where domains balance."""
        h, y = self.rows(net, data, at)
        groups, group = self._groups(at)
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
        groups, _ = self._groups(at)
        like = net.empty_table().rows
        sums = ClassTable.empty(at.classes * groups, at.dim, like)
        if self.gram == "sketch":
            return SketchedSums(sums, sketched(like[:0], 0))
        return Moments(sums, self._no_gram(groups, at.dim, like))

    def _no_gram(self, groups: int, dim: int, like: Tensor) -> ClassTable:
        return ClassTable.empty(groups if self.gram != "none" else 0, dim * (dim + 1) // 2, like)

    def _groups(self, at: At) -> tuple[int, int]:
        """Into how many groups sites are put that balance each other, and the one of this site."""
        if self.balance != "domain":
            return 1, 0
        domains = sorted(set(at.domains.values()))
        return len(domains), domains.index(at.domains[at.client]) if at.client is not None else 0

    def as_moments(self, sent: Any, at: At) -> Moments:
        """What a site has sent, as means and counts in float64."""
        if not isinstance(sent, SketchedSums):
            return sent  # type: ignore[no-any-return]
        n = sent.sums.count.double().view(-1, at.classes).sum(1)
        G = _square([_factor(sent)]) + pack_symmetric(_spread(sent.sketch, at.dim))
        return Moments(sent.sums, ClassTable(torch.where(n[:, None] > 0, G, 0.0), n))

    def upload(self, net: Net, data: Samples, at: At) -> tuple[Any, Record]:
        """The statistics; then, where asked for, scores; at last it makes a head of its own."""
        if at.round == 0:
            sent = self.statistics(net, data, at)
            return self.packed(sent, net, at), sent
        scores = None
        if self.tune != "none" and at.round == 1:
            scores = self.scores(net, data, at)
        else:
            W, b = self._head_of_own(at)
            net.load(head_weights(W, b, net.pick(head)))
        return self.packed(self.no_statistics(net, at), net, at, scores), at.memory

    def packed(self, sent: Any, net: Net, at: At, scores: Mean[Tensor] | None = None) -> Any:
        """As it adds up, or by itself where it does not; with scores, maybe empty, where sites are asked for any."""
        told = () if self.tune == "none" else (scores or Mean(self._no_scores(), 0.0),)
        if self.gram == "sketch":
            return (ScoredSketchUpload if told else SketchUpload)(Each(sent.sums), Each(sent.sketch), *told)
        return (ScoredMomentsUpload if told else MomentsUpload)(added_up(sent.sums), added_up(sent.gram), *told)

    def largest_weight(self, at: At) -> float:
        """Scores count by images."""
        return max(super().largest_weight(at), float(at.size))

    def _lams(self) -> tuple[float, ...]:
        return LAMS if self.tune in ("lam", "both") else (self.lam,)

    def _no_scores(self) -> Tensor:
        return torch.zeros(len(self._lams()), len(TEMPERATURES))

    def scores(self, net: Net, data: Samples, at: At) -> Mean[Tensor]:
        """Mean log-likelihood of the site's images under heads made without it, for every lam and temperature."""
        h, y = self.rows(net, data, at)
        others = subtracted(_as_sums(at.down), self.as_moments(at.memory, at))
        N, S, G = self.balanced(others, sum(at.clients.values()) - at.size, at)
        known = (N > 0)[y]
        h, y, found = h[known].double(), y[known], self._no_scores()
        for row, lam in enumerate(self._lams() if len(y) else ()):
            W, b = self.head_of(N, S, G, lam)
            logits = (h @ W.T + b).masked_fill(N <= 0, -torch.inf)
            for column, tau in enumerate(TEMPERATURES):
                found[row, column] = max(-functional.cross_entropy(logits / tau, y).item(), _WORST)
        return Mean(found, float(len(y)))

    def _head_of_own(self, at: At) -> tuple[Tensor, Tensor]:
        """From N + rho n_k, S + rho s_k, G + rho G_k."""
        everybody = self.balanced(_as_sums(at.down), sum(at.clients.values()), at)
        own = replace(self, balance="none")
        mine = own.balanced(_as_sums(self.as_moments(at.memory, at)), at.size, at)
        unit = at.size if self.balance == "site" else 1.0
        N, S, G = (
            None if all_ is None or my is None else all_ + self.rho * unit * my
            for all_, my in zip(everybody, mine, strict=True)
        )
        lam, tau = at.down.chosen.tolist()
        W, b = self.head_of(N, S, G, lam)  # type: ignore[arg-type]
        return W / tau, b / tau

    # What the server makes of it

    def server_state(self, net: Net, at: At) -> RidgeServer:
        """A head of zeros, nothing added up yet."""
        groups, _ = self._groups(at)
        sums = ClassTable.empty(at.classes * groups, at.dim, net.empty_table().rows)
        gram = self._no_gram(groups, at.dim, sums.rows)
        down = RidgeDown(net.pick(head), sums, gram, torch.tensor([self.lam, 1.0], dtype=torch.float64))
        total = Moments(*(map_tensors(table, lambda tensor: tensor.double()) for table in (sums, gram)))
        return RidgeServer(down, net.pick(everything - head), total)

    def aggregate(self, server: RidgeServer, total: Any, at: At) -> RidgeServer:
        """The head of the sums, at the lam and temperature that sites like best; what they need next goes with it."""
        if at.round == 0:
            server = replace(server, total=self._summed(total, server, at))
        if at.round == 1 and self.tune != "none":
            server = replace(server, shared=replace(server.shared, chosen=self._choice(total.scores)))
        server = self.with_head(server, at)
        down, total = server.shared, server.total
        # After the last exchange nobody needs them.
        told = float(at.round + 1 < at.rounds)
        sums, gram = (
            map_tensors(means_of(table), lambda tensor: (tensor * told).to(down.sums.rows))
            for table in (total.sums, total.gram)
        )
        return replace(server, shared=replace(down, sums=sums, gram=gram))

    def _summed(self, total: Any, server: RidgeServer, at: At) -> Moments:
        if self.gram != "sketch":
            return Moments(total.sums, total.gram)
        none = map_tensors(server.total, torch.zeros_like)
        sums, gram = ClassSums(none.sums), none.gram
        waiting: dict[int, list[Tensor]] = {}
        lost = torch.zeros_like(gram.count)
        for client, table in total.sums.items():
            sums = subtracted(sums, ClassSums(table), sign=-1)
            n = table.count.double().view(-1, at.classes).sum(1)
            group = int(n.argmax())
            gram.count[group] += n[group]
            rows = waiting.setdefault(group, [])
            rows.append(_factor(SketchedSums(table, total.sketch[client])) * n[group].sqrt())
            lost[group] += total.sketch[client].lost.double() * n[group]
            if len(rows) == _TOGETHER:
                gram.rows[group] += _square(waiting.pop(group))
        for group, rows in waiting.items():
            gram.rows[group] += _square(rows)
        evenly = pack_symmetric(torch.eye(at.dim, dtype=torch.float64)) / at.dim
        return Moments(sums.sums, ClassTable(gram.rows + lost[:, None] * evenly, gram.count))

    def _choice(self, scores: Tensor) -> Tensor:
        """lam and tau with the highest likelihood; as set where nobody could score."""
        if not scores.any():
            return torch.tensor([self.lam, 1.0], dtype=torch.float64)
        row, column = divmod(int(scores.argmax()), len(TEMPERATURES))
        tau = TEMPERATURES[column] if self.tune in ("temperature", "both") else 1.0
        return torch.tensor([self._lams()[row], tau], dtype=torch.float64)

    def closed_form(self, server: RidgeServer, at: At) -> tuple[Tensor, Tensor]:
        """The head of all, divided by the temperature."""
        images = sum(at.clients[client] for client in at.participants)
        lam, tau = server.shared.chosen.tolist()
        W, b = self.head_of(*self.balanced(server.total, images, at), lam)
        return W / tau, b / tau

    def balanced(self, total: Moments, images: int, at: At) -> tuple[Tensor, Tensor, Tensor | None]:
        """N_c = sum a_k n_kc, S_c = sum a_k s_kc, G = sum a_k G_k; a_k such that whoever balances counts equally."""
        N = total.sums.count.view(-1, at.classes)
        n = N.sum(1)
        a = {"none": n / n, "site": images / n, "domain": n.sum() / ((n > 0).sum() * n)}[self.balance]
        a = torch.where(n > 0, a, 0.0)[:, None]
        S = (a[..., None] * total.sums.rows.view(*N.shape, at.dim)).sum(0)
        G = unpack_symmetric((a * total.gram.rows).sum(0), at.dim) if len(total.gram.rows) else None
        return (a * N).sum(0), S, G

    def head_of(self, N: Tensor, S: Tensor, G: Tensor | None, lam: float) -> tuple[Tensor, Tensor]:
        """W = (Gc + lam tr(Gc)/D I)^-1 (S - N_c mu')' diag(N_c)^-1/2, b = -mu' W; without G (m_c - mu) / |m_c - mu|."""
        mu = S.sum(0) / N.sum().clamp(min=1e-300)
        centred = S - N[:, None] * mu
        if G is None:
            W = functional.normalize(centred, dim=1, eps=1e-300)
        else:
            Gc = G - N.sum() * torch.outer(mu, mu)
            W = solved(Gc, lam, centred) / torch.where(N > 0, N, 1.0).sqrt()[:, None]
        return W, -W @ mu

    def forget(self, server: RidgeServer, memory: Any, at: At) -> RidgeServer:
        """A subtraction."""
        if len(at.plan.epochs) > 1:
            raise UserError("sites chose by heads in which it took part (tune, rho); run without")
        left = replace(server, total=subtracted(server.total, self.as_moments(memory, at)))
        return self.with_head(left, at)

    def global_prototypes(self, server: RidgeServer) -> ClassTable:
        """The class means."""
        classes = len(next(iter(server.shared.weights.params.values())))
        sums = server.total.sums
        rows = sums.rows.view(-1, classes, sums.rows.shape[1]).sum(0)
        return means_of(ClassTable(rows, sums.count.view(-1, classes).sum(0)))


def solved(Gc: Tensor, lam: float, rows: Tensor) -> Tensor:
    """rows (Gc + lam tr(Gc)/D I)^-1; noise or a robust rule may leave Gc with directions of negative variance, of which
    none is then taken."""
    ridge = (lam * Gc.trace() / len(Gc)).clamp(min=1e-12)
    factor, failed = torch.linalg.cholesky_ex(Gc + ridge * torch.eye(len(Gc), dtype=Gc.dtype, device=Gc.device))
    if not failed:
        return torch.cholesky_solve(rows.T, factor).mT
    variance, directions = torch.linalg.eigh(Gc)
    solution: Tensor = (rows @ directions / (variance.clamp(min=0) + ridge)) @ directions.T
    return solution


def _as_sums(means: Any) -> Moments:
    """Sums from means and counts."""
    sums, gram = (
        ClassTable(table.rows.double() * table.count.double()[:, None], table.count.double())
        for table in (means.sums, means.gram)
    )
    return Moments(sums, gram)


def sketched(within: Tensor, rank: int) -> Sketch:
    """Rows [n, D] by the `rank` leading directions of their mean square, each in eight bits."""
    rows = within.double() / max(len(within), 1) ** 0.5
    _, s, V = torch.linalg.svd(rows, full_matrices=False) if len(rows) else (None, rows[:, 0], rows)
    kept = s[:rank, None] * V[:rank]
    scale = (kept.abs().amax(1) / 127).clamp(min=1e-30).to(within.dtype)
    whole = (kept / scale.double()[:, None]).round() + 128
    sketch = Sketch(whole.clamp(1, 255).to(torch.uint8), scale, within.new_zeros(()))
    lost = rows.pow(2).sum() - _directions(sketch).pow(2).sum()
    return replace(sketch, lost=lost.clamp(min=0).to(within.dtype))


def _directions(sketch: Sketch) -> Tensor:
    return (sketch.rows.double() - 128) * sketch.scale.double()[:, None]


def expanded(sketch: Sketch, dim: int) -> Tensor:
    """The mean square that a sketch stands for; what was lost is spread evenly."""
    B = _directions(sketch)
    return B.T @ B + _spread(sketch, dim)


def _spread(sketch: Sketch, dim: int) -> Tensor:
    return sketch.lost.double() / dim * torch.eye(dim, dtype=torch.float64, device=sketch.lost.device)


def _factor(sent: SketchedSums) -> Tensor:
    """Rows whose square is the mean of h h' at a site, but for what its sketch has lost."""
    held, count = sent.sums.held, sent.sums.count.double()
    share = count / count.sum().clamp(min=1e-300)
    return torch.cat([_directions(sent.sketch), (sent.sums.rows.double() * share.sqrt()[:, None])[held]])


def _square(factors: list[Tensor]) -> Tensor:
    rows = torch.cat(factors)
    return pack_symmetric(rows.T @ rows)

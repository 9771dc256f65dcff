"""Privacy accounting: (epsilon, delta) of everything a client has uploaded, by the accountants of opacus.

Nothing is remembered between rounds: what a client has spent follows from the rounds it took part in, its size and the
plan, so a resumed run reports what an uninterrupted one would.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import isfinite, log, sqrt
from typing import Any, NamedTuple
from warnings import catch_warnings, simplefilter

import numpy as np
from numpy.typing import NDArray

from protofed.errors import missing_extra
from protofed.guards.gradients import sampling_rate, steps_in
from protofed.guards.guard import Guard
from protofed.guards.privatise import tables_in
from protofed.method import Method, Plan
from protofed.records import Record

_NEAR_ONE = (1.0001, 1.001, *(1 + x / 100 for x in range(1, 10)))
_ORDERS = (*_NEAR_ONE, *(1 + x / 10 for x in range(1, 110)), *range(12, 64), 80, 128, 256, 512)
"""Orders at which Rényi divergences are taken: the best one gives epsilon, and any of them a true bound."""
_MOST_CLIENTS = 100

_RELATION = {
    "sample": "adding or removing one sample of a client's data",
    "client": "replacing a client's upload by one without any change",
}


class SampledGaussianMechanism(NamedTuple):
    """Gaussian noise on what a random part of the samples gives, several times over; an entry of opacus' history."""

    noise: float
    """The noise multiplier: its deviation over what one unit can change."""
    rate: float
    """How likely a sample is to be in the part."""
    steps: int
    """How often it is used."""


@dataclass(frozen=True)
class PrivacyLedger:
    """What every client has spent of its privacy budget."""

    guard: Guard
    method: Method
    plan: Plan
    sizes: Mapping[str, int]
    """The samples each client trains on."""
    upload: Record
    """An example of what a client sends."""
    arrived: dict[int, int] = field(default_factory=dict)
    """How many uploads came in a round, where fewer did than share the noise."""

    def with_guard(self, guard: Guard) -> "PrivacyLedger":
        """The same clients under another guard."""
        return replace(self, guard=guard)

    def planned(self) -> dict[str, Any]:
        """What the client that spends most will have spent in the end, and what one round costs it."""
        every, client = range(self.plan.rounds), list(self.sizes)
        one = self.after([(0, client)])
        entry = self.after((round, client) for round in every)
        return {**entry, "one_round": one["epsilon"]}

    def after(self, rounds: Iterable[tuple[int, Iterable[str]]]) -> dict[str, Any]:
        """The state of the budget after these rounds, each with the clients that took part."""
        rounds_of: dict[str, list[int]] = {}
        for round, clients in rounds:
            for client in clients:
                rounds_of.setdefault(client, []).append(round)
        guard = self.guard
        budget = {"unit": guard.unit, "delta": guard.delta, "accountant": guard.accountant}
        if not guard.noisy:
            return {**budget, "epsilon": None, "reason": "there is no noise"}
        spent = {client: self.spent_by(client, tuple(rounds)) for client, rounds in rounds_of.items()}
        worst = max(spent.values(), default=0.0)
        if not guard.promises:
            return {**budget, "epsilon": None, "epsilon_of_rows": _finite(worst), "reason": _NOT_COVERED}
        shared = {"among": guard.among} if guard.among > 1 else {}
        return {**budget, "epsilon": _finite(worst), "relation": _RELATION[guard.unit], **shared}

    def spent_by(self, client: str, rounds: tuple[int, ...]) -> float:
        """One client's epsilon after the rounds it took part in."""
        return epsilon_of(tuple(self.mechanisms(client, rounds)), self.guard.accountant, self.guard.delta)

    def mechanisms(self, client: str, rounds: Iterable[int]) -> list[SampledGaussianMechanism]:
        """Everything that looked at the client's data."""
        guard, listed = self.guard, list(rounds)
        if guard.among > 1:
            return [SampledGaussianMechanism(self._noise_of(round), guard.subsample, 1) for round in listed]
        if guard.unit == "client":
            return [SampledGaussianMechanism(guard.noise, 1.0, len(listed))]
        used = []
        if guard.trains_privately:
            size = self.sizes[client]
            steps = sum(steps_in(self.plan, round, size) for round in listed) * len(self.method.steps)
            used.append(SampledGaussianMechanism(guard.noise, sampling_rate(self.plan, size), steps))
        if tables_in(self.upload) or not guard.trains_privately:
            used.append(SampledGaussianMechanism(guard.effective_row_noise, guard.subsample, len(listed)))
        return used

    def _noise_of(self, round: int) -> float:
        """The noise on a sum: every client that drops out takes its share with it."""
        return self.guard.effective_row_noise * sqrt(self.arrived.get(round, self.guard.among) / self.guard.among)

    def total(self, rounds: Iterable[tuple[int, Iterable[str]]]) -> dict[str, Any]:
        """The budget at the end, with every client where there are few."""
        listed = [(round, list(clients)) for round, clients in rounds]
        state = self.after(listed)
        if state["epsilon"] is None or len(self.sizes) > _MOST_CLIENTS:
            return state
        rounds_of = {c: tuple(round for round, clients in listed if c in clients) for c in self.sizes}
        return {**state, "clients": {c: _finite(self.spent_by(c, rounds)) for c, rounds in rounds_of.items()}}


def promise_in_words(privacy: Mapping[str, Any]) -> str:
    """What an entry of `after`, `total` or `planned` promises, in one sentence."""
    if privacy["epsilon"] is None:
        return f"privacy: no guarantee, because {privacy['reason']}"
    whose = {"sample": "one image", "client": "everything one client holds"}[privacy["unit"]]
    shared = f", with noise that {privacy['among']} clients share" if "among" in privacy else ""
    return f"privacy: epsilon {privacy['epsilon']:.4g} at delta {privacy['delta']:g} for {whose}{shared}"


_NOT_COVERED = (
    "the network that computes the rows was trained on the same samples without DP-SGD (train=plain), and "
    "weights are sent as they are: epsilon_of_rows holds only against someone who cannot learn anything from the "
    "network"
)


def require_opacus() -> None:
    """Refuse early where the accountants are not installed."""
    try:
        import opacus.accountants  # noqa: F401
    except ImportError:
        raise missing_extra("a guard with noise needs opacus to account for it", "privacy") from None


@lru_cache(maxsize=4096)
def epsilon_of(mechanisms: tuple[SampledGaussianMechanism, ...], accountant: str, delta: float) -> float:
    """Of all these mechanisms together, by one of the accountants."""
    used = [mechanism for mechanism in mechanisms if mechanism.steps]
    if not used:
        return 0.0
    if accountant == "zcdp":
        return _by_concentration(used, delta)
    with catch_warnings():
        # A better order may be outside ours: the bound is loose then, not wrong. log(0) comes from a rate of 1.
        simplefilter("ignore")
        return _by_orders(used, delta) if accountant == "rdp" else _by_distributions(used, delta)


def _by_concentration(used: list[SampledGaussianMechanism], delta: float) -> float:
    """rho adds up; that only a part of the samples is looked at is not made use of."""
    rho = sum(one.steps / (2 * one.noise**2) for one in used)
    return rho + 2 * sqrt(rho * log(1 / delta))


def _by_orders(used: list[SampledGaussianMechanism], delta: float) -> float:
    from opacus.accountants.analysis.rdp import get_privacy_spent

    spent = np.sum([one.steps * _renyi(one.noise, one.rate) for one in used], axis=0)
    return float(get_privacy_spent(orders=list(_ORDERS), rdp=spent, delta=delta)[0])


def _by_distributions(used: list[SampledGaussianMechanism], delta: float) -> float:
    from opacus.accountants import PRVAccountant

    accountant = PRVAccountant()
    accountant.history = list(used)
    return float(accountant.get_epsilon(delta))


@lru_cache(maxsize=4096)
def _renyi(noise: float, rate: float) -> NDArray[Any]:
    """The Rényi divergences of one step, which add up over steps."""
    from opacus.accountants.analysis.rdp import compute_rdp

    return np.asarray(compute_rdp(q=rate, noise_multiplier=noise, steps=1, orders=list(_ORDERS)))


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None

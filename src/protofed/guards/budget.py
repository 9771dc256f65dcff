"""Noise from a budget: the user names epsilon, and the least noise that keeps to it follows."""

from collections.abc import Callable, Mapping
from functools import partial
from math import log, sqrt

from protofed.errors import UserError
from protofed.guards.accounting import PrivacyLedger, SampledGaussianMechanism, epsilon_of, require_opacus
from protofed.guards.guard import Guard
from protofed.guards.privatise import tables_in
from protofed.guards.sums import sends_sums
from protofed.method import Method, Plan
from protofed.records import Nothing, Record

_CLOSE = 1e-3
"""How close to the least noise that keeps to an epsilon a search comes, relatively."""
_ROUNDED_UP = 1 + 1e-9
"""So that rounding does not overspend."""
_LEAST, _MOST = 0.01, 1e5
_ROWS = 0.5
"""Part of epsilon that prototypes alone may spend where clients also train."""


def rho_of(epsilon: float, delta: float) -> float:
    """The rho of zero-concentrated differential privacy with epsilon = rho + 2 sqrt(rho log(1/delta)).

    Bun, Steinke. Concentrated Differential Privacy: Simplifications, Extensions, and Lower Bounds. TCC 2016.
    """
    spread = log(1 / delta)
    return (sqrt(spread + epsilon) - sqrt(spread)) ** 2


def settled(
    guard: Guard,
    method: Method,
    plan: Plan,
    sizes: Mapping[str, int],
    participants: int,
    upload: Record | None = None,
) -> Guard:
    """The guard with the noise that follows from its epsilon, over all rounds of the plan; others as they are.

    Before an example of an upload is known, only where nothing is trained.
    """
    trains, epsilon = any(plan.epochs), guard.epsilon
    if epsilon is None or guard.noise > 0 or (trains and upload is None):
        return guard
    if not trains and "accountant" not in guard.model_fields_set:
        guard = guard.model_copy(update={"accountant": "zcdp"})
    if guard.secure and (upload is None or sends_sums(upload)):
        guard = guard.model_copy(update={"among": participants})
    if guard.accountant == "zcdp" and not trains:
        noise = sqrt(plan.rounds / (2 * rho_of(epsilon, guard.delta))) * _ROUNDED_UP
        return guard.model_copy(update={"noise": noise})
    if guard.accountant != "zcdp":
        require_opacus()
    return _Search(guard, PrivacyLedger(guard, method, plan, sizes, upload or Nothing())).found()


class _Search:
    """For the least noise with which no client spends more than the budget."""

    def __init__(self, guard: Guard, ledger: PrivacyLedger) -> None:
        self._guard = guard
        self._ledger = ledger
        # Clients of the same size spend the same.
        self._clients = list({size: client for client, size in ledger.sizes.items()}.values())
        self._rounds = tuple(range(ledger.plan.rounds))

    def found(self) -> Guard:
        """The guard with it."""
        guard, epsilon = self._guard, self._guard.epsilon or 0.0
        if guard.trains_privately and any(self._ledger.plan.epochs) and tables_in(self._ledger.upload):
            guard = guard.model_copy(update={"row_noise": self._least(self._spent_by_rows, _ROWS * epsilon)})

        def spent(client: str, noise: float) -> float:
            tried = self._ledger.with_guard(guard.model_copy(update={"noise": noise}))
            return tried.spent_by(client, self._rounds)

        return guard.model_copy(update={"noise": self._least(spent, epsilon)})

    def _spent_by_rows(self, client: str, noise: float) -> float:
        """By prototypes alone."""
        rows = SampledGaussianMechanism(noise, self._guard.subsample, len(self._rounds))
        return epsilon_of((rows,), self._guard.accountant, self._guard.delta)

    def _least(self, spent: Callable[[str, float], float], epsilon: float) -> float:
        """The noise at which the client that spends most keeps to epsilon; who that is shows at the noise found."""
        noise, client = _LEAST, min(self._clients, key=lambda name: self._ledger.sizes[name])
        for _ in self._clients:
            noise = self._least_of(partial(spent, client), epsilon, noise)
            by_client = {name: spent(name, noise) for name in self._clients}
            client = max(by_client, key=lambda name: by_client[name])
            if by_client[client] <= epsilon:
                break
        return noise

    def _least_of(self, spent: Callable[[float], float], epsilon: float, low: float) -> float:
        high = max(2 * low, 1.0)
        while spent(high) > epsilon:
            low, high = high, 2 * high
            if high > _MOST:
                raise UserError(
                    f"guard: no amount of noise keeps {len(self._rounds)} rounds within "
                    f"epsilon={self._guard.epsilon:g} by the accountant {self._guard.accountant}; allow a larger "
                    "epsilon, or fewer rounds"
                )
        while high - low > _CLOSE * high:
            middle = (low + high) / 2
            low, high = (low, middle) if spent(middle) <= epsilon else (middle, high)
        return high

"""Epsilon: that of opacus for the mechanisms a client really used, whoever counts and whenever."""

from math import log, sqrt
from typing import Any

import pytest
import torch
from scipy.stats import norm

from protofed.guards import PrivacyLedger, SampledGaussianMechanism, parse_guard
from protofed.method import Plan
from protofed.records import ClassTable, Mean, Record, Weights
from protofed.registry import find_method

opacus = pytest.importorskip("opacus")


class Upload(Record):
    weights: Mean[Weights]
    P: Mean[ClassTable]


class WeightsOnly(Record):
    weights: Mean[Weights]


def ledger(guard: str, upload: Any = None, batch: int = 10) -> PrivacyLedger:
    table = ClassTable.empty(3, 2, torch.zeros(1))
    both = Upload(Mean(Weights({}, {}), 1.0), Mean(table, 1.0))
    plan = Plan(epochs=(2, 2, 1), batch=batch)
    return PrivacyLedger(parse_guard(guard), find_method("fedproto_avg")(), plan, {"a": 100, "b": 55}, upload or both)


def test_the_mechanisms_of_a_client() -> None:
    book = ledger("clip=1,noise=1.5,row_noise=4,subsample=0.5")
    assert book.mechanisms("a", [0, 2]) == [
        SampledGaussianMechanism(1.5, 0.1, 30),
        SampledGaussianMechanism(4.0, 0.5, 2),
    ]
    assert book.mechanisms("b", [1]) == [
        SampledGaussianMechanism(1.5, 10 / 55, 12),
        SampledGaussianMechanism(4.0, 0.5, 1),
    ]
    weights = WeightsOnly(Mean(Weights({}, {}), 1.0))
    assert ledger("clip=1,noise=1.5", weights).mechanisms("a", [0]) == [SampledGaussianMechanism(1.5, 0.1, 20)]
    assert ledger("unit=client,clip=1,noise=2").mechanisms("a", [0, 1, 2]) == [SampledGaussianMechanism(2.0, 1.0, 3)]


def test_epsilon_is_that_of_opacus() -> None:
    from opacus.accountants import RDPAccountant

    accountant = RDPAccountant()
    accountant.history = [(1.5, 0.1, 50), (4.0, 1.0, 3)]
    expected = accountant.get_epsilon(1e-5)
    found = ledger("clip=1,noise=1.5,row_noise=4").spent_by("a", (0, 1, 2))
    assert found <= expected * (1 + 1e-9)
    assert found == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("accountant", ["rdp", "prv"])
def test_epsilon_is_never_below_the_exact_one(accountant: str) -> None:
    """Of k Gaussian mechanisms together the exact trade-off is known: Balle and Wang, ICML 2018."""
    noise, uploads, delta = 2.0, 3, 1e-5
    mu = sqrt(uploads) / noise

    def exact_delta(epsilon: float) -> float:
        return float(norm.cdf(mu / 2 - epsilon / mu) - 2.718281828459045**epsilon * norm.cdf(-mu / 2 - epsilon / mu))

    found = ledger(f"unit=client,clip=1,noise={noise},accountant={accountant}").spent_by("a", (0, 1, 2))
    assert exact_delta(found) <= delta
    loose = {"rdp": 0.25, "prv": 0.03}[accountant]
    assert exact_delta(found * (1 - loose)) > delta


def test_concentration_by_hand() -> None:
    """Three uploads with noise 2: rho = 3 / (2 x 2^2) = 3/8."""
    found = ledger("unit=client,clip=1,noise=2,accountant=zcdp,delta=1e-5").spent_by("a", (0, 1, 2))
    assert found == pytest.approx(3 / 8 + 2 * sqrt(3 / 8 * log(1e5)))


def test_the_tighter_accountant_says_less() -> None:
    spent = [
        ledger(f"clip=1,noise=1,row_noise=4,accountant={name}").spent_by("a", (0, 1, 2)) for name in ("rdp", "prv")
    ]
    assert 0 < spent[1] < spent[0]


def test_the_worst_client_counts() -> None:
    book = ledger("clip=1,noise=1")
    rounds = [(0, ["a", "b"]), (1, ["a"])]
    state = book.total(rounds)
    assert state["clients"] == {"a": book.spent_by("a", (0, 1)), "b": book.spent_by("b", (0,))}
    assert state["epsilon"] == max(state["clients"].values()) == book.after(rounds)["epsilon"]
    assert book.after(rounds[:1])["epsilon"] < state["epsilon"]
    assert (state["unit"], state["delta"]) == ("sample", 1e-5)


def test_nothing_is_promised_that_does_not_hold() -> None:
    rounds = [(0, ["a", "b"])]
    assert ledger("quantise=8").after(rounds)["epsilon"] is None
    plain = ledger("clip=1,noise=2,train=plain").after(rounds)
    assert plain["epsilon"] is None
    assert plain["epsilon_of_rows"] < log(1e5)
    assert "without DP-SGD" in plain["reason"]

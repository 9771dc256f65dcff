"""A named epsilon: the noise that follows from it, what is refused, and that nobody overspends."""

from math import log, sqrt

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protofed.errors import UserError
from protofed.guards import PrivacyLedger, parse_guard, rho_of, settled
from protofed.method import Plan
from protofed.records import ClassTable, Mean, Record, Sum, Weights
from protofed.registry import find_method

ONE_EXCHANGE = Plan(epochs=(0,))
SITES = {"a": 100, "b": 40, "c": 7}


class Sums(Record):
    sums: Sum[ClassTable]


class ModelAndPrototypes(Record):
    weights: Mean[Weights]
    P: Mean[ClassTable]


def sums() -> Sums:
    return Sums(Sum(ClassTable.empty(3, 2, torch.zeros(1)), torch.zeros(3)))


def test_op_9() -> None:
    assert rho_of(3, 1e-5) == pytest.approx(0.173483212, abs=5e-10)
    assert rho_of(1, 1e-5) == pytest.approx(0.020819938, abs=5e-10)


@given(st.floats(1e-3, 100), st.floats(1e-12, 0.5))
def test_rho_is_the_inverse_of_its_epsilon(epsilon: float, delta: float) -> None:
    rho = rho_of(epsilon, delta)
    assert rho + 2 * sqrt(rho * log(1 / delta)) == pytest.approx(epsilon, rel=1e-6)


def test_one_exchange_of_sums_takes_the_noise_of_its_rho() -> None:
    guard = settled(parse_guard("epsilon=3,delta=1e-5"), find_method("fedncm")(), ONE_EXCHANGE, SITES, 3)
    assert guard.noise == pytest.approx(1 / sqrt(2 * 0.173483212), rel=1e-6)
    assert (guard.accountant, guard.clip, guard.among) == ("zcdp", 1.0, 1)
    ledger = PrivacyLedger(guard, find_method("fedncm")(), ONE_EXCHANGE, SITES, sums())
    assert 2.999 < ledger.planned()["epsilon"] <= 3
    assert settled(guard, find_method("fedncm")(), ONE_EXCHANGE, SITES, 3) == guard


def test_rho_adds_up_over_exchanges() -> None:
    once, thrice = (
        settled(parse_guard("epsilon=3"), find_method("fedncm")(), Plan(epochs=(0,) * rounds), SITES, 3)
        for rounds in (1, 3)
    )
    assert thrice.noise == pytest.approx(sqrt(3) * once.noise)
    three = Plan(epochs=(0, 0, 0))
    spent = PrivacyLedger(once, find_method("fedncm")(), three, SITES, sums()).spent_by("a", (0, 1, 2))
    rho = 3 * rho_of(3, 1e-5)
    assert spent == pytest.approx(rho + 2 * sqrt(rho * log(1e5)))


def test_another_accountant_may_be_asked_for_and_a_tighter_one_needs_less_noise() -> None:
    pytest.importorskip("opacus")
    noise = {
        name: settled(
            parse_guard(f"epsilon=3,accountant={name}"), find_method("fedncm")(), ONE_EXCHANGE, SITES, 3, sums()
        ).noise
        for name in ("zcdp", "rdp", "prv")
    }
    assert noise["prv"] < noise["rdp"] < noise["zcdp"]
    assert noise["prv"] == pytest.approx(1.3906, rel=0.02)  # the exact Gaussian mechanism, Balle and Wang, 2018


def test_training_and_prototypes_together_keep_to_it_whoever_is_smallest() -> None:
    pytest.importorskip("opacus")
    method, plan = find_method("fedproto_avg")(), Plan(epochs=(1, 1), batch=10)
    upload = ModelAndPrototypes(Mean(Weights({}, {}), 1.0), Mean(ClassTable.empty(3, 2, torch.zeros(1)), 1.0))
    guard = settled(parse_guard("epsilon=3"), method, plan, SITES, 3, upload)
    spent = {name: PrivacyLedger(guard, method, plan, SITES, upload).spent_by(name, (0, 1)) for name in SITES}
    assert 2.95 < max(spent.values()) <= 3
    assert guard.row_noise is not None
    less = guard.model_copy(update={"noise": 0.99 * guard.noise})
    assert max(PrivacyLedger(less, method, plan, SITES, upload).spent_by(name, (0, 1)) for name in SITES) > 3


def test_noise_on_a_secure_sum_is_shared_and_who_drops_out_takes_its_part_along() -> None:
    method = find_method("fedncm")()
    guard = settled(parse_guard("epsilon=3,secure=on"), method, ONE_EXCHANGE, SITES, 3)
    assert guard.among == 3
    ledger = PrivacyLedger(guard, method, ONE_EXCHANGE, SITES, sums())
    all_here, one_less = (
        PrivacyLedger(guard, method, ONE_EXCHANGE, SITES, sums(), {0: arrived}).after([(0, list(SITES))])
        for arrived in (3, 2)
    )
    assert all_here == ledger.after([(0, list(SITES))])
    assert all_here["epsilon"] == pytest.approx(3)
    rho = 1.5 * rho_of(3, 1e-5)
    assert one_less["epsilon"] == pytest.approx(rho + 2 * sqrt(rho * log(1e5)))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("epsilon=3,noise=1", "give only one of them"),
        ("epsilon=3,clip=1,row_noise=1", "give only one of them"),
        ("epsilon=3,train=plain", "guarantees nothing"),
        ("epsilon=0", "epsilon=0 is not valid"),
        ("epsilon=3,among=4", "unknown setting"),
    ],
)
def test_mistakes(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse_guard(text)


@pytest.mark.parametrize(
    ("method", "options", "words"),
    [
        ("fedncm", {"finetune": 1}, "omit finetune"),
        ("fedncm", {"min_count": 5}, "omit min_count"),
        ("protoridge", {"gram": "sketch"}, "no bound is known for a sketch"),
        ("protoridge", {"tune": "lam"}, "omit tune and rho"),
        ("protoridge", {"balance": "site"}, "balance=site"),
        ("fedcof", {"parts": 2}, "couples samples.*--guard unit=client,clip=1,epsilon=3"),
        ("i2pfl", {}, "couples samples.*--guard unit=client,clip=1,epsilon=3"),
    ],
)
def test_what_has_no_bound_is_refused(method: str, options: dict[str, object], words: str, tiny_run) -> None:
    pytest.importorskip("opacus")
    with pytest.raises(UserError, match=words):
        tiny_run(method, guard="epsilon=3", set=options)


def test_a_policy_compares_budgets() -> None:
    asked = parse_guard("epsilon=3,delta=1e-5")
    assert parse_guard("epsilon=2,delta=1e-6").at_least(asked)
    assert not parse_guard("epsilon=4").at_least(asked)
    assert not parse_guard("clip=1,noise=9").at_least(asked)
    assert not parse_guard("epsilon=3,delta=1e-3").at_least(asked)
    assert not parse_guard("epsilon=3,secure=on").at_least(asked), "its own noise is less"
    assert parse_guard("epsilon=3,secure=on").at_least(parse_guard("epsilon=3,secure=on"))

"""Thousands of damaged answers of a member at the server's door: refused or valid, never a crash, never memory."""

import importlib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.answers")


def check(outcome: Any) -> None:
    assert outcome.crashes == []
    assert outcome.passed
    # The attack itself works: what is cut or noise is never let in, and some odd numbers are valid.
    assert outcome.let_in["cut"] == outcome.let_in["noise"] == 0
    assert 0 < outcome.let_in["odd_values"] < outcome.tried["odd_values"]


def test_two_thousand_answers(answers: Any) -> None:
    check(answers.attack(2000, seed=1))


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_hundred_thousand_answers(answers: Any) -> None:
    check(answers.attack(100_000))

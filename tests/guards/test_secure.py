"""Secure aggregation: the sum is the plain one within the grid, also when a client drops out."""

from typing import Any

import numpy as np
import pytest
import torch

from protofed.errors import BadMessage
from protofed.guards import SecureTally, UploadWords
from protofed.guards.secure import FixedPointGrid
from protofed.records import ClassTable, Mean, Record, Tally, Weights


class Upload(Record):
    weights: Mean[Weights]
    P: Mean[ClassTable]
    Q: Mean[ClassTable]


SIZES = {"a": 30, "b": 100, "c": 7, "d": 55}


def upload(client: str) -> Upload:
    rng = torch.Generator().manual_seed(ord(client))
    weights = Weights({"w": torch.randn(6, 4, generator=rng)}, {"running_mean": torch.randn(3, generator=rng)})
    count = torch.tensor([SIZES[client] - 3.0, 3.0, 0.0])
    if client == "b":
        count[1] = 0
    table = ClassTable(torch.randn(3, 5, generator=rng) * (count > 0)[:, None], count)
    return Upload(Mean(weights, float(SIZES[client])), Mean(table, table.count), Mean(table, 1.0))


def secure_tally(participants: int, largest: float) -> SecureTally:
    return SecureTally(UploadWords(participants, SIZES, upload("a"), largest), participants, upload("a"))


def totals(clients: str, participants: str) -> tuple[Any, Any, SecureTally]:
    plain, secure = Tally(), secure_tally(len(participants), 32.0)
    for client in clients:
        plain.add(client, upload(client))
        secure.add(client, upload(client))
    return plain.total(), secure.total(), secure


@pytest.mark.parametrize(("clients", "participants"), [("abcd", "abcd"), ("abd", "abcd")])
def test_the_average_is_the_plain_one(clients: str, participants: str) -> None:
    plain, secure, tally = totals(clients, participants)
    assert tally.clients == list(clients)
    for found, expected in (
        (secure.weights.params["w"], plain.weights.params["w"]),
        (secure.weights.stats["running_mean"], plain.weights.stats["running_mean"]),
        (secure.P.rows, plain.P.rows),
        (secure.P.count, plain.P.count),
        (secure.Q.rows, plain.Q.rows),
    ):
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)
    assert torch.equal(secure.P.held, plain.P.held)


def test_a_sum_can_be_repeated() -> None:
    first, second = (totals("abc", "abc")[1].weights.params["w"] for _ in range(2))
    assert torch.equal(first, second)


def test_too_few_who_stay() -> None:
    with pytest.raises(RuntimeError, match="too few of 4 clients"):
        totals("ab", "abcd")


def test_a_number_that_does_not_fit_is_the_clients_fault() -> None:
    tally = secure_tally(3, 0.25)
    with pytest.raises(BadMessage, match=r"a: numbers up to .* raise secure_range"):
        tally.add("a", upload("a"))


@pytest.mark.parametrize("bits", [32, 64])
def test_the_sum_of_the_largest_numbers_of_all_clients_fits(bits: int) -> None:
    clients = 5
    grid = FixedPointGrid(2.0, clients, bits)
    total = np.zeros(2, dtype=grid.word)
    for _ in range(clients):
        total += grid.words(np.array([2.0, -2.0]), "a")
    assert grid.numbers(total).tolist() == [10.0, -10.0]


def test_numbers_become_the_nearest_points_of_the_grid() -> None:
    grid = FixedPointGrid(1.0, 2)
    step = float(grid.numbers(np.ones(1, dtype=grid.word))[0])
    found = grid.numbers(grid.words(np.array([0.7, -0.7, 0.2]) * step, "a"))
    assert found.tolist() == [step, -step, 0.0]

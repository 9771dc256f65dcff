"""No client counts more than its share, whatever it claims; and weights that are small enough count as they are."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protofed.records import ClassTable, Mean, Record, Sum, Tally, Weights
from protofed.records.shares import capped


def test_by_hand() -> None:
    # 97 of 100 is cut to c = 0.5 (c + 3).
    assert capped(torch.tensor([1.0, 97.0, 2.0]), 0.5).tolist() == [1.0, 3.0, 2.0]
    # Two are cut: c = 0.4 (2 c + 3).
    assert capped(torch.tensor([90.0, 1.0, 2.0, 80.0]), 0.4).tolist() == pytest.approx([6.0, 1.0, 2.0, 6.0])
    assert capped(torch.tensor([3.0, 4.0, 5.0]), 0.5).tolist() == [3.0, 4.0, 5.0]
    assert capped(torch.tensor([3.0, 0.0, 5.0]), 0.4).tolist() == [3.0, 0.0, 3.0]  # two cannot have 40 % each
    assert capped(torch.tensor([[9.0, 1.0], [1.0, 1.0], [1.0, 1.0]]), 0.5).tolist() == [
        [2.0, 1.0],
        [1.0, 1.0],
        [1.0, 1.0],
    ]


@given(st.lists(st.floats(0, 1e12), min_size=1, max_size=12), st.floats(0.01, 0.99))
def test_no_share_is_larger(weights: list[float], share: float) -> None:
    given_weights = torch.tensor(weights, dtype=torch.float64)
    cut = capped(given_weights, share)
    holders = int((given_weights > 0).sum())
    assert bool((cut <= given_weights).all())
    assert torch.equal(cut > 0, given_weights > 0)
    if holders:
        assert float(cut.max() / cut.sum()) <= max(share, 1 / holders) * (1 + 1e-9)


class Upload(Record):
    weights: Mean[Weights]
    P: Mean[ClassTable]
    S: Sum[ClassTable]


def upload(value: float, weight: float, counts: list[float]) -> Upload:
    table = ClassTable(torch.full((2, 1), value) * (torch.tensor(counts) > 0)[:, None], torch.tensor(counts))
    return Upload(
        Mean(Weights({"w": torch.tensor([value])}, {}), weight),
        Mean(table, table.count.double()),
        Sum(table, table.count.double()),
    )


def total(share: float | None) -> Any:
    tally = Tally(max_share=share)
    tally.add("a", upload(1.0, 10.0, [5.0, 5.0]))
    tally.add("b", upload(4.0, 980.0, [900.0, 80.0]))
    tally.add("c", upload(1.0, 10.0, [10.0, 0.0]))
    return tally.total()


def test_a_large_claim_is_cut_in_every_field() -> None:
    found = total(0.5)
    assert found.weights.params["w"].tolist() == pytest.approx([(10 + 20 * 4 + 10) / 40])
    assert found.P.rows[:, 0].tolist() == pytest.approx([(5 + 15 * 4 + 10) / 30, (5 + 5 * 4) / 10])
    # As if b had 20 of its 980 samples: 900 and 80 become 18.4 and 1.6, and its sums with them.
    assert found.S.count.tolist() == pytest.approx([15 + 900 / 49, 5 + 80 / 49])
    assert found.S.rows[:, 0].tolist() == pytest.approx([15 + 4 * 900 / 49, 5 + 4 * 80 / 49])


def test_nothing_changes_where_nobody_is_cut() -> None:
    capped_total, plain = total(0.99), total(None)
    assert torch.equal(capped_total.weights.params["w"], plain.weights.params["w"])
    assert torch.equal(capped_total.P.rows, plain.P.rows)
    assert torch.equal(capped_total.S.rows, plain.S.rows)

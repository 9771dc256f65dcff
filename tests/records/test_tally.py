"""The sum over clients: weighted means in float64, absent classes, clients one by one."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from protofed.records import (
    ClassTable,
    Each,
    Mean,
    Nothing,
    Record,
    Sums,
    Tally,
    Weights,
    adds_up,
    decode,
    encode,
)


class Upload(Record):
    """A model, prototypes weighted in three ways, and something by client."""

    weights: Mean[Weights]
    plain: Mean[ClassTable]
    by_count: Mean[ClassTable]
    numbers: Mean[dict[str, Tensor]]
    table: Each[ClassTable]


def upload(values: Tensor, size: float, table: ClassTable) -> Upload:
    return Upload(
        weights=Mean(Weights({"w": values}, {"bn": values + 1}), size),
        plain=Mean(table, 1.0),
        by_count=Mean(table, table.count),
        numbers=Mean({"loss": values[0]}, size),
        table=Each(table),
    )


@st.composite
def uploads(draw: st.DrawFn) -> dict[str, Upload]:
    """One to six clients with some of the classes each."""
    clients, classes = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    found = {}
    for i in range(clients):
        count = torch.tensor(draw(st.lists(st.integers(0, 9), min_size=classes, max_size=classes))).float()
        rows = torch.randn(classes, 3, generator=rng) * (count > 0)[:, None]
        size = draw(st.integers(1, 1000))
        found[f"site-{i}"] = upload(torch.randn(4, generator=rng), float(size), ClassTable(rows, count))
    return found


def folded(found: dict[str, Upload]) -> Any:
    tally = Tally()
    for client, one in found.items():
        tally.add(client, one)
    return tally.total()


@settings(max_examples=60)
@given(uploads())
def test_means_are_those_of_numpy(found: dict[str, Upload]) -> None:
    total = folded(found)
    listed = list(found.values())
    sizes = np.array([one.weights.weight for one in listed])
    for found_mean, values in (
        (total.weights.params["w"], [one.weights.value.params["w"] for one in listed]),
        (total.weights.stats["bn"], [one.weights.value.stats["bn"] for one in listed]),
        (total.numbers["loss"], [one.numbers.value["loss"] for one in listed]),
    ):
        expected = np.average(torch.stack(values).double().numpy(), axis=0, weights=sizes)
        np.testing.assert_allclose(found_mean, expected, rtol=2**-23, atol=1e-12)
    assert total.weights.params["w"].dtype == torch.float32
    rows = np.stack([one.table.value.rows.double().numpy() for one in listed])
    count = np.stack([one.table.value.count.double().numpy() for one in listed])
    for k in range(count.shape[1]):
        owners = count[:, k] > 0
        if owners.any():
            np.testing.assert_allclose(total.plain.rows[k], rows[owners, k].mean(0), rtol=1e-6, atol=1e-7)
            np.testing.assert_allclose(
                total.by_count.rows[k], np.average(rows[:, k], axis=0, weights=count[:, k]), rtol=1e-6, atol=1e-7
            )
        else:
            assert not total.plain.rows[k].any()
        assert total.plain.count[k] == total.by_count.count[k] == count[:, k].sum()
    assert list(total.table) == list(found)
    assert all(total.table[client] is one.table.value for client, one in found.items())


@settings(max_examples=40)
@given(uploads(), st.randoms(use_true_random=False))
def test_the_order_of_clients_does_not_matter_to_rounding(found: dict[str, Upload], chance: Any) -> None:
    order = list(found)
    chance.shuffle(order)
    one, other = folded(found), folded({client: found[client] for client in order})
    for left, right in (
        (one.weights.params["w"], other.weights.params["w"]),
        (one.plain.rows, other.plain.rows),
        (one.by_count.rows, other.by_count.rows),
    ):
        torch.testing.assert_close(left, right, rtol=2**-22, atol=1e-10)
    assert torch.equal(one.plain.count, other.plain.count)


@settings(max_examples=40)
@given(uploads(), st.integers(0, 3))
def test_a_client_without_a_class_never_changes_its_prototype(found: dict[str, Upload], k: int) -> None:
    classes = len(next(iter(found.values())).table.value.count)
    k = min(k, classes - 1)
    generous = torch.full((classes,), 7.0)
    generous[k] = 0
    rows = torch.full((classes, 3), 1e6)
    rows[k] = 123.0  # whatever lies in the row of a class that is not held
    more = {**found, "newcomer": upload(torch.ones(4), 1e5, ClassTable(rows, generous))}
    before, after = folded(found), folded(more)
    assert torch.equal(before.plain.rows[k], after.plain.rows[k])
    assert torch.equal(before.by_count.rows[k], after.by_count.rows[k])
    assert before.plain.count[k] == after.plain.count[k]


class Added(Record):
    """An upload of which only the sum is seen."""

    weights: Mean[Weights]
    plain: Mean[ClassTable]
    by_count: Mean[ClassTable]


@settings(max_examples=40)
@given(uploads(), st.integers(1, 3))
def test_groups_that_are_added_up_elsewhere_give_the_same_bits(found: dict[str, Upload], size: int) -> None:
    mine = {client: Added(one.weights, one.plain, one.by_count) for client, one in found.items()}
    like = next(iter(mine.values()))
    groups = [list(mine)[start : start + size] for start in range(0, len(mine), size)]
    here, there = Tally(), Tally()
    for group in groups:
        elsewhere = Tally()
        for client in group:
            here.add(client, mine[client])
            elsewhere.add(client, mine[client])
        here.end_group()
        there.add_group(group, decode(encode(elsewhere.sums(), "group").blob, Sums.like(like), "group"), like)
    assert here.clients == there.clients == list(mine)
    one, other, plain = here.total(), there.total(), folded(found)
    for name in ("plain", "by_count"):
        assert torch.equal(getattr(one, name).rows, getattr(other, name).rows)
        assert torch.equal(getattr(one, name).count, getattr(other, name).count)
        torch.testing.assert_close(getattr(one, name).rows, getattr(plain, name).rows, rtol=2**-22, atol=1e-10)
    assert torch.equal(one.weights.params["w"], other.weights.params["w"])
    torch.testing.assert_close(one.weights.params["w"], plain.weights.params["w"], rtol=2**-22, atol=1e-10)


def test_what_is_seen_client_by_client_does_not_add_up() -> None:
    table = ClassTable(torch.ones(2, 3), torch.ones(2))
    whole = upload(torch.ones(4), 1.0, table)
    assert not adds_up(whole)
    assert adds_up(Added(whole.weights, whole.plain, whole.by_count))


def test_sums_are_in_float64() -> None:
    tally = Tally()
    many = 20_000
    for i in range(many):
        tally.add(str(i), _One(Mean(torch.tensor([0.1]), 1.0)))
    assert tally.total().value.item() == torch.tensor(0.1).item()


class _One(Record):
    value: Mean[Any]


def _mean(*items: tuple[Any, Any]) -> Any:
    tally = Tally()
    for i, (value, weight) in enumerate(items):
        tally.add(str(i), _One(Mean(value, weight)))
    return tally.total().value


def test_gt_01() -> None:
    assert _mean((torch.tensor([1.0, 2.0]), 1), (torch.tensor([5.0, -2.0]), 3)).tolist() == [4, -1]


@pytest.mark.parametrize(("by_count", "expected"), [(False, [2.0, 1.0]), (True, [2.5, 1.5])])
def test_gt_16(by_count: bool, expected: list[float]) -> None:
    tables = [_table([1.0, 0.0], 10), _table([3.0, 2.0], 30)]
    mean = _mean(*((table, table.count if by_count else 1.0) for table in tables))
    assert mean.rows[0].tolist() == expected
    assert mean.count.tolist() == [40, 0]


def test_gt_29_owners_only() -> None:
    lacks = ClassTable(torch.zeros(2, 2), torch.tensor([0.0, 5.0]))
    mean = _mean((_table([0.9, 0.8], 3), 1.0), (_table([0.2, 0.8], 9), 1.0), (lacks, 1.0))
    torch.testing.assert_close(mean.rows[0], torch.tensor([0.55, 0.80]))


def _table(row: list[float], count: float) -> ClassTable:
    return ClassTable(torch.tensor([row, [0.0, 0.0]]), torch.tensor([count, 0.0]))


def test_a_class_nobody_weighs_is_held_by_nobody() -> None:
    mean = _mean((_table([1.0, 1.0], 4), torch.tensor([0.0, 1.0])))
    assert mean.count.tolist() == [0, 0]
    assert not mean.rows.any()


def test_nothing_sums_to_nothing() -> None:
    tally = Tally()
    tally.add("a", Nothing())
    tally.add("b", Nothing())
    assert vars(tally.total()) == {}
    assert tally.clients == ["a", "b"]


def test_an_upload_of_something_else_is_refused() -> None:
    class Bare(Record):
        value: Tensor

    with pytest.raises(TypeError, match="'value' must be a Mean or an Each, not Tensor"):
        Tally().add("a", Bare(torch.ones(1)))

"""Robust averages: what they make of a few values by hand, and that one hostile client cannot move them far."""

from typing import Any

import pytest
import torch
from torch import Tensor

from protofed.errors import UserError
from protofed.records import ClassTable, Each, Mean, Record, Sum, Tally, Weights, parse_robust


class Upload(Record):
    weights: Mean[Weights]
    P: Mean[ClassTable]


def upload(value: Tensor, rows: Tensor, count: list[float], weight: float = 1.0) -> Upload:
    return Upload(Mean(Weights({"w": value}, {}), weight), Mean(ClassTable(rows, torch.tensor(count)), 1.0))


def total(rule: str, *uploads: Any) -> Any:
    tally = Tally(parse_robust(rule))
    for index, one in enumerate(uploads):
        tally.add(f"site-{index}", one)
    return tally.total()


def numbers(rule: str, values: list[float], weights: list[float] | None = None) -> float:
    """What a rule makes of numbers."""
    uploads = [
        upload(torch.tensor([value]), torch.zeros(1, 1), [0.0], weight)
        for value, weight in zip(values, weights or [1.0] * len(values), strict=True)
    ]
    return float(total(rule, *uploads).weights.params["w"])


def test_by_hand() -> None:
    values = [1.0, 2.0, 3.0, 4.0, 100.0]
    assert numbers("median", values) == 3.0
    assert numbers("median", values[:4]) == 2.5
    assert numbers("trimmed=0.2", values) == 3.0
    assert numbers("trimmed=0.2", [0.0, 1.0, 2.0, 3.0, 5.0]) == 2.0
    assert numbers("trimmed=0.1", [0.0, 1.0, 2.0, 3.0, 5.0]) == pytest.approx(2.2)  # nobody is cut from five
    # Distances from the median 3: 2, 1, 0, 1, 97; the median client's is 1, so -1, -1, 0, 1, 1 are left.
    assert numbers("norm-bound=1", values) == pytest.approx(3.0)
    assert numbers("norm-bound=3", values) == pytest.approx(3.0 + (-2 - 1 + 0 + 1 + 3) / 5)


def test_krum_by_hand() -> None:
    """Two nearest of five, squared distances: 1 + 4, 1 + 1, 1 + 1, 1 + 4 and 96 x 96 + 97 x 97: the last one goes."""
    assert numbers("krum=0.2", [1.0, 2.0, 3.0, 4.0, 100.0]) == pytest.approx(2.5)
    assert numbers("krum=0.1", [1.0, 2.0, 3.0, 4.0, 100.0]) == pytest.approx(22.0)  # of five, nobody
    # Of six two go, each judged by two: 2.5 is next to two others, 10 and 12 have but one.
    assert numbers("krum=0.34", [1.0, 2.0, 2.5, 4.0, 10.0, 12.0]) == pytest.approx((1 + 2 + 2.5 + 4) / 4)


def test_krum_leaves_a_client_out_as_a_whole() -> None:
    """Where most of its value is like the others' it is still the odd one, and no part of it is left."""
    sent = [upload(torch.tensor([1.0 + k / 100, 5.0]), torch.zeros(1, 1), [0.0]) for k in range(4)]
    lie = upload(torch.tensor([1.3, -50.0]), torch.zeros(1, 1), [0.0])
    assert total("krum=0.2", *sent, lie).weights.params["w"].tolist() == pytest.approx([1.015, 5.0])


def test_krum_keeps_a_class_that_only_those_left_out_hold() -> None:
    value = torch.zeros(1)
    alike = [upload(value, torch.tensor([[1.0 + k / 100], [0.0]]), [2.0, 0.0]) for k in range(4)]
    found = total("krum=0.2", *alike, upload(value, torch.tensor([[9.0], [7.0]]), [2.0, 3.0]))
    assert found.P.rows[:, 0].tolist() == pytest.approx([1.015, 7.0])


@pytest.mark.parametrize("rule", ["median", "trimmed=0.2", "norm-bound=1", "krum=0.2"])
def test_one_of_five_cannot_move_it_far(rule: str) -> None:
    honest = [1.0, 1.1, 0.9, 1.05]
    for lie in (-1e9, 1e9):
        assert 0.8 < numbers(rule, [*honest, lie], [1.0, 1.0, 1.0, 1.0, 1e9]) < 1.2


@pytest.mark.parametrize("rule", ["median", "trimmed=0.2", "norm-bound=1", "krum=0.2"])
def test_what_all_agree_on_stays(rule: str) -> None:
    one = upload(torch.tensor([1.0, -2.0]), torch.tensor([[3.0, 4.0], [0.0, 0.0]]), [5.0, 0.0])
    found = total(rule, one, one, one)
    assert torch.equal(found.weights.params["w"], torch.tensor([1.0, -2.0]))
    assert torch.equal(found.P.rows, torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
    assert torch.equal(found.P.count, torch.tensor([5.0, 0.0]))


def test_a_class_is_averaged_over_its_owners() -> None:
    value = torch.zeros(1)
    found = total(
        "median",
        upload(value, torch.tensor([[1.0], [0.0]]), [2.0, 0.0]),
        upload(value, torch.tensor([[3.0], [7.0]]), [4.0, 1.0]),
        upload(value, torch.tensor([[9.0], [0.0]]), [1000.0, 0.0]),
    )
    assert found.P.rows[:, 0].tolist() == [3.0, 7.0]
    assert found.P.count.tolist() == [4.0, 1.0]  # a claimed count of 1000 does not count


class Separate(Record):
    P: Each[ClassTable]
    model: Each[Weights]


def separate(row: list[float], model: list[float], count: float = 3.0) -> Separate:
    table = ClassTable(torch.tensor([row, [0.0, 0.0]]), torch.tensor([count, 0.0]))
    return Separate(Each(table), Each(Weights({"w": torch.tensor(model)}, {})))


def test_what_is_used_client_by_client_is_drawn_in() -> None:
    """Distances from the median (0, 0): 1, 1, 1, 1 and 50; twice the median distance is 2."""
    honest = [
        ([1.0, 0.0], [0.0, 1.0]),
        ([-1.0, 0.0], [0.0, -1.0]),
        ([0.0, 1.0], [1.0, 0.0]),
        ([0.0, -1.0], [-1.0, 0.0]),
    ]
    sent = [*(separate(*each) for each in honest), separate([30.0, 40.0], [-30.0, -40.0])]
    found = total("median", *sent)
    for k, (row, model) in enumerate(honest):
        assert found.P[f"site-{k}"].rows[0].tolist() == pytest.approx(row)
        assert found.model[f"site-{k}"].params["w"].tolist() == pytest.approx(model)
    assert found.P["site-4"].rows.tolist() == [pytest.approx([1.2, 1.6]), [0.0, 0.0]]
    assert found.P["site-4"].count.tolist() == [3.0, 0.0]
    assert found.model["site-4"].params["w"].tolist() == pytest.approx([-1.2, -1.6])


def test_krum_puts_the_mean_of_the_others_in_the_place_of_who_is_left_out() -> None:
    """What is used client by client: the others' is used as it is, however far apart they are."""
    honest = [([1.0, 0.0], [0.0, 1.0]), ([2.0, 0.0], [0.0, 4.0]), ([0.0, 1.0], [1.0, 0.0]), ([5.0, 3.0], [3.0, 3.0])]
    sent = [*(separate(*each) for each in honest), separate([30.0, 40.0], [-30.0, -40.0])]
    found = total("krum=0.2", *sent)
    for k, (row, model) in enumerate(honest):
        assert found.P[f"site-{k}"].rows[0].tolist() == row
        assert found.model[f"site-{k}"].params["w"].tolist() == model
    assert found.P["site-4"].rows.tolist() == [pytest.approx([2.0, 1.0]), [0.0, 0.0]]
    assert found.model["site-4"].params["w"].tolist() == pytest.approx([1.0, 2.0])


class Moments(Record):
    gram: Sum[ClassTable]


@pytest.mark.parametrize("rule", ["median", "trimmed=0.2", "norm-bound=1", "krum=0.2"])
def test_one_of_five_cannot_move_a_second_moment(rule: str) -> None:
    """What the closed-form heads are computed from: G / n and n, of which the server sees the sum."""
    honest = [
        Moments(Sum(ClassTable(torch.tensor([[g, 0.0, g]]), torch.tensor([20.0])), 20.0)) for g in (1, 1.1, 0.9, 1)
    ]
    lie = Moments(Sum(ClassTable(torch.tensor([[-50.0, 1e6, 50.0]]), torch.tensor([20.0])), 20.0))
    found = total(rule, *honest, lie).gram
    mean = found.rows[0] / found.count
    assert mean.tolist() == pytest.approx([1.0, 0.0, 1.0], abs=0.12)


@pytest.mark.parametrize("rule", ["median", "trimmed=0.2"])
def test_second_moments_are_drawn_in_as_a_whole(rule: str) -> None:
    """Three clients with one direction each: the median of every coordinate would be zero, the moment of nothing."""
    directions = [torch.tensor(v) for v in ([2.0, 0.0, 0.0], [0.0, 2.0, 0.0], [0.0, 0.0, 2.0])]
    sent = [Moments(Sum(ClassTable(v.outer(v).reshape(1, -1), torch.tensor([9.0])), 9.0)) for v in directions]
    found = total(rule, *sent).gram
    mean = (found.rows[0] / found.count).reshape(3, 3)
    assert torch.allclose(mean, torch.eye(3, dtype=mean.dtype) * 4 / 3)


@pytest.mark.parametrize("rule", ["median", "trimmed=0.2", "norm-bound=1", "krum=0.2"])
def test_a_second_moment_under_attack_is_still_one(rule: str) -> None:
    """Four honest sites and one that sends the reverse: no eigenvalue may turn negative, the smallest decides most."""
    rng = torch.Generator().manual_seed(0)
    scale = torch.logspace(0, -3, 12)
    features = [torch.randn(40, 12, generator=rng) * scale for _ in range(5)]
    grams = [(x.T @ x / len(x)).reshape(1, -1) for x in features]
    grams[-1] = -5 * grams[-1]
    found = total(rule, *(Moments(Sum(ClassTable(gram, torch.tensor([40.0])), 40.0)) for gram in grams)).gram
    mean = (found.rows[0] / found.count).reshape(12, 12)
    honest = torch.cat(features[:4])
    smallest = torch.linalg.eigvalsh((honest.T @ honest / len(honest)).double())[0]
    assert torch.linalg.eigvalsh(mean)[0] > 0.5 * smallest


def test_who_is_far_counts_by_the_square_of_it() -> None:
    """Medians of the distances to the others: 2, 1, 2, 4, and of these 2; so the last one counts a quarter."""
    sent = [Moments(Sum(ClassTable(torch.tensor([[v]]), torch.tensor([2.0])), 2.0)) for v in (0.0, 1.0, 2.0, 5.0)]
    found = total("norm-bound=1", *sent).gram
    assert float(found.rows[0] / found.count) == pytest.approx((0 + 1 + 2 + 5 / 4) / (3 + 1 / 4))


def test_types_are_kept() -> None:
    one = upload(torch.ones(2, dtype=torch.float32), torch.ones(1, 2), [1.0])
    assert total("norm-bound=1", one, one).weights.params["w"].dtype == torch.float32


@pytest.mark.parametrize(
    "text", ["mode", "median=1", "trimmed=0.5", "trimmed=x", "norm-bound=0", "norm-bound=inf", "krum=0.5", ""]
)
def test_other_rules_are_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"robust=.*(median, trimmed|takes a)"):
        parse_robust(text)

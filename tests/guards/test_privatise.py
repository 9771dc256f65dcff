"""What leaves a client: bounds hold for any input, noise is as strong as it is said to be, counts are hidden."""

from math import sqrt
from typing import Any

import pytest
import torch
from torch import Tensor

from protofed.guards import guard_rows, parse_guard, privatise
from protofed.records import ClassTable, Each, Features, Mean, Record, Weights
from protofed.verbs import class_means


class Model(Record):
    weights: Weights


class Upload(Record):
    weights: Mean[Weights]
    P: Mean[ClassTable]


class Bank(Record):
    U: Each[Features]


DIM, CLASSES = 400, 5
NO_NOISE = 1e-9


def table(count: float = 50.0) -> ClassTable:
    rows = torch.ones(CLASSES, DIM) / sqrt(DIM)
    rows[-1] = 0
    return ClassTable(rows, torch.tensor([count] * (CLASSES - 1) + [0.0]))


def upload(change: Tensor, weight: Any = 50.0) -> Upload:
    model = Weights({"w": torch.full((DIM,), 2.0) + change}, {"running_var": torch.full((2,), 1e-6)})
    return Upload(Mean(model, weight), Mean(table(), table().count))


def received() -> Model:
    return Model(Weights({"w": torch.full((DIM,), 2.0)}, {"running_var": torch.full((2,), 1e-6)}))


def test_rows_are_clipped_and_short_ones_stay(make_at) -> None:
    seen = {"h": torch.tensor([[3.0, 4.0], [0.3, 0.4]]), "c": torch.tensor([[0.9], [0.8]]), "y": torch.tensor([0, 1])}
    got = guard_rows(parse_guard("clip=1"), seen, make_at())
    assert torch.allclose(got["h"], torch.tensor([[0.6, 0.8], [0.3, 0.4]]))
    assert torch.equal(got["c"], seen["c"])
    assert torch.equal(got["y"], seen["y"])


def test_embeddings_with_a_shape_are_clipped_as_a_whole(make_at) -> None:
    got = guard_rows(parse_guard("clip=2"), {"u": torch.ones(3, 4, 2, 2)}, make_at())
    assert torch.allclose(got["u"].flatten(1).norm(dim=1), torch.full((3,), 2.0))


def test_a_part_of_the_samples_is_used(make_at) -> None:
    seen = {"h": torch.arange(2000.0)[:, None].expand(-1, 2), "y": torch.arange(2000)}
    got = guard_rows(parse_guard("subsample=0.25"), seen, make_at())
    assert 400 < len(got["y"]) < 600
    assert torch.equal(got["h"][:, 0].long(), got["y"])
    other = guard_rows(parse_guard("subsample=0.25"), seen, make_at(round=1))
    assert not torch.equal(got["y"][:50], other["y"][:50])


def test_one_sample_changes_sums_by_the_bound_and_a_count_by_one(make_at) -> None:
    """The sensitivity that the noise is made for, on samples that try to exceed it."""
    guard = parse_guard("clip=1")
    h, y = 100 * torch.randn(40, 6, generator=torch.Generator().manual_seed(0)), torch.arange(40) % 3
    with_it, without = (
        class_means(seen["h"], seen["y"], 3)
        for seen in (guard_rows(guard, {"h": h[: 40 - k], "y": y[: 40 - k]}, make_at()) for k in (0, 1))
    )
    change = with_it.rows * with_it.count[:, None] - without.rows * without.count[:, None]
    assert float(change.norm()) == pytest.approx(1.0, abs=1e-4)
    assert float((with_it.count - without.count).abs().sum()) == 1.0


def test_noise_on_means_and_counts_is_what_was_asked_for(make_at) -> None:
    guard = parse_guard("clip=1,noise=2,row_noise=3")
    # Short rows of many samples, of which no noised mean is longer than the bound.
    short = ClassTable(table().rows * 0.1, table().count * 100)
    sent = Upload(upload(torch.zeros(DIM)).weights, Mean(short, short.count))
    private = privatise(guard, sent, make_at(down=received()))
    deviation = 3 * sqrt(2)  # rows and counts share one mechanism
    noise = (private.P.value.rows * private.P.value.count[:, None] - short.rows * short.count[:, None])[:-1]
    assert noise.std() == pytest.approx(deviation, rel=0.1)
    assert not torch.equal(private.P.value.count[:-1], short.count[:-1])
    many = [
        privatise(guard, upload(torch.zeros(DIM)), make_at(down=received(), seed=s)).P.value.count[0]
        for s in range(300)
    ]
    assert torch.stack(many).std() == pytest.approx(deviation, rel=0.15)
    assert torch.equal(private.P.weight, private.P.value.count.double())  # not the true counts
    assert torch.equal(private.weights.value.params["w"], upload(torch.zeros(DIM)).weights.value.params["w"])
    assert private.weights.weight == 1.0


def test_means_are_still_means_where_noise_is_hardly_any(make_at) -> None:
    private = privatise(parse_guard(f"clip=1,noise={NO_NOISE}"), upload(torch.zeros(DIM)), make_at(down=received()))
    torch.testing.assert_close(private.P.value.rows, table().rows, atol=1e-5, rtol=0)


def test_a_class_of_few_samples_is_not_told_from_noise(make_at) -> None:
    few = Upload(upload(torch.zeros(DIM)).weights, Mean(table(count=2.0), 1.0))
    held = [
        privatise(parse_guard("clip=1,noise=4"), few, make_at(down=received(), seed=seed)).P.value.held
        for seed in range(50)
    ]
    assert torch.stack(held).float().mean() < 0.15
    assert torch.stack(held)[:, -1].any() or torch.stack(held)[:, 0].float().mean() < 0.3


def test_no_mean_is_longer_than_the_bound(make_at) -> None:
    private = privatise(parse_guard("clip=1,noise=5"), upload(torch.zeros(DIM)), make_at(down=received()))
    assert private.P.value.rows.norm(dim=1).max() <= 1 + 1e-5


def test_a_client_changes_the_weights_by_the_bound(make_at) -> None:
    guard = parse_guard(f"unit=client,clip=0.5,noise={NO_NOISE},row_clip=0.25")
    private = privatise(guard, upload(torch.full((DIM,), 100.0)), make_at(down=received()))
    change = private.weights.value.params["w"] - 2.0
    assert float(change.norm()) == pytest.approx(0.5, rel=1e-4)
    assert torch.allclose(private.P.value.rows[:-1].norm(dim=1), torch.tensor(0.25))
    assert private.P.value.count.tolist() == [1.0] * (CLASSES - 1) + [0.0]
    assert private.weights.weight == 1.0
    small = privatise(guard, upload(torch.full((DIM,), 1e-3)), make_at(down=received()))
    assert torch.allclose(small.weights.value.params["w"], torch.full((DIM,), 2.001), atol=1e-5)


def test_noise_of_a_client_is_what_was_asked_for(make_at) -> None:
    guard = parse_guard("unit=client,clip=0.5,noise=3")
    private = privatise(guard, upload(torch.zeros(DIM)), make_at(down=received()))
    assert (private.weights.value.params["w"] - 2).std() == pytest.approx(3 * 0.5 * sqrt(2), rel=0.1)  # two fields
    assert not private.P.value.held.any()  # of prototypes nothing is left
    assert (private.weights.value.stats["running_var"] >= 0).all()


def test_prototypes_that_stand_out_of_the_noise_are_held(make_at) -> None:
    guard = parse_guard("unit=client,clip=1,noise=0.01")
    private = privatise(guard, upload(torch.zeros(DIM)), make_at(down=received()))
    assert private.P.value.held.tolist() == [True] * (CLASSES - 1) + [False]


def test_embeddings_are_noised_one_by_one(make_at) -> None:
    rows = torch.zeros(50, DIM)
    bank = Bank(Each(Features(rows, torch.zeros(50, dtype=torch.long), 2)))
    private = privatise(parse_guard("clip=1,noise=0.5,train=plain"), bank, make_at())
    assert private.U.value.rows.std() == pytest.approx(0.5 * 2, rel=0.05)


def test_noise_is_keyed_by_client_and_round_or_never_the_same(make_at) -> None:
    def noised(source: str, **where: Any) -> Tensor:
        guard = parse_guard(f"unit=client,clip=1,noise=1,source={source}")
        at = make_at(down=received(), clients={"a": 1, "b": 1}, **where)
        return privatise(guard, upload(torch.zeros(DIM)), at).weights.value.params["w"]

    assert torch.equal(noised("seed"), noised("seed"))
    assert not torch.equal(noised("seed"), noised("seed", round=1))
    assert not torch.equal(noised("seed"), noised("seed", client="b"))
    assert not torch.equal(noised("system"), noised("system"))
    # Drawn anew each time: the deviation of 400 numbers strays by 3.5 %.
    assert (noised("system") - 2).std() == pytest.approx(sqrt(2), rel=0.25)


def test_without_noise_nothing_is_changed(make_at) -> None:
    plain = upload(torch.zeros(DIM))
    assert privatise(parse_guard("clip=1,quantise=8"), plain, make_at(down=received())) is plain

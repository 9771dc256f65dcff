"""The words methods are written in: golden vectors and properties."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from protofed.records import ClassTable
from protofed.seeding import generator
from protofed.verbs import (
    beta_draw,
    class_means,
    cosine,
    ema,
    finch,
    finch_centres,
    info_nce,
    nearest_prototype,
    one_hot,
    pack_symmetric,
    pull,
    stack_tables,
    unpack_symmetric,
)


def at_angles(*degrees: float) -> Tensor:
    radians = torch.tensor(degrees, dtype=torch.float64) * math.pi / 180
    return torch.stack([radians.cos(), radians.sin()], 1)


def table(rows: list[list[float]], count: list[float] | None = None) -> ClassTable:
    return ClassTable(torch.tensor(rows), torch.ones(len(rows)) if count is None else torch.tensor(count))


def same_grouping(left: Tensor, right: Tensor) -> bool:
    """Equal but for the names of the groups."""
    return torch.equal(left[:, None] == left, right[:, None] == right)


# pull: GT-17, GT-30

H = torch.tensor([[1.0, 1.0], [0.0, 2.0], [5.0, 5.0]])
Y = torch.tensor([0, 0, 1])
G = table([[2.0, 1.0], [0.0, 0.0]], [1.0, 0.0])


@pytest.mark.parametrize(
    ("reduction", "missing", "expected"),
    [("mse", "skip", 1.0), ("sq_l2", "skip", 3.0), ("mse", "zero", 9.333333)],
)
def test_gt_17_and_30(reduction: str, missing: str, expected: float) -> None:
    assert pull(H, G, Y, reduction, missing).item() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("reduction", ["mse", "sq_l2"])
@pytest.mark.parametrize("missing", ["skip", "zero"])
def test_pull_to_nothing_is_exactly_zero_without_gradient(reduction: str, missing: str) -> None:
    h = H.clone().requires_grad_()
    loss = pull(h, ClassTable.empty(2, 2, h), Y, reduction, missing)
    assert loss.item() == 0
    assert not torch.autograd.grad(loss, h)[0].any()


# info_nce: GT-26


def test_gt_26() -> None:
    h, y = torch.tensor([[3.0, 4.0], [1.0, 0.0]]), torch.tensor([0, 1])
    G = table([[0.0, 1.0], [1.0, 0.0]])
    assert info_nce(h, G, y, 0.5).item() == pytest.approx(0.319972, abs=1e-5)
    for row, expected in ((0, 0.513015), (1, 0.126928)):
        assert info_nce(h[row : row + 1], G, y[row : row + 1], 0.5).item() == pytest.approx(expected, abs=1e-5)


def test_info_nce_skips_classes_and_samples_without_prototype() -> None:
    h = torch.randn(4, 3, generator=generator(0, "h"))
    rows = torch.randn(3, 3, generator=generator(0, "G"))
    y = torch.tensor([0, 1, 2, 0])
    # Class 2 has no prototype: as if it and its samples did not exist, whatever lies in its row.
    masked = info_nce(h, ClassTable(rows, torch.tensor([1.0, 4.0, 0.0])), y, 0.07)
    smaller = info_nce(h[[0, 1, 3]], ClassTable(rows[:2], torch.ones(2)), y[[0, 1, 3]], 0.07)
    torch.testing.assert_close(masked, smaller)


@pytest.mark.parametrize("tau", [0.02, 0.07, 1.0])
def test_info_nce_without_prototypes_is_exactly_zero_and_differentiable(tau: float) -> None:
    h = torch.zeros(3, 2).requires_grad_()  # also features of length zero have a finite gradient
    loss = info_nce(h, ClassTable.empty(4, 2, h), torch.tensor([0, 3, 3]), tau)
    assert loss.item() == 0
    assert not torch.autograd.grad(loss, h)[0].any()


@settings(max_examples=50)
@given(st.integers(0, 10**6), st.sampled_from([0.02, 0.07, 0.5]), st.lists(st.integers(0, 3), min_size=4, max_size=4))
def test_info_nce_is_finite_and_not_negative(seed: int, tau: float, count: list[int]) -> None:
    rng = generator(seed, "nce")
    h = torch.randn(5, 3, generator=rng).requires_grad_()
    G = ClassTable(torch.randn(4, 3, generator=rng), torch.tensor(count).float())
    loss = info_nce(h, G, torch.randint(0, 4, (5,), generator=rng), tau)
    assert loss.item() >= 0
    assert torch.isfinite(torch.autograd.grad(loss, h)[0]).all()


def test_cosine_of_zero_is_zero() -> None:
    assert cosine(torch.zeros(1, 2), torch.tensor([[1.0, 0.0], [0.0, 0.0]])).tolist() == [[0, 0]]


# class means


def test_one_hot() -> None:
    y = torch.tensor([2, 0, 2])
    expected = torch.nn.functional.one_hot(y, 4).double()
    assert torch.equal(one_hot(y, 4, torch.zeros(1, dtype=torch.float64)), expected)
    assert torch.equal(torch.vmap(lambda labels: one_hot(labels, 4, torch.zeros(1)))(y[None])[0], expected.float())


@settings(max_examples=40)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.integers(0, 10**6))
def test_class_means_are_those_of_numpy(labels: list[int], seed: int) -> None:
    y = torch.tensor(labels)
    h = torch.randn(len(y), 3, generator=generator(seed, "h"), dtype=torch.float64)
    weight = torch.rand(len(y), generator=generator(seed, "w"), dtype=torch.float64) + 0.1
    plain, weighted = class_means(h, y, 5), class_means(h, y, 5, weight)
    for k in range(5):
        mine = (y == k).numpy()
        assert plain.count[k] == weighted.count[k] == mine.sum()
        if mine.any():
            np.testing.assert_allclose(plain.rows[k], h.numpy()[mine].mean(0), atol=1e-12)
            expected = np.average(h.numpy()[mine], axis=0, weights=weight.numpy()[mine])
            np.testing.assert_allclose(weighted.rows[k], expected, atol=1e-12)
        else:
            assert not plain.rows[k].any()


def test_stack_tables() -> None:
    rows, count = stack_tables([table([[1.0, 2.0]], [3.0]), table([[3.0, 4.0]], [0.0])])
    assert rows.tolist() == [[[1, 2]], [[3, 4]]]
    assert count.tolist() == [[3], [0]]


# nearest prototype


def test_nearest_prototype() -> None:
    G = table([[0.0, 0.0], [4.0, 0.0], [1.0, 0.0]], [1.0, 2.0, 1.0])
    h = torch.tensor([[0.9, 0.0], [3.0, 0.0]])
    everywhere, own = torch.ones(3), torch.tensor([1.0, 5.0, 0.0])
    assert nearest_prototype(h, G, everywhere).argmax(1).tolist() == [2, 1]
    restricted = nearest_prototype(h, G, own)  # class 2 is not among the client's own
    assert restricted.argmax(1).tolist() == [0, 1]
    assert not restricted[:, 2].any()
    torch.testing.assert_close(restricted.sum(1), torch.ones(2))


def test_nearest_prototype_skips_classes_without_one() -> None:
    G = table([[0.0, 0.0], [4.0, 0.0]], [0.0, 1.0])
    assert nearest_prototype(torch.zeros(1, 2), G, torch.ones(2)).tolist() == [[0, 1]]


def test_nearest_prototype_without_any_is_even() -> None:
    even = nearest_prototype(torch.ones(2, 2), ClassTable.empty(4, 2, torch.ones(1)), torch.ones(4))
    assert torch.equal(even, torch.full((2, 4), 0.25))


# exponential moving average


def test_ema_mixes_only_what_exists_twice() -> None:
    new = table([[1.0], [2.0], [0.0], [0.0]], [1.0, 1.0, 0.0, 0.0])
    old = table([[3.0], [0.0], [5.0], [0.0]], [1.0, 0.0, 1.0, 0.0])
    mixed = ema(new, old, 0.75)
    assert mixed.rows.tolist() == [[1.5], [2.0], [0.0], [0.0]]
    assert mixed.count.tolist() == new.count.tolist()
    assert mixed.or_else(old).rows.tolist() == [[1.5], [2.0], [5.0], [0.0]]


# beta draws


@pytest.mark.parametrize("alpha", [0.2, 0.4, 1.0, 3.0])
def test_beta_draws_have_the_moments_of_beta(alpha: float) -> None:
    drawn = beta_draw(alpha, 20_000, generator(0, "beta"))
    assert drawn.dtype == torch.float64
    assert drawn.min() >= 0
    assert drawn.max() <= 1
    assert drawn.mean().item() == pytest.approx(0.5, abs=0.01)
    assert drawn.var().item() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=0.03)


def test_beta_mass_outside_the_middle() -> None:
    drawn = beta_draw(0.4, 20_000, generator(1, "beta"))
    assert ((drawn < 0.1) | (drawn > 0.9)).double().mean().item() == pytest.approx(0.48, abs=0.02)


def test_beta_draws_depend_on_the_generator_alone() -> None:
    torch.manual_seed(1)
    one = beta_draw(0.4, 10, generator(7, "beta"))
    torch.manual_seed(2)
    np.random.seed(3)
    assert torch.equal(one, beta_draw(0.4, 10, generator(7, "beta")))
    assert not torch.equal(one, beta_draw(0.4, 10, generator(8, "beta")))


# FINCH: GT-19, GT-20


def test_gt_19() -> None:
    vectors = at_angles(0, 6, 11, 15, 90, 95)
    partitions = finch(vectors)
    assert same_grouping(partitions[-1], torch.tensor([0, 0, 0, 0, 1, 1]))
    centres = finch_centres(vectors)
    expected = torch.tensor([[0.985519, 0.138539], [-0.043578, 0.998097]], dtype=torch.float64)
    torch.testing.assert_close(centres, expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(centres.mean(0), torch.tensor([0.470970, 0.568318]).double(), atol=1e-5, rtol=0)
    torch.testing.assert_close(vectors.mean(0), torch.tensor([0.642487, 0.425059]).double(), atol=1e-5, rtol=0)


def test_gt_20() -> None:
    partitions = finch(at_angles(0, 2, 10, 12, 90, 92, 105, 107))
    assert [int(labels.max()) + 1 for labels in partitions] == [4, 2]
    assert same_grouping(partitions[0], torch.tensor([0, 0, 1, 1, 2, 2, 3, 3]))
    assert same_grouping(partitions[1], torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]))


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("seed", range(5))
def test_up_to_three_vectors_are_one_cluster(size: int, seed: int) -> None:
    vectors = torch.randn(size, 4, generator=generator(seed, "finch"))
    assert finch(vectors)[-1].tolist() == [0] * size
    torch.testing.assert_close(finch_centres(vectors), vectors.mean(0, keepdim=True))


@settings(max_examples=60)
@given(st.integers(1, 14), st.integers(0, 10**6))
def test_finch_partitions_are_nested_and_shrink(size: int, seed: int) -> None:
    vectors = torch.randn(size, 3, generator=generator(seed, "finch"))
    partitions = finch(vectors)
    sizes = [int(labels.max()) + 1 for labels in partitions]
    assert sizes == sorted(set(sizes), reverse=True)
    for labels, clusters in zip(partitions, sizes, strict=True):
        assert sorted(set(labels.tolist())) == list(range(clusters))
    for fine, coarse in pairwise(partitions):
        assert all(len(set(coarse[fine == label].tolist())) == 1 for label in range(int(fine.max()) + 1))
    if size > 1:  # every vector shares its cluster with its nearest neighbour
        similarity = cosine(vectors.double(), vectors.double()).fill_diagonal_(-2)
        assert torch.equal(partitions[0], partitions[0][similarity.argmax(1)])


@settings(max_examples=60)
@given(st.integers(2, 12), st.integers(0, 10**6))
def test_first_partition_ignores_the_length_of_vectors(size: int, seed: int) -> None:
    rng = generator(seed, "finch")
    vectors = torch.randn(size, 3, generator=rng, dtype=torch.float64)
    scaled = vectors * (torch.rand(size, 1, generator=rng, dtype=torch.float64) * 10 + 0.1)
    assert torch.equal(finch(vectors)[0], finch(scaled)[0])


@settings(max_examples=40)
@given(st.integers(2, 12), st.integers(0, 10**6))
def test_finch_ignores_the_order_of_vectors(size: int, seed: int) -> None:
    rng = generator(seed, "finch")
    vectors = torch.randn(size, 3, generator=rng, dtype=torch.float64)
    order = torch.randperm(size, generator=rng)
    for one, other in zip(finch(vectors), finch(vectors[order]), strict=True):
        assert same_grouping(one[order], other)


def finch_by_hand(vectors: np.ndarray) -> list[list[set[int]]]:
    """The clusters of every level, as the paper describes them: a cluster is the mean of its original vectors."""
    levels, clusters = [], [{i} for i in range(len(vectors))]
    while len(clusters) > 1:
        centres = [vectors[sorted(cluster)].mean(0) for cluster in clusters]
        units = [centre / np.linalg.norm(centre) for centre in centres]
        joined = [set(cluster) for cluster in clusters]
        for i, one in enumerate(units):
            nearest = max((j for j in range(len(units)) if j != i), key=lambda j, one=one: float(one @ units[j]))
            both = next(c for c in joined if clusters[i] <= c) | next(c for c in joined if clusters[nearest] <= c)
            joined = [c for c in joined if not c & both] + [both]
        if levels and len(joined) in (1, len(clusters)):
            break
        clusters = joined
        levels.append(clusters)
    return levels


@pytest.mark.parametrize("seed", range(8))
def test_finch_is_the_papers(seed: int) -> None:
    vectors = torch.randn(60, 3, generator=generator(seed, "finch"), dtype=torch.float64)
    found = [
        {frozenset((labels == k).nonzero()[:, 0].tolist()) for k in range(int(labels.max()) + 1)}
        for labels in finch(vectors)
    ]
    assert found == [{frozenset(cluster) for cluster in level} for level in finch_by_hand(vectors.numpy())]


def test_finch_of_equal_vectors_is_one_cluster() -> None:
    assert finch(torch.ones(5, 2))[-1].tolist() == [0] * 5


def test_cosine_keeps_its_precision_under_autocast() -> None:
    """A contrast at a temperature of .02 multiplies errors by 50: in bfloat16 its gradient would be a third wrong."""
    rng = torch.Generator().manual_seed(0)
    h, rows = torch.randn(16, 64, generator=rng), torch.randn(5, 64, generator=rng)
    y, table = torch.arange(16) % 5, ClassTable(rows, torch.ones(5))
    gradients = []
    for enabled in (False, True):
        own = h.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = info_nce(own, table, y, tau=0.02)
        gradients.append(torch.autograd.grad(loss, own)[0])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dim", [1, 2, 5])
def test_a_symmetric_matrix_is_packed_row_by_row(dim: int) -> None:
    matrix = torch.arange(float(dim * dim)).view(dim, dim)
    matrix = matrix + matrix.T
    packed = pack_symmetric(matrix)
    assert packed.tolist() == [float(matrix[i, j]) for i in range(dim) for j in range(i, dim)]
    assert torch.equal(unpack_symmetric(packed, dim), matrix)
    assert torch.equal(pack_symmetric(matrix[:, torch.arange(dim)].T), packed)

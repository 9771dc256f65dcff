"""Quantised messages: error within a step, no bias, exact bytes, rubbish refused."""

import numpy as np
import pytest
import torch

from protofed.errors import BadMessage
from protofed.records import ClassTable, Mean, Quantiser, Record, Weights, decode, encode
from protofed.records.quantise import unpack
from protofed.seeding import generator


class Upload(Record):
    weights: Mean[Weights]
    P: Mean[ClassTable]


def quantiser(bits: int) -> Quantiser:
    return Quantiser(bits, generator(0, "test"))


def example() -> Upload:
    rng = torch.Generator().manual_seed(0)
    weights = Weights({"w": torch.randn(7, 5, generator=rng)}, {"running_mean": torch.randn(5, generator=rng)})
    rows = torch.randn(3, 4, generator=rng)
    rows[1] = 0
    return Upload(Mean(weights, 12.0), Mean(ClassTable(rows, torch.tensor([2.0, 0.0, 5.0])), 1.0))


@pytest.mark.parametrize("bits", [1, 3, 4, 8])
def test_round_trip_is_within_a_step(bits: int) -> None:
    sent = example()
    message = encode(sent, "site", quantiser(bits))
    got = decode(message.blob, sent, "server", bits)
    for before, after in (
        (sent.weights.value.params["w"], got.weights.value.params["w"]),
        (sent.P.value.rows[[0, 2]], got.P.value.rows[[0, 2]]),
    ):
        assert after.dtype == before.dtype
        step = (before.max() - before.min()) / (2**bits - 1)
        assert (after - before).abs().max() <= step * 1.001
    assert torch.equal(got.weights.value.stats["running_mean"], sent.weights.value.stats["running_mean"])
    assert torch.equal(got.P.value.count, sent.P.value.count)


def test_bytes_are_those_of_the_bits() -> None:
    message = encode(example(), "site", quantiser(4))
    assert message.size.weights == 18  # 35 numbers of 4 bits
    assert message.size.prototypes == 4  # 2 rows of 4
    assert message.size.total == len(message.blob)
    assert len(message.blob) - len(encode(example(), "site").blob) < 200  # small tensors gain nothing but lose little


def test_no_bias() -> None:
    values = np.concatenate([np.full(20000, 0.3), [0.0, 1.0]])
    codes, grid = quantiser(1).pack(values)
    back = unpack(torch.from_numpy(codes), torch.from_numpy(grid), 1)
    assert set(back.tolist()) == {0.0, 1.0}
    assert abs(float(back[:-2].mean()) - 0.3) < 0.02


@pytest.mark.parametrize("array", [np.zeros((0, 4), np.float32), np.full((2, 3), 7.5, np.float32), np.array(3.5)])
def test_nothing_and_constants(array: np.ndarray) -> None:
    codes, grid = quantiser(8).pack(array)
    back = unpack(torch.from_numpy(codes), torch.from_numpy(grid), 8)
    assert back.shape == array.shape
    assert np.array_equal(back.numpy(), array)


@pytest.mark.parametrize(
    "grid",
    [
        [0.0, 1.0, 1e15],
        [0.0, 1.0, 5.0],
        [0.0, 1.0, -4.0],
        [0.0, 1.0, 3.5],
        [0.0],
        [float("nan"), 1.0, 4.0],
        [0.0, float("inf"), 4.0],
    ],
)
def test_a_grid_that_does_not_fit_is_refused(grid: list[float]) -> None:
    with pytest.raises(ValueError, match=r"not a quantised|another size"):
        unpack(torch.zeros(4, dtype=torch.uint8), torch.tensor(grid, dtype=torch.float64), 8)


def test_the_sender_of_rubbish_is_named() -> None:
    sent = example()
    with pytest.raises(
        BadMessage, match=r"site: field '[a-zA-Z/]+' cannot be read: its grid is for a tensor of another"
    ):
        decode(encode(sent, "site", quantiser(4)).blob, sent, "site", 8)
    with pytest.raises(BadMessage, match="site: "):
        decode(encode(sent, "site", quantiser(4)).blob, sent, "site")

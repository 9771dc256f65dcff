"""Depthwise convolution with the kernels' gradient in pieces: what torch's own convolution gives."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from protofed.models import build_model, laid_out, torchs_own_kernels
from protofed.models.efficientnet import SameConv2d
from protofed.models.fast.depthwise import Pair, convolved_depthwise, worth_pieces

LAST: dict[str, Any] = {"model": "efficientnet_lite0", "train": "last", "rounds": 1}


def by_torch(x: Tensor, kernels: Tensor, stride: Pair, padding: Pair) -> Tensor:
    return functional.conv2d(x, kernels, None, stride, padding, groups=len(kernels))


def tensors(images: tuple[int, ...], kernel: Pair, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    dice = torch.Generator().manual_seed(seed)
    shapes = (images, (images[1], 1, *kernel))
    return [
        torch.randn(shape, generator=dice, dtype=dtype).to(memory_format=torch.channels_last).requires_grad_()
        for shape in shapes
    ]


def gradients(convolve: Callable[..., Tensor], inputs: list[Tensor], stride: Pair, padding: Pair) -> tuple[Tensor, ...]:
    result = convolve(*inputs, stride, padding)
    direction = torch.randn(result.shape, generator=torch.Generator().manual_seed(1), dtype=result.dtype)
    return result.detach(), *torch.autograd.grad(result, inputs, direction)


@settings(max_examples=100)
@given(
    images=st.tuples(st.integers(1, 3), st.integers(1, 5), st.integers(1, 12), st.integers(1, 12)),
    kernel=st.tuples(st.integers(1, 7), st.integers(1, 9)),
    stride=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    more=st.tuples(st.integers(0, 2), st.integers(0, 2)),
    seed=st.integers(0, 99),
)
def test_values_and_gradients_are_those_of_torch(
    images: tuple[int, ...], kernel: Pair, stride: Pair, more: Pair, seed: int
) -> None:
    needed = [-(-max(side - given, 0) // 2) for side, given in zip(kernel, images[2:], strict=True)]
    padding = (needed[0] + more[0], needed[1] + more[1])
    inputs = tensors(images, kernel, seed)
    expected, found = (gradients(way, inputs, stride, padding) for way in (by_torch, convolved_depthwise))
    for own, right in zip(found, expected, strict=True):
        torch.testing.assert_close(own, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("side", [14, 13, 7, 4, 1])
@pytest.mark.parametrize("stride", [1, 2])
def test_in_float32_it_is_as_exact_as_torch(side: int, stride: int) -> None:
    """As the network does it, where zeros may be more on one side than on the other."""
    conv = laid_out(SameConv2d(32, 32, 5, stride, groups=32), "channels-last")
    inputs = [torch.randn(4, 32, side, side).to(memory_format=torch.channels_last).requires_grad_(), conv.weight]
    assert conv.in_pieces
    found = torch.autograd.grad(conv(inputs[0]).square().sum(), inputs)
    conv.in_pieces = False
    by_torch = torch.autograd.grad(conv(inputs[0]).square().sum(), inputs)
    assert torch.equal(found[0], by_torch[0])
    torch.testing.assert_close(found[1], by_torch[1], rtol=1e-5, atol=1e-5 * float(by_torch[1].detach().abs().max()))
    assert found[1].stride() == conv.weight.stride()


def test_second_derivatives_are_right() -> None:
    x, kernels = tensors((2, 2, 5, 6), (5, 5))
    for stride, padding in (((1, 1), (2, 2)), ((2, 2), (1, 2))):
        assert torch.autograd.gradgradcheck(
            lambda x, kernels, s=stride, p=padding: convolved_depthwise(x, kernels, s, p), (x, kernels)
        )


def test_only_what_is_trained_gets_a_gradient() -> None:
    x, kernels = tensors((2, 3, 7, 7), (5, 5))
    convolved_depthwise(x.detach(), kernels, (1, 1), (2, 2)).sum().backward()
    assert x.grad is None
    assert kernels.grad is not None


def test_where_pieces_are_used() -> None:
    x, kernels = tensors((2, 8, 7, 7), (5, 5), dtype=torch.float32)
    assert worth_pieces(x, kernels)
    assert not worth_pieces(x, kernels[..., :3])  # torch is fast there
    assert not worth_pieces(x, kernels.detach())
    assert not worth_pieces(x.double(), kernels.double())
    assert not worth_pieces(x[:1], kernels)
    assert not worth_pieces(x, torch.randn(8, 8, 5, 5, requires_grad=True))
    assert not worth_pieces(x.to("meta"), kernels.to("meta"))
    with torch.no_grad():
        assert not worth_pieces(x, kernels)
    with torch.autocast("cpu", torch.bfloat16):
        assert not worth_pieces(x, kernels)


@pytest.fixture
def in_pieces(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """The kernels of all convolutions in pieces so far."""
    seen: list[torch.Size] = []

    def noting(x: Tensor, kernels: Tensor, stride: Pair, padding: Pair) -> Tensor:
        seen.append(kernels.shape)
        return convolved_depthwise(x, kernels, stride, padding)

    monkeypatch.setattr("protofed.models.efficientnet.convolved_depthwise", noting)
    return seen


def test_a_network_computes_the_same(in_pieces: list[torch.Size]) -> None:
    model = laid_out(build_model("efficientnet_lite0", (3, 64, 64), 4), "channels-last")
    x = torch.rand(4, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torchs_own_kernels(model):
        expected = model(x)
    assert not in_pieces
    assert torch.equal(model(x), expected)
    assert len(in_pieces) == 9  # of 16 blocks
    laid_out(model, "standard")(x)
    assert len(in_pieces) == 9


@pytest.fixture
def few_images(make_data: Any) -> str:
    return str(make_data(("a", "b"), size=32, classes=2, train=8, test=2))


def test_training_the_last_stage_uses_it(tiny_run: Any, few_images: str, in_pieces: list[torch.Size]) -> None:
    tiny_run("fedavg", few_images, **LAST)
    assert set(in_pieces) == {(672, 1, 5, 5), (1152, 1, 5, 5)}


@pytest.mark.parametrize("options", [{"guard": "clip=1,noise=0.5"}, {"layout": "standard"}])
def test_others_use_torchs_own(
    tiny_run: Any, few_images: str, in_pieces: list[torch.Size], options: dict[str, Any]
) -> None:
    """Gradients of single samples are taken by `torch.func`; in the standard layout it was not measured."""
    tiny_run("fedavg", few_images, **LAST, **options)
    assert not in_pieces


def test_clients_that_train_together_use_torchs_own(
    tiny_run: Any, few_images: str, in_pieces: list[torch.Size]
) -> None:
    tiny_run("fedavg", few_images, engine="vmap", batch=4, **{**LAST, "train": "all"})
    assert len(in_pieces) <= 9  # the blocks of one step of a single client, which tells how much memory is needed

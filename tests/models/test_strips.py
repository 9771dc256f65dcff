"""Convolution in strips: what torch's own convolution, pooling and ReLU give, forwards and backwards."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from protofed.errors import UserError
from protofed.models import build_model, choose_layout, laid_out, torchs_own_kernels
from protofed.models.fast.strips import convolved_in_strips, worth_strips

CPU = torch.device("cpu")
LENET = {"model": "lenet5", "rounds": 2, "image_size": 16}


def by_torch(x: Tensor, kernels: Tensor, bias: Tensor) -> Tensor:
    return functional.max_pool2d(functional.conv2d(x, kernels, bias), 2).relu()


def tensors(images: tuple[int, ...], kernels: tuple[int, ...], seed: int = 0) -> list[Tensor]:
    dice = torch.Generator().manual_seed(seed)
    shapes = (images, kernels, kernels[:1])
    return [torch.randn(shape, generator=dice, dtype=torch.float64).requires_grad_() for shape in shapes]


@settings(max_examples=100)
@given(
    images=st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(6, 15), st.integers(6, 15)),
    outputs=st.integers(1, 30),
    kernel=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    seed=st.integers(0, 99),
)
def test_values_and_gradients_are_those_of_torch(
    images: tuple[int, ...], outputs: int, kernel: tuple[int, int], seed: int
) -> None:
    given_tensors = tensors(images, (outputs, images[1], *kernel), seed)
    expected, found = by_torch(*given_tensors), convolved_in_strips(*given_tensors)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    direction = torch.randn_like(expected)
    for own, right in zip(
        torch.autograd.grad(found, given_tensors, direction),
        torch.autograd.grad(expected, given_tensors, direction),
        strict=True,
    ):
        torch.testing.assert_close(own, right, rtol=1e-10, atol=1e-10)


def test_of_equal_numbers_the_first_has_the_gradient_as_in_torch() -> None:
    """Images have plain areas, where all four numbers of a pool are equal."""
    x, kernels, bias = tensors((2, 1, 12, 12), (6, 1, 5, 5))
    with torch.no_grad():
        x.fill_(0.5)
        kernels.copy_(kernels.mul(64).round() / 64)  # sums without rounding: equal in whatever order they are added
    own, right = (torch.autograd.grad(way(x, kernels, bias).sum(), x) for way in (convolved_in_strips, by_torch))
    torch.testing.assert_close(own, right)


def test_what_is_not_a_number_is_not_lost() -> None:
    x, kernels, bias = tensors((1, 1, 12, 12), (6, 1, 5, 5))
    with torch.no_grad():
        x[0, 0, 6, 6] = torch.nan
    broken = by_torch(x, kernels, bias).isnan()
    assert broken.any()
    assert convolved_in_strips(x, kernels, bias)[broken].isnan().all()


def test_only_what_is_trained_gets_a_gradient() -> None:
    x, kernels, bias = tensors((2, 1, 12, 12), (6, 1, 5, 5))
    convolved_in_strips(x.detach(), kernels.detach(), bias).sum().backward()
    assert bias.grad is not None
    assert x.grad is None
    assert kernels.grad is None


@pytest.mark.parametrize(
    ("images", "kernels", "worth"),
    [
        ((32, 1, 28, 28), (6, 1, 5, 5), True),
        ((32, 6, 12, 12), (16, 6, 5, 5), True),
        ((32, 6, 12, 12), (64, 6, 5, 5), False),  # torch's vectors are full
        ((32, 1, 30, 30), (6, 1, 5, 5), False),  # 26 columns: strips of 2 or of all
        ((32, 1, 5, 12), (6, 1, 5, 5), False),  # nothing is left after the pool
    ],
)
def test_where_strips_are_used(images: tuple[int, ...], kernels: tuple[int, ...], worth: bool) -> None:
    assert worth_strips(torch.Size(images), torch.Size(kernels)) == worth


def test_a_network_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    in_strips: list[torch.Size] = []

    def noting(x: Tensor, kernels: Tensor, bias: Tensor) -> Tensor:
        in_strips.append(kernels.shape)
        return convolved_in_strips(x, kernels, bias)

    monkeypatch.setattr("protofed.models.layers.convolved_in_strips", noting)
    model = build_model("lenet5", (1, 28, 28), 10, {}).double()
    x = torch.rand(3, 1, 28, 28, dtype=torch.float64)
    expected = model(x)
    found = laid_out(model, "strips")(x)
    assert len(in_strips) == 2  # it does compute otherwise
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    with torchs_own_kernels(model):
        assert torch.equal(model(x), expected)
    assert torch.equal(model(x), found)
    assert torch.equal(laid_out(model, "standard")(x), expected)


def test_a_run_agrees_with_the_standard_layout(tiny_run: Any) -> None:
    runs = [tiny_run("fedavg", layout=layout, dtype="float64", **LENET) for layout in ("standard", "strips")]
    vectorised = tiny_run("fedavg", layout="strips", dtype="float64", engine="vmap", **LENET)
    assert runs[1].config["engine"]["layout"] == "strips"
    standard, strips, together = (load_file(run.path / "model.safetensors") for run in (*runs, vectorised))
    assert [line["bytes"] for line in runs[0].rounds] == [line["bytes"] for line in runs[1].rounds]
    for name, tensor in standard.items():
        torch.testing.assert_close(strips[name], tensor, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(together[name], tensor, rtol=1e-9, atol=1e-9)


def test_gradients_of_single_samples_are_taken_without(tiny_run: Any) -> None:
    runs = [tiny_run("fedavg", layout=layout, guard="clip=1,noise=0.5", **LENET) for layout in ("standard", "strips")]
    standard, strips = (load_file(run.path / "model.safetensors") for run in runs)
    assert all(torch.equal(tensor, strips[name]) for name, tensor in standard.items())


@pytest.mark.parametrize(
    ("model", "device", "autocast"), [("cnn", "cpu", False), ("lenet5", "cuda", False), ("lenet5", "cpu", True)]
)
def test_where_strips_are_refused(model: str, device: str, autocast: bool) -> None:
    models = [build_model(model, (3, 32, 32), 4, {})]
    with pytest.raises(UserError, match="layout=strips"):
        choose_layout("strips", models, torch.float32, torch.device(device), autocast)
    assert choose_layout("auto", models, torch.float32, torch.device(device), autocast) == "channels-last"

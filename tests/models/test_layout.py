"""Channels last: another order in memory, the same numbers up to rounding, the same names and bytes."""

from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from protofed.errors import UserError
from protofed.models import build_model, choose_layout, laid_out

CPU = torch.device("cpu")
OPTIONS: dict[str, Any] = {"model": "resnet10", "set": {"model.width": 16}, "rounds": 2}


def models_of(tiny_run: Any, **options: Any) -> list[dict[str, torch.Tensor]]:
    runs = [tiny_run("fedavg", layout=layout, **OPTIONS, **options) for layout in ("standard", "channels-last")]
    return [load_file(run.path / "model.safetensors") for run in runs]


def test_every_convolution_is_exact_up_to_rounding() -> None:
    """In float32, each by itself: steps of training amplify what rounding does, by how much nobody can say."""
    model = laid_out(build_model("resnet10", (3, 32, 32), 4, {"width": 16}), "channels-last")
    seen: list[torch.nn.Conv2d] = []

    def check(module: torch.nn.Conv2d, given: tuple[torch.Tensor], found: torch.Tensor) -> None:
        def exact(x: torch.Tensor, kernels: torch.Tensor) -> torch.Tensor:
            x, kernels = (tensor.double().contiguous() for tensor in (x, kernels))
            return torch.nn.functional.conv2d(x, kernels, None, module.stride, module.padding)

        assert found.is_contiguous(memory_format=torch.channels_last)
        # A sum of n products is off by at most n roundings of the sum of their magnitudes.
        terms = module.weight[0].numel()
        bound = terms * torch.finfo(torch.float32).eps * exact(given[0].abs(), module.weight.abs())
        assert ((found - exact(given[0], module.weight)).abs() <= bound).all()
        seen.append(module)

    for module in model.modules():
        if isinstance(module, torch.nn.Conv2d):
            module.register_forward_hook(check)
    with torch.no_grad():
        model(torch.randn(4, 3, 32, 32))
    assert len(seen) == 12


def test_runs_are_equal_in_float64(tiny_run: Any) -> None:
    standard, last = models_of(tiny_run, dtype="float64")
    for name, tensor in standard.items():
        torch.testing.assert_close(last[name], tensor, rtol=1e-9, atol=1e-9)


def test_names_shapes_and_bytes_are_the_same(tiny_run: Any) -> None:
    standard, last = (tiny_run("i2pfl", layout=layout, **OPTIONS) for layout in ("standard", "channels-last"))
    assert [line["bytes"] for line in standard.rounds] == [line["bytes"] for line in last.rounds]
    for file in ("model.safetensors", "broadcast.safetensors", "clients/a-0.safetensors"):
        shapes = [
            {name: tensor.shape for name, tensor in load_file(run.path / file).items()} for run in (standard, last)
        ]
        assert shapes[0] == shapes[1]
        assert all(tensor.is_contiguous() for tensor in load_file(last.path / file).values())


def test_the_layout_is_written_down(tiny_run: Any) -> None:
    assert tiny_run("fedavg", **OPTIONS).config["engine"]["layout"] == "channels-last"
    assert tiny_run("fedavg", layout="standard", **OPTIONS).config["engine"]["layout"] == "standard"


@pytest.mark.parametrize(
    ("names", "dtype", "expected"),
    [
        (["resnet10"], torch.float32, "channels-last"),
        (["lenet5"], torch.float32, "strips"),
        (["mlp"], torch.float32, "standard"),  # nothing convolves
        (["lenet5", "mlp"], torch.float32, "standard"),
        (["resnet10"], torch.float64, "standard"),  # no fast kernels, and exactness is what float64 is for
    ],
)
def test_what_auto_chooses(names: list[str], dtype: torch.dtype, expected: str) -> None:
    models = [build_model(name, (3, 32, 32), 4, {}) for name in names]
    assert choose_layout("auto", models, dtype, CPU) == expected
    assert choose_layout("standard", models, dtype, CPU) == "standard"
    assert choose_layout("channels-last", models, dtype, CPU) == "channels-last"


def test_narrow_strided_convolutions_stay_as_they_are() -> None:
    """torch writes beyond the memory of their gradients when channels lie last."""
    narrow = [build_model("resnet10", (3, 32, 32), 4, {"width": 8})]
    assert choose_layout("auto", narrow, torch.float32, CPU) == "standard"
    with pytest.raises(UserError, match="corrupts memory"):
        choose_layout("channels-last", narrow, torch.float32, CPU)


def test_only_kernels_are_laid_out_otherwise() -> None:
    model = build_model("resnet10", (3, 32, 32), 4, {"width": "4"})
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    after = laid_out(model, "channels-last").state_dict()
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())
    changed = [name for name, tensor in after.items() if not tensor.is_contiguous()]
    assert changed
    assert all(after[name].ndim == 4 for name in changed)

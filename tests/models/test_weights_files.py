import copy
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from protofed.errors import UserError
from protofed.models import Split, build_model, everything, load_weights, tensors

SHAPE = (3, 16, 16)


def resnet(classes: int = 5, seed: int = 0) -> Split:
    torch.manual_seed(seed)
    model = build_model("resnet10", SHAPE, classes, {"width": 4})
    model(torch.randn(4, *SHAPE))  # moves the running statistics away from their start
    return model.eval()


def torchvision_names(model: Split) -> dict[str, Tensor]:
    return {name.removeprefix("stem."): value for name, value in model.state_dict().items()}


def assert_same(model: Split, other: Split) -> None:
    for name, value in tensors(model).items():
        assert torch.equal(value, tensors(other)[name]), name


def write(path: Path, content: Any) -> Path:
    if path.suffix == ".safetensors":
        save_file(content, path)
    else:
        torch.save(content, path)
    return path


@pytest.mark.parametrize("suffix", [".safetensors", ".pth", ".pt"])
@pytest.mark.parametrize("names", ["own", "torchvision", "data parallel"])
def test_all_names_and_formats(tmp_path: Path, suffix: str, names: str) -> None:
    source, target = resnet(seed=1), resnet(seed=2)
    content = source.state_dict() if names == "own" else torchvision_names(source)
    if names == "data parallel":
        content = {f"module.{name}": value for name, value in content.items()}
    report = load_weights(target, write(tmp_path / f"weights{suffix}", dict(content)))
    assert_same(target, source)
    assert set(report.loaded) == everything.names(target)
    assert not report.missing
    assert not report.unexpected
    assert not report.mismatched
    assert report.summary() == f"weights{suffix}: {len(report.loaded)} of {len(report.loaded)} tensors loaded"


def test_nested_checkpoint(tmp_path: Path) -> None:
    source, target = resnet(seed=1), resnet(seed=2)
    load_weights(target, write(tmp_path / "run.pth", {"epoch": 3, "state_dict": torchvision_names(source)}))
    assert_same(target, source)


def test_other_precision_is_converted(tmp_path: Path) -> None:
    source, target = resnet(seed=1), resnet(seed=2)
    load_weights(target, write(tmp_path / "w.safetensors", copy.deepcopy(source).double().state_dict()))
    assert_same(target, source)
    assert target.get_parameter("fc.weight").dtype == torch.float32


def test_other_head_is_reported_and_left_alone(tmp_path: Path) -> None:
    target = resnet(classes=5, seed=2)
    head_before = target.get_parameter("fc.weight").detach().clone()
    content = torchvision_names(resnet(classes=7, seed=1))
    del content["layer1.0.conv2.weight"]
    content["extra.weight"] = torch.zeros(2)
    report = load_weights(target, write(tmp_path / "imagenet.pth", content))
    assert report.mismatched == (("fc.weight", (7, 32), (5, 32)), ("fc.bias", (7,), (5,)))
    assert report.missing == ("layer1.0.conv2.weight",)
    assert report.unexpected == ("extra.weight",)
    assert torch.equal(target.get_parameter("fc.weight"), head_before)
    assert torch.equal(target.get_parameter("stem.conv1.weight"), content["conv1.weight"])
    summary = report.summary()
    assert "fc.weight (7x32 in the file, 5x32 in the model), fc.bias (7 in the file, 5 in the model)" in summary
    assert "not in the file, left unchanged: layer1.0.conv2.weight" in summary
    assert "not in the model, ignored: extra.weight" in summary


def test_nothing_fits(tmp_path: Path) -> None:
    lenet = build_model("lenet5", (1, 28, 28), 3)
    path = write(tmp_path / "lenet.safetensors", lenet.state_dict())
    with pytest.raises(UserError, match=r"no tensor of .* the file has .*conv.*, the model has stem\.conv1\.weight"):
        load_weights(resnet(), path)


def test_values_must_be_finite_and_nothing_is_copied(tmp_path: Path) -> None:
    content = resnet(seed=1).state_dict()
    content["layer4.0.bn1.weight"][2] = float("nan")
    target, before = resnet(seed=2), resnet(seed=2)
    with pytest.raises(UserError, match=r"tensor 'layer4\.0\.bn1\.weight' of .* non-finite"):
        load_weights(target, write(tmp_path / "w.safetensors", content))
    assert_same(target, before)


def test_a_tensor_under_two_names(tmp_path: Path) -> None:
    content = resnet().state_dict()
    content["conv1.weight"] = content["stem.conv1.weight"].clone()
    with pytest.raises(UserError, match=r"hold 'stem\.conv1\.weight' under two names"):
        load_weights(resnet(), write(tmp_path / "w.safetensors", content))


class CreatesFile:
    """Unpickling this would create a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("container", ["torch", "pickle"])
def test_code_in_a_file_is_never_run(tmp_path: Path, container: str) -> None:
    trace, path = tmp_path / "trace", tmp_path / "evil.pth"
    content = {**resnet().state_dict(), "extra": CreatesFile(trace)}
    if container == "torch":
        torch.save(content, path)
    else:
        path.write_bytes(pickle.dumps(content, protocol=2))
    with pytest.raises(UserError, match="code is never executed"):
        load_weights(resnet(), path)
    assert not trace.exists()


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
@pytest.mark.parametrize("kept", [0.0, 0.001, 0.5, 0.99])
def test_truncated_files(tmp_path: Path, suffix: str, kept: float) -> None:
    path = write(tmp_path / f"w{suffix}", resnet().state_dict())
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept * len(whole))])
    with pytest.raises(UserError, match="cannot read weights"):
        load_weights(resnet(), path)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_garbage(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"w{suffix}"
    path.write_bytes(bytes(range(256)) * 20)
    with pytest.raises(UserError, match="cannot read weights"):
        load_weights(resnet(), path)


@pytest.mark.parametrize("content", [[torch.zeros(2)], {"epoch": 3}, {"fc.weight": torch.zeros(5, 32, device="meta")}])
def test_files_without_named_tensors(tmp_path: Path, content: object) -> None:
    with pytest.raises(UserError, match="hold no named tensors"):
        load_weights(resnet(), write(tmp_path / "w.pt", content))


def test_wrong_paths(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no weights file"):
        load_weights(resnet(), tmp_path / "absent.pth")
    with pytest.raises(UserError, match=r"unknown kind; give a \.safetensors"):
        load_weights(resnet(), tmp_path / "weights.npz")

"""What is frozen computes as before, and is hidden from everything that trains, sends or stores."""

from copy import deepcopy

import pytest
import torch

from protofed.errors import UserError
from protofed.models import build_model, everything, normalisation, tensors
from protofed.models.freezing import (
    Frozen,
    complete_tensors,
    freeze,
    freeze_normalisation,
    frozen_tensors,
    untrained_stages,
)
from protofed.models.net import Net
from protofed.models.split import Split


@pytest.fixture
def resnet() -> Split:
    return build_model("resnet10", (3, 16, 16), 4, {"width": 8})


@pytest.mark.parametrize(
    ("train", "trained"),
    [
        ("head", ["fc"]),
        ("last", ["fc", "layer4"]),
        ("stages=2", ["fc", "layer3", "layer4"]),
        ("stages=4", ["fc", "layer1", "layer2", "layer3", "layer4"]),
        ("all", ["fc", "layer1", "layer2", "layer3", "layer4", "stem"]),
    ],
)
def test_what_is_trained(train: str, trained: list[str], resnet: Split) -> None:
    names = {name.partition(".")[0] for name in tensors(freeze(resnet, untrained_stages(resnet, train)))}
    assert sorted(names) == trained


@pytest.mark.parametrize("train", ["stages=0", "stages=x", "stages=9", "tail", "head=1"])
def test_what_cannot_be_trained_is_refused(train: str, resnet: Split) -> None:
    with pytest.raises(UserError, match="--train"):
        untrained_stages(resnet, train)


def test_small_networks_count_every_stage_with_weights() -> None:
    model = build_model("lenet5", (1, 28, 28), 10)
    before_head = [name for name in model.stage_names[: model.stages_until(None)] if tensors(model.get_submodule(name))]
    assert before_head[-1] not in untrained_stages(model, "last")
    assert before_head[-2] in untrained_stages(model, "last")


def test_frozen_stages_compute_as_in_evaluation_also_in_training(resnet: Split) -> None:
    x = torch.randn(3, 3, 16, 16, dtype=torch.float64)
    resnet.double().eval()
    expected = resnet(x)
    freeze(resnet, untrained_stages(resnet, "head"))
    resnet.train()
    torch.testing.assert_close(resnet(x), expected)
    resnet(x).sum().backward()
    assert all(tensor.grad is None for tensor in frozen_tensors(resnet).values())


def test_no_group_reaches_what_is_frozen(resnet: Split) -> None:
    freeze(resnet, untrained_stages(resnet, "head"))
    assert everything.names(resnet) == {"fc.weight", "fc.bias"}
    assert normalisation.names(resnet) == frozenset()
    assert set(Net(resnet).pick().tensors()) == {"fc.weight", "fc.bias"}


def test_copies_share_what_is_frozen_unless_its_precision_changes(resnet: Split) -> None:
    freeze(resnet, untrained_stages(resnet, "head"))
    copy = deepcopy(resnet)
    stages = [model.get_submodule("layer1") for model in (resnet, copy)]
    assert all(isinstance(stage, Frozen) for stage in stages)
    assert stages[0].stage is stages[1].stage  # type: ignore[union-attr]
    copy.double()
    assert {tensor.dtype for tensor in frozen_tensors(copy).values()} == {torch.float64}
    assert {tensor.dtype for tensor in frozen_tensors(resnet).values()} == {torch.float32}


def test_all_tensors_of_a_network(resnet: Split) -> None:
    names = set(tensors(resnet))
    freeze(resnet, untrained_stages(resnet, "last"))
    assert set(complete_tensors(resnet, tensors(resnet))) == names


def test_normalisation_of_trained_stages_can_be_frozen_too(resnet: Split) -> None:
    x = torch.randn(3, 3, 16, 16)
    freeze_normalisation(freeze(resnet, untrained_stages(resnet, "last")))
    resnet.train()
    before = {name: tensor.clone() for name, tensor in frozen_tensors(resnet).items()}
    resnet(x).sum().backward()
    assert all(torch.equal(tensor, before[name]) for name, tensor in frozen_tensors(resnet).items())
    assert not any("bn" in name for name in tensors(resnet))
    assert any(name.startswith("layer4") for name in tensors(resnet))

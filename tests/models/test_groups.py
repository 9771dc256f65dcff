import pickle

import pytest
from torch import nn

from protofed.errors import UserError
from protofed.models import (
    Group,
    Split,
    build_model,
    everything,
    features,
    head,
    normalisation,
    nothing,
    of_type,
    part,
    running_statistics,
    tensors,
)
from protofed.models.resnet import Bottleneck


@pytest.fixture(scope="module")
def resnet50() -> Split:
    return build_model("resnet50", (3, 32, 32), 2, {"width": 8})


@pytest.fixture(scope="module")
def lenet() -> Split:
    return build_model("lenet5", (1, 28, 28), 10)


def test_everything_leaves_out_only_the_integer_counters(resnet50: Split) -> None:
    left_out = set(resnet50.state_dict()) - everything.names(resnet50)
    assert len(left_out) == 53
    assert all(name.endswith("num_batches_tracked") for name in left_out)
    assert everything.names(resnet50) == set(tensors(resnet50))
    assert nothing.names(resnet50) == frozenset()


def test_normalisation_is_found_by_type(resnet50: Split, lenet: Split) -> None:
    chosen = normalisation.names(resnet50)
    assert len(chosen) == 53 * 4
    assert {"layer1.0.downsample.1.weight", "layer1.0.downsample.1.running_mean", "stem.bn1.running_var"} <= chosen
    assert "layer1.0.downsample.0.weight" not in chosen
    assert normalisation.names(lenet) == frozenset()


def test_every_kind_of_normalisation_counts() -> None:
    model = nn.ModuleDict(
        {"group": nn.GroupNorm(1, 2), "layer": nn.LayerNorm(2), "instance": nn.InstanceNorm2d(2, affine=True)}
    )
    assert normalisation.names(model) == everything.names(model) != frozenset()


def test_difference_and_union(resnet50: Split) -> None:
    rest = everything - normalisation
    assert rest.names(resnet50) == everything.names(resnet50) - normalisation.names(resnet50)
    assert (rest + normalisation).names(resnet50) == everything.names(resnet50)
    assert (features + head).names(resnet50) == everything.names(resnet50)
    assert not features.names(resnet50) & head.names(resnet50)


def test_sides_of_the_cut(resnet50: Split, lenet: Split) -> None:
    assert head.names(resnet50) == {"fc.weight", "fc.bias"}
    assert head.names(lenet) == {"fc2.linear.weight", "fc2.linear.bias", "fc.weight", "fc.bias"}
    assert (everything - features).names(lenet) == head.names(lenet)


def test_stages(resnet50: Split, lenet: Split) -> None:
    assert part("fc").names(resnet50) == head.names(resnet50)
    assert part("fc").names(lenet) == {"fc.weight", "fc.bias"}
    assert part("conv1", "fc").names(lenet) == {"conv1.conv.weight", "conv1.conv.bias", "fc.weight", "fc.bias"}
    with pytest.raises(UserError, match="unknown part of the model 'layer5'; did you mean"):
        part("layer5").names(resnet50)


def test_modules_inside_those_of_a_type_belong_to_it(resnet50: Split) -> None:
    assert of_type(Bottleneck).names(resnet50) == part("layer1", "layer2", "layer3", "layer4").names(resnet50)
    assert of_type(Split).names(resnet50) == everything.names(resnet50)
    assert of_type(nn.Linear).names(resnet50) == head.names(resnet50)


def test_stages_are_found_inside_a_larger_model(lenet: Split) -> None:
    larger = nn.ModuleDict({"base": lenet, "generator": nn.Linear(2, 2)})
    assert part("fc").names(larger) == {"base.fc.weight", "base.fc.bias"}
    assert head.names(larger) == {f"base.{name}" for name in head.names(lenet)}
    with pytest.raises(UserError, match="head needs a model with named stages"):
        head.names(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("group", "text"),
    [
        (everything - normalisation, "everything - normalisation"),
        (everything - (features + nothing), "everything - (features + nothing)"),
        (everything - features - head, "everything - features - head"),
        (part("layer1", "fc") + of_type(nn.Linear, nn.Conv2d), "part(layer1, fc) + of_type(Linear, Conv2d)"),
    ],
)
def test_groups_read_as_written_and_travel(group: Group, text: str) -> None:
    assert str(group) == text
    assert pickle.loads(pickle.dumps(group)) == group
    assert len({group, pickle.loads(pickle.dumps(group))}) == 1


def test_running_statistics_are_what_no_optimiser_trains(resnet50: Split, lenet: Split) -> None:
    chosen = running_statistics.names(resnet50)
    assert len(chosen) == 53 * 2
    assert all(name.endswith(("running_mean", "running_var")) for name in chosen)
    assert not chosen & {name for name, _ in resnet50.named_parameters()}
    assert running_statistics.names(lenet) == frozenset()
    assert str(everything - running_statistics) == "everything - running_statistics"

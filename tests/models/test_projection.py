import pytest
import torch
from torch import nn

from protofed.models import build_model, head, with_projection


@pytest.mark.parametrize("name", ["lenet5", "resnet10", "mlp"])
def test_projection_comes_after_the_cut_and_under_a_new_classifier(name: str) -> None:
    base = build_model(name, (1, 28, 28), 5, {"width": 4} if name == "resnet10" else None)
    model = with_projection(base, 7)
    end = base.stage_names.index(base.cut) + 1
    assert model.stage_names == (*base.stage_names[:end], "projection", "fc")
    assert (model.cut, model.dim, model.classes) == ("projection", 7, 5)
    assert head.names(model) == {"fc.weight", "fc.bias"}
    x = torch.rand(2, 1, 28, 28)
    assert (model.features(x).shape, model(x).shape) == ((2, 7), (2, 5))
    model.eval(), base.eval()
    assert torch.equal(model.features(x, base.cut), base.features(x))


def test_more_layers_may_follow() -> None:
    model = with_projection(build_model("mlp", (1, 4, 4), 3), 7, nn.ReLU())
    assert (model.features(torch.randn(9, 1, 4, 4)) >= 0).all()

"""A head of class means prefers the nearest one."""

import pytest
import torch
from torch import nn

from protofed.clients.class_means import head_from_means, linear_head, with_head
from protofed.errors import UserError
from protofed.models import Split
from protofed.records import ClassTable

CLASSES, DIM = 5, 7


def model(*head: nn.Module) -> Split:
    stages = {"same": nn.Identity(), **{f"fc{number}": layer for number, layer in enumerate(head)}}
    return Split(stages, cut="same", dim=DIM, classes=CLASSES).double()


def test_the_head_prefers_the_nearest_mean_of_a_class_that_is_held() -> None:
    rows = torch.randn(CLASSES, DIM, dtype=torch.float64) + 3
    count = torch.tensor([4.0, 1.0, 0.0, 2.0, 9.0], dtype=torch.float64)
    network = model(nn.Linear(DIM, CLASSES))
    net = with_head(network, head_from_means(network, ClassTable(rows * (count > 0)[:, None], count)))
    x = torch.randn(200, DIM, dtype=torch.float64) + 3
    distance = torch.cdist(x, rows).masked_fill(count == 0, torch.inf)
    assert torch.equal(net(x).argmax(1), distance.argmin(1))


@pytest.mark.parametrize("scale", [0.01, 100.0])
def test_the_margin_does_not_depend_on_the_scale_of_the_features(scale: float) -> None:
    rows = torch.randn(CLASSES, DIM, dtype=torch.float64)
    network = model(nn.Linear(DIM, CLASSES))
    logits = []
    for factor in (1.0, scale):
        table = ClassTable(factor * rows, torch.ones(CLASSES, dtype=torch.float64))
        logits.append(with_head(network, head_from_means(network, table))(factor * rows))
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-9, atol=1e-9)


def test_other_heads_are_refused() -> None:
    for head in ((nn.Linear(DIM, 4), nn.Linear(4, CLASSES)), (nn.Linear(DIM, CLASSES, bias=False),)):
        with pytest.raises(UserError, match="a single linear layer"):
            linear_head(model(*head))

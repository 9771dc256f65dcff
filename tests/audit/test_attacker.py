"""What an attacker is given and what is held against it: halves, outsiders, references, and figures over clients."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from protofed.audit.decoder import Effort
from protofed.audit.extractor import make_extractor
from protofed.audit.inception import Inception
from protofed.audit.membership import Auc, mean_auc
from protofed.audit.moments import nearer_than_reference
from protofed.audit.reconstruction import mean_figures, rebuild_computed, train_stage_decoder
from protofed.audit.victim import SentRows, make_victim
from protofed.runs.opened import OpenRun


def test_a_decoder_is_scored_on_images_that_it_has_not_seen(tiny_run: Any) -> None:
    victim = make_victim(OpenRun(tiny_run("fedavg", rounds=1).path, with_data=True), "a-0")
    assert sorted([*victim.attacker.tolist(), *victim.unseen.tolist()]) == list(range(len(victim.members)))
    trained = train_stage_decoder(victim, victim.net.model.cut, None, Effort(steps=1))
    found = rebuild_computed(trained, make_extractor())
    assert torch.equal(found.originals, victim.pixels[victim.unseen])


def test_the_reference_is_every_second_outsider_which_is_then_not_scored() -> None:
    """By hand: the reference mean is 4, the sent mean is 1; a sample at h gains (h - 4)^2 - (h - 1)^2."""
    members, outsiders = (
        SimpleNamespace(x=x, y=torch.zeros(len(x), dtype=torch.long)) for x in ([0.0, 1.0], [3.0, 2.0, 5.0, 6.0])
    )
    victim: Any = SimpleNamespace(
        features=lambda images, _: torch.tensor(images.x)[:, None],
        members=members,
        outsiders=outsiders,
        net=SimpleNamespace(classes=1),
    )
    rows = SentRows("prototypes", "sums", torch.tensor([[1.0]]), torch.tensor([0]))
    inside, outside = nearer_than_reference(victim, rows, "any")
    assert inside.tolist() == pytest.approx([16 - 1, 9 - 0])
    assert outside.tolist() == pytest.approx([4 - 1, 4 - 25])


def test_over_clients_counts_add_up_and_the_rest_is_averaged() -> None:
    each = {"a": {"images": 3, "rms": 0.1, "fid": None}, "b": {"images": 5, "rms": 0.3, "fid": 2.0}}
    assert mean_figures(each) == {"images": 8, "rms": pytest.approx(0.2), "fid": 2.0}


def test_the_error_of_a_mean_over_clients_is_that_of_independent_figures() -> None:
    found = mean_auc([Auc(0.5, 0.3, 10, 20), Auc(0.7, 0.4, 1, 2)])
    assert (found.auc, found.error) == (pytest.approx(0.6), pytest.approx(0.25))
    assert (found.members, found.outsiders) == (11, 22)


def test_inception_sees_pixels_between_minus_one_and_one() -> None:
    with torch.device("meta"):  # its 22 million weights do not matter here
        network = Inception()
    for name, _ in list(network.named_children()):
        setattr(network, name, nn.Identity())
    found = network(torch.tensor([0.0, 0.5, 1.0]).view(3, 1, 1, 1).expand(3, 3, 8, 8))
    torch.testing.assert_close(found, torch.tensor([-1.0, 0.0, 1.0])[:, None].expand(3, 3))

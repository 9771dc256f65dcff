"""ConfFedProto's authors deal out the official test images, too, when they split by label."""

from pathlib import Path
from typing import Any

import pytest
import torch

import protofed
from protofed.data import load
from protofed.errors import UserError

_SKEWED = "dirichlet=0.5,clients=2"


def test_nothing_is_lost_and_nothing_is_left_to_test_on(tiny_data: str) -> None:
    before = load(tiny_data)
    after = before.with_tests_in_training()
    for name, domain in before.domains.items():
        merged = after.domains[name]
        assert torch.equal(merged.train.x, torch.cat([domain.train.x, domain.test.x]))
        assert torch.equal(merged.train.y, torch.cat([domain.train.y, domain.test.y]))
        assert len(merged.test) == 0


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("conffedproto", {"preset": "authors"}),
        ("conffedproto", {"set": {"data.merge_test": "true"}}),
        ("fedavg", {"set": {"data.merge_test": "true"}}),
    ],
)
def test_clients_share_all_images_and_are_tested_on_their_own(
    method: str, options: dict[str, Any], tiny_run: Any, tiny_data: str
) -> None:
    run = tiny_run(method, protocol=_SKEWED, **options)
    images = sum(len(domain.train) + len(domain.test) for domain in load(tiny_data).domains.values())
    clients = run.config["partition"]["clients"].values()
    assert sum(client["train"] + client["holdout"] for client in clients) == images
    accuracy = run.rounds[-1]["accuracy"]
    assert accuracy["global"] is None
    assert accuracy["personal"]["average"] is not None


def test_what_the_user_sets_goes_before_the_preset(tiny_run: Any, tiny_data: str) -> None:
    kept = tiny_run("conffedproto", protocol=_SKEWED, preset="authors", set={"data.merge_test": "false"})
    clients = kept.config["partition"]["clients"].values()
    training = sum(len(domain.train) for domain in load(tiny_data).domains.values())
    assert sum(client["train"] + client["holdout"] for client in clients) == training


def test_by_domain_a_preset_does_not_ask_for_it_and_a_user_may_not(tiny_run: Any) -> None:
    by_domain = tiny_run("conffedproto", preset="authors")
    assert by_domain.rounds[-1]["accuracy"]["personal"]["average"] is not None
    with pytest.raises(UserError, match="needs a protocol that splits by label"):
        tiny_run("conffedproto", set={"data.merge_test": "true"})


def test_in_a_comparison_all_methods_are_dealt_the_same_images(tmp_path: Path, tiny_data: str) -> None:
    options = {"model": "mlp", "rounds": 1, "batch": 8, "set": {"model.hidden": 16}, "preset": "authors"}
    protofed.compare(
        ["fedavg", "conffedproto"], data=tiny_data, protocol=_SKEWED, seeds=[0], out=tmp_path / "both", **options
    )
    first, second = _partitions(tmp_path / "both")
    assert first == second
    images = sum(len(domain.train) + len(domain.test) for domain in load(tiny_data).domains.values())
    assert sum(client["train"] + client["holdout"] for client in first["clients"].values()) == images


def test_a_sweep_never_sees_test_images(tmp_path: Path, tiny_data: str) -> None:
    options = {"model": "mlp", "rounds": 1, "batch": 8, "set": {"model.hidden": 16}, "protocol": _SKEWED}
    protofed.sweep("conffedproto", ["preset=authors"], data=tiny_data, out=tmp_path / "sweep", **options)
    (partition,) = _partitions(tmp_path / "sweep")
    training = sum(len(domain.train) for domain in load(tiny_data).domains.values())
    assert sum(client["train"] + client["holdout"] for client in partition["clients"].values()) == training


def _partitions(folder: Path) -> list[dict[str, Any]]:
    return [protofed.Run(path.parent).config["partition"] for path in sorted(folder.rglob("run.json"))]

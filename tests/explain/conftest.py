from pathlib import Path

import pytest
import torch

import protofed
from protofed.testing import toy_data


@pytest.fixture(scope="session")
def parts_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny run with part prototypes: three sites, 16x16 images, three snapshots, projected in the end."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("parts")
    data = toy_data(folder / "data", classes=2, size=16, channels=3)
    protofed.run(
        "fedadapterproto",
        data,
        out=folder / "run",
        model="resnet10",
        layout="standard",
        dtype="float64",
        rounds=2,
        batch=8,
        engine="loop",
        snapshot_rounds="0,1,2",
        project=True,
        set={"model.width": 2, "prototype_dim": 4, "per_class": 2},
    )
    return folder / "run"


@pytest.fixture(scope="session")
def fedmp_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny run of a method that sends features of single images."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("fedmp")
    data = toy_data(folder / "data", classes=3, size=16, absent={"a": [2]})
    settings = {"model.width": 2, "data.normalise": "half"}
    protofed.run(
        "fedmp",
        data,
        out=folder / "run",
        model="resnet10",
        layout="standard",
        rounds=2,
        batch=8,
        engine="loop",
        snapshot_rounds="0,1",
        set=settings,
    )
    return folder / "run"

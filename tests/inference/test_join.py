"""Joining: a newcomer against the broadcast of a complete run."""

import json
from pathlib import Path
from typing import Any

import pytest

from protofed.errors import UserError
from protofed.inference.join import join


@pytest.fixture
def newcomer(make_data: Any) -> str:
    return str(make_data(["d"], name="newcomer"))


def test_a_newcomer_fine_tunes_the_global_model(tiny_run: Any, newcomer: str, tmp_path: Path) -> None:
    run = tiny_run("i2pfl", rounds=4, lr=0.05)
    joined = join(run.path, newcomer, out=tmp_path / "joined", rounds=6)
    assert joined.client == "d-0"
    assert joined.start == "the global model"
    assert joined.target == run.summary["accuracy_final"]["personal"]["average"]
    told = json.loads((tmp_path / "joined/join.json").read_text())
    assert told["rounds"][0]["down"] == (run.path / "broadcast.safetensors").stat().st_size
    assert told["rounds"][0]["up"] > 0
    assert (tmp_path / "joined/model.safetensors").exists()
    if joined.reached is not None:
        assert joined.rounds[-1].round == joined.reached
        assert joined.rounds[-1].accuracy >= joined.target


def test_its_model_goes_on_from_round_to_round(tiny_run: Any, newcomer: str, tmp_path: Path, monkeypatch: Any) -> None:
    """It is not thrown back to the global model, as a client in a round of the run would be."""
    monkeypatch.setattr("protofed.inference.join._average_accuracy", lambda _: 2.0)  # never reached
    run = tiny_run("fedavg", rounds=1)
    one, three = (join(run.path, newcomer, out=tmp_path / f"joined{n}", rounds=n) for n in (1, 3))
    assert one.rounds[0] == three.rounds[0]
    assert one.reached is None
    assert len(three.rounds) == 3
    first, last = ((tmp_path / f"joined{n}/model.safetensors").read_bytes() for n in (1, 3))
    assert first != last


def test_an_architecture_of_its_own(tiny_run: Any, newcomer: str, tmp_path: Path) -> None:
    run = tiny_run("conffedproto", model="mlp,cnn")
    joined = join(run.path, newcomer, out=tmp_path / "joined", model="cnn", rounds=2)
    assert joined.start == "a fresh model"
    with pytest.raises(UserError, match="exchanges weights"):
        join(tiny_run("fedavg").path, newcomer, out=tmp_path / "other", model="cnn")


def test_a_backbone_and_a_fresh_head(tiny_run: Any, newcomer: str, tmp_path: Path) -> None:
    run = tiny_run("i2pfl")
    joined = join(run.path, newcomer, out=tmp_path / "joined", weights=str(run.path / "model.safetensors"), rounds=1)
    assert joined.start == "the weights given"


def test_refusals(tiny_run: Any, make_data: Any, newcomer: str, tmp_path: Path) -> None:
    run = tiny_run("i2pfl")
    with pytest.raises(UserError, match="pick it with --domains"):
        join(run.path, make_data(["d", "e"], name="two"), out=tmp_path / "joined")
    with pytest.raises(UserError, match="the newcomer has the classes"):
        join(run.path, make_data(["d"], name="more", classes=5), out=tmp_path / "joined")
    with pytest.raises(UserError, match="nobody can join this run"):
        join(tiny_run("copa").path, newcomer, out=tmp_path / "joined")
    assert not (tmp_path / "joined").exists()

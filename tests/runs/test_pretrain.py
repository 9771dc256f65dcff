"""Weights by centralised training, and their use."""

import pytest
import torch
from safetensors.torch import load_file

import protofed
from protofed.cli import main
from protofed.errors import UserError
from protofed.runs.pretrain import pretrain

TINY = {"model": "mlp", "batch": 8, "engine": "loop", "set": {"model.hidden": 16}}


class StopAfterFirstEpoch:
    def round_end(self, run, record):
        raise KeyboardInterrupt


def test_weights_can_be_started_from(tiny_data, make_data, tmp_path):
    file = tmp_path / "backbone.safetensors"
    done = pretrain(tiny_data, out=file, epochs=4, **TINY)
    assert done.summary["rounds"] == 4
    assert done.summary["bytes"]["up"]["total"] == 0
    assert done.summary["accuracy_final"]["global"]["average"] > 0.4
    assert done.config["plan"]["epochs"] == [1, 1, 1, 1]

    other = make_data(["x", "y"], classes=3)
    run = protofed.run("fedavg", other, weights=str(file), rounds=1, out=tmp_path / "run", **TINY)
    account = run.config["model"]["weights"]
    assert "2 of 4 tensors loaded" in account, "the head is for other classes"


def test_interrupted_training_goes_on(tiny_data, tmp_path):
    whole, halved = tmp_path / "whole.safetensors", tmp_path / "halved.safetensors"
    pretrain(tiny_data, out=whole, epochs=2, **TINY)
    with pytest.raises(KeyboardInterrupt):
        pretrain(tiny_data, out=halved, epochs=2, callbacks=[StopAfterFirstEpoch()], **TINY)
    assert not halved.exists()
    pretrain(tiny_data, out=halved, epochs=2, **TINY)
    left, right = load_file(whole), load_file(halved)
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_mistakes_are_named(tiny_data, tmp_path):
    with pytest.raises(UserError, match="safetensors"):
        pretrain(tiny_data, out=tmp_path / "weights.pth", **TINY)
    taken = tmp_path / "taken.safetensors"
    taken.touch()
    with pytest.raises(UserError, match="already exists"):
        pretrain(tiny_data, out=taken, **TINY)


def test_command(tiny_data, tmp_path, capsys):
    file = tmp_path / "weights.safetensors"
    chosen = ["--model", "mlp", "--epochs", "1", "--engine", "loop", "--out", str(file)]
    assert main(["pretrain", "--data", tiny_data, *chosen]) == 0
    assert "accuracy" in capsys.readouterr().out
    assert file.exists()
    assert main(["pretrain", *chosen]) == 2
    assert "--data" in capsys.readouterr().err

"""Run folders of commit 720a2f6 still open in every command, and one that was stopped goes on.

`tests/fixtures/runs` holds three: `i2pfl` and `fedadapterproto` are complete, `unfinished` is the first with its
second round still to come. They were made, in a folder with `toy_data(Path("data"), ("a", "b"), classes=2)`, by

    protofed run METHOD --data data --model resnet10 --set model.width=1 --set model.stem=cifar --layout standard
        --rounds 2 --batch 8 --engine loop --keep-messages [--project --set prototype_dim=2 --set per_class=1]

Do not make them anew when the format changes: reading what was written before is what they are for.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file

import protofed
from protofed.cli import main
from protofed.testing import toy_data

STORED = Path(__file__).parent.parent / "fixtures" / "runs"
COMPLETE = ["i2pfl", "fedadapterproto"]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the runs, their data, a newcomer's data and images without labels."""
    shutil.copytree(STORED, tmp_path, dirs_exist_ok=True)
    toy_data(tmp_path / "data", ("a", "b"), classes=2)
    toy_data(tmp_path / "other", ("z",), classes=2, seed=3)
    (tmp_path / "images").mkdir()
    pixels = np.random.default_rng(0).integers(0, 255, (2, 8, 8), dtype=np.uint8)
    for number, image in enumerate(pixels):
        Image.fromarray(image).save(tmp_path / "images" / f"{number}.png")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def printed(capfd: pytest.CaptureFixture[str], *words: str) -> Any:
    """What a command prints with --json."""
    capfd.readouterr()
    assert main([*words, "--json"]) == 0
    return json.loads(capfd.readouterr().out)


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("method", COMPLETE)
def test_as_a_run(method: str) -> None:
    run = protofed.Run(method)
    assert run.complete
    assert (run.config["method"]["name"], len(run.rounds), run.summary["rounds"]) == (method, 2, 2)
    assert run.model().classes == 2
    if method == "i2pfl":
        assert run.prototypes()["rows"].shape == (2, 8)


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("method", COMPLETE)
def test_evaluating_gives_the_accuracies_that_the_run_wrote(method: str, capfd: pytest.CaptureFixture[str]) -> None:
    models = printed(capfd, "evaluate", method, "--data", "data")["models"]
    written = protofed.Run(method).summary["accuracy_final"]["global"]
    assert models["global"]["domains"] == pytest.approx({domain: written[domain] for domain in ("a", "b")})


@pytest.mark.parametrize("method", COMPLETE)
def test_predicting_and_exporting(method: str, place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for client in ([], ["--client", "b-0"]):
        counts = printed(capfd, "predict", method, "--images", "images", "--out", "predictions.csv", *client)
        assert sum(counts.values()) == 2
    assert main(["export", method, "--format", "safetensors"]) == 0
    assert json.loads((place / method / "export/model.safetensors.json").read_text())["method"] == method


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("method", COMPLETE)
def test_explaining_and_embedding(method: str, capfd: pytest.CaptureFixture[str]) -> None:
    content = printed(capfd, "explain", method, "--images", "images", "--top", "1")
    assert content["clients"] == ["a-0", "b-0"]
    assert len(printed(capfd, "explain", method, "--domain", "a", "--count", "1")["images"]) == 1
    assert printed(capfd, "embed", method, "--out", "embeddings", "--samples", "16")["samples"] == 16


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("method", COMPLETE)
def test_auditing(method: str, capfd: pytest.CaptureFixture[str]) -> None:
    content = printed(capfd, "audit", method, "--steps", "2")
    assert content["messages"]
    assert content["membership"]


@pytest.mark.usefixtures("place")
@pytest.mark.parametrize("method", COMPLETE)
def test_joining(method: str, capfd: pytest.CaptureFixture[str]) -> None:
    content = printed(capfd, "join", method, "--data", "other", "--out", "newcomer", "--rounds", "1")
    assert content["start"] == "the global model"


@pytest.mark.parametrize("name", [*COMPLETE, "unfinished"])
def test_reporting(name: str, place: Path) -> None:
    assert main(["report", name]) == 0
    assert ("1 of 2 rounds are done" in (place / name / "report.html").read_text()) == (name == "unfinished")


def test_resuming_ends_where_the_uninterrupted_run_did(place: Path) -> None:
    assert main(["run", "--resume", "--out", "unfinished", "--quiet"]) == 0
    resumed, straight = protofed.Run("unfinished"), protofed.Run("i2pfl")
    assert resumed.rounds[0] == json.loads((STORED / "unfinished/rounds.jsonl").read_text())
    assert resumed.rounds[1]["train_loss"] == pytest.approx(straight.rounds[1]["train_loss"], rel=1e-3)
    models = [load_file(place / name / "model.safetensors") for name in ("unfinished", "i2pfl")]
    for name, tensor in models[1].items():
        # To rounding: the last bits depend on the machine and on the version of PyTorch.
        np.testing.assert_allclose(models[0][name], tensor, rtol=1e-3, atol=1e-5)

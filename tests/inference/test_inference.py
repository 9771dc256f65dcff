"""What came of a run predicts as the run itself was scored, from the run folder alone, here and in other programs."""

import csv
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open

import protofed
from protofed.cli import main
from protofed.data import load
from protofed.errors import UserError
from protofed.inference import Classifier, card_of, export, predict

GLOBAL = ["fedavg", "copa", "fedadapter", "fedmp_fewshot"]
SHORT = {"fedmp_fewshot": {"set": {"plan": "1,1,1"}}}
ONNX = ["fedavg", *(pytest.param(name, marks=pytest.mark.slow) for name in ("copa", "fedmp_fewshot"))]
PERSONAL = {"fedproto": {"inference": "nearest"}, "fedbn": {}, "conffedproto": {}}


def accuracy(classifier: Classifier, images: protofed.data.Images) -> float:
    return float((classifier.probabilities(images.x).argmax(1) == images.y).float().mean())


def without_data(run: protofed.Run, data: str, place: Path) -> protofed.Run:
    """The run folder on another machine, where its images are not."""
    shutil.copytree(run.path, place)
    config = json.loads((place / "run.json").read_text())
    config["options"]["data"] = config["options"]["data"].replace(data, "/nowhere")
    (place / "run.json").write_text(json.dumps(config))
    return protofed.Run(place)


@pytest.mark.parametrize("method", GLOBAL)
def test_the_servers_model_scores_as_in_the_run(method: str, tiny_run, tiny_data: str, tmp_path: Path) -> None:
    model = {"model": "resnet10", "set": {"model.width": 4}} if method == "fedadapter" else {}
    run = tiny_run(method, **{**SHORT.get(method, {}), **model})
    moved = without_data(run, tiny_data, tmp_path / "moved")
    classifier = Classifier(moved)
    said = run.summary["accuracy_final"]["global"]
    for name, domain in load(tiny_data).domains.items():
        assert accuracy(classifier, domain.test) == pytest.approx(said[name])


@pytest.mark.parametrize("method", PERSONAL)
def test_a_clients_model_scores_as_in_the_run(method: str, tiny_run, tiny_data: str, tmp_path: Path) -> None:
    model = {"model": "resnet10"} if method == "fedbn" else {}
    settings = {**PERSONAL[method], **({"model.width": 4} if model else {})}
    run = tiny_run(method, **model, set=settings)
    moved = without_data(run, tiny_data, tmp_path / "moved")
    said = run.summary["accuracy_final"]["personal"]
    for client, entry in run.config["partition"]["clients"].items():
        test = load(tiny_data).domains[entry["domain"]].test
        assert accuracy(Classifier(moved, client), test) == pytest.approx(said[client])
    with pytest.raises(UserError, match="every client keeps its own; give --client, one of a-0, b-0"):
        Classifier(moved)
    with pytest.raises(UserError, match="did you mean a-0"):
        Classifier(moved, "a-1")


def test_clients_with_their_own_architectures(tiny_run) -> None:
    run = tiny_run("fedproto", model="mlp,cnn")
    sizes = [sum(p.numel() for p in Classifier(run, client).parameters()) for client in ("a-0", "b-0", "c-0")]
    assert sizes[0] == sizes[2] != sizes[1]


def test_predictions_of_a_folder(tiny_run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tiny_run("fedavg")
    rng = np.random.default_rng(0)
    for name, size in (("b/2.png", (8, 8)), ("a.png", (20, 12)), ("b/1.jpg", (8, 8))):
        place = tmp_path / "new" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8)).save(place)
    (tmp_path / "new" / "notes.txt").write_text("no image")
    out = tmp_path / "deep" / "found.csv"
    assert main(["predict", str(run.path), "--images", str(tmp_path / "new"), "--out", str(out)]) == 0
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["file"] for row in rows] == ["a.png", "b/1.jpg", "b/2.png"]
    classes = run.config["data"]["classes"]
    for row in rows:
        chances = [float(row[name]) for name in classes]
        assert sum(chances) == pytest.approx(1, abs=1e-4)
        assert row["predicted"] == classes[int(np.argmax(chances))]
    one = predict(Classifier(run), tmp_path / "new" / "a.png", tmp_path / "one.csv")
    assert sum(one.values()) == 1
    (tmp_path / "empty").mkdir()
    assert main(["predict", str(run.path), "--images", str(tmp_path / "empty"), "--out", str(out)]) == 2
    assert "contains no images" in capsys.readouterr().err


def test_safetensors_hold_the_network_and_its_card(tiny_run) -> None:
    run = tiny_run("fedavg")
    path = export(Classifier(run), "safetensors")
    assert path == run.path / "export" / "model.safetensors"
    card = json.loads(card_of(path).read_text())
    assert card["classes"] == run.config["data"]["classes"]
    assert card["normalise"]["inside"] is False
    assert card["check"]["largest_difference"] == 0
    with safe_open(path, "pt") as file:
        assert json.loads(file.metadata()["protofed"])["method"] == "fedavg"
        names = set(file.keys())
    assert names == set(dict(run.model().named_parameters()))
    warm = tiny_run("fedavg", weights=str(path), rounds=1)
    assert f"{len(names)} of {len(names)} tensors loaded" in warm.config["model"]["weights"]


def test_a_file_that_predicts_otherwise_is_not_kept(tiny_run, tmp_path: Path) -> None:
    run = tiny_run("fedavg", ensemble=True)
    with pytest.raises(UserError, match="was not kept"):
        export(Classifier(run), "safetensors", tmp_path / "out" / "model.safetensors")
    assert list((tmp_path / "out").iterdir()) == []
    with pytest.raises(UserError, match="did you mean onnx"):
        export(Classifier(run), "onx")


@pytest.mark.parametrize("method", ONNX)
def test_onnx_predicts_as_the_run_for_any_batch(method: str, tiny_run, tiny_data: str) -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="pip install 'protofed[export]'")
    run = tiny_run(method, **SHORT.get(method, {}))
    classifier = Classifier(run)
    path = export(classifier, "onnx")
    assert [each.name for each in sorted(path.parent.iterdir())] == ["model.onnx", "model.onnx.json"]
    card = json.loads(card_of(path).read_text())
    assert card["normalise"]["inside"] is True
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    assert json.loads(session.get_modelmeta().custom_metadata_map["protofed"])["classes"] == list(classifier.classes)
    pixels = torch.cat([domain.test.x for domain in load(tiny_data).domains.values()])
    for count in (1, 3, len(pixels)):
        found = session.run(None, {"pixels": pixels[:count].numpy()})[0]
        off = np.abs(found - classifier.probabilities(pixels[:count]).numpy()).max()
        assert off < 1e-4  # what `export` itself allows


def test_an_unfinished_run_is_refused(tiny_run) -> None:
    run = tiny_run("fedavg")
    (run.path / "summary.json").unlink()
    with pytest.raises(UserError, match="not complete"):
        Classifier(run)


def test_a_damaged_state_is_named(tiny_run) -> None:
    run = tiny_run("fedbn", rounds=1)
    path = run.path / "clients" / "b-0.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match="is damaged: b-0's stored state"):
        Classifier(run, "b-0")

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from protofed.cli import main
from protofed.errors import UserError
from protofed.experiments.reopening import OpenRun
from protofed.explain import evaluate, explain
from protofed.explain.agreement import agreement
from protofed.explain.evaluating import metrics
from protofed.explain.evidence import Evidence, Explanation
from protofed.explain.faithfulness import FRACTIONS, blur, pointing_game, random_box
from protofed.explain.maps import Box, peak_box
from protofed.seeding import numpy_generator
from protofed.testing import toy_data


def evidence(peak: tuple[int, int], label: int = 1) -> Evidence:
    rows, columns = np.mgrid[0:32, 0:32]
    values = np.exp(-((rows - peak[0]) ** 2 + (columns - peak[1]) ** 2) / 30).astype(np.float32)
    return Evidence(0, label, 1.0, 1.0, 1.0, values, peak_box(values), (8, 8))


def view(client: str, peak: tuple[int, int], label: int = 1) -> Explanation:
    return Explanation(client, (0.1, 0.9) if label else (0.9, 0.1), (evidence(peak, label),))


def test_agreement_between_clients() -> None:
    explained = {
        "a": [view("a", (8, 8)), view("a", (8, 8))],
        "b": [view("b", (8, 8)), view("b", (8, 8), label=0)],
        "c": [view("c", (24, 24)), view("c", (8, 8))],
    }
    found = agreement(explained, ["healthy", "diseased"])
    pairs = {tuple(pair["clients"]): pair for pair in found["pairs"]}
    assert pairs["a", "b"]["same_class"] == 0.5
    assert pairs["a", "b"]["iou"] == 1.0
    assert pairs["a", "b"]["rank_correlation"] == pytest.approx(1.0)
    assert pairs["a", "c"]["iou"] == 0.5  # once the same box, once another
    assert found["classes"]["healthy"] == {"images": 0, "same_class": None, "iou": None, "rank_correlation": None}
    assert found["overall"]["images"] == 6
    assert found["overall"]["same_class"] == pytest.approx(4 / 6)


def test_pointing_game() -> None:
    hit, chance = pointing_game(
        [view("a", (8, 8)), view("a", (24, 24))], np.array([[8.0, 8.0], [8.0, 8.0]]), (32, 32), numpy_generator(0, "t")
    )
    assert hit == [True, False]
    assert all(0 <= share < 0.5 for share in chance)


def test_random_boxes_have_the_size_and_lie_inside() -> None:
    rng = numpy_generator(0, "boxes")
    for _ in range(50):
        box = random_box(Box(3, 8, 20, 32), (32, 32), rng)
        assert (box.height, box.width) == (5, 12)
        assert box.top >= 0
        assert box.bottom <= 32
        assert box.left >= 0
        assert box.right <= 32


def test_blur_keeps_the_light_and_loses_spots() -> None:
    import torch

    image = torch.full((3, 32, 32), 100.0)
    image[:, 10, 10] = 255.0
    smooth = blur(image)
    assert float(smooth.max()) < 105
    assert float(blur(torch.full((1, 16, 24), 7.0)).sub(7).abs().max()) < 1e-3


def test_a_folder_of_explanations(parts_run: Path, tmp_path: Path) -> None:
    content = explain(parts_run, domain="b", count=3, top=2, out=tmp_path / "why", faithful=True)
    stored = json.loads((tmp_path / "why" / "explanations.json").read_text())
    assert stored == json.loads(json.dumps(content))
    assert stored["clients"] == ["a-0", "b-0", "c-0"]
    assert len(stored["images"]) == 3
    for image in stored["images"]:
        assert len(image["pictures"]) == 2
        for name in image["pictures"]:
            with Image.open(tmp_path / "why" / name) as picture:
                assert picture.width > 3 * 100
        for client in image["clients"]:
            assert sum(client["probabilities"]) == pytest.approx(1, abs=1e-4)
            assert client["agrees"] == (client["predicted"] == image["label"])
            assert len(client["prototypes"]) == 2
    assert any("2x2 positions" in note for note in stored["notes"])
    text = (tmp_path / "why" / "index.html").read_text()
    assert text.count("data:image/png;base64,") == 3 * 2 + 2 + bool(stored["faithfulness"])
    assert "http" not in text
    if stored["faithfulness"]:
        assert stored["faithfulness"]["fractions"] == list(FRACTIONS)
        for curves in stored["faithfulness"]["clients"].values():
            assert curves["deletion"][0] == pytest.approx(curves["deletion_random"][0])
            assert curves["insertion"][0] == pytest.approx(curves["insertion_random"][0])


def test_images_of_the_user(parts_run: Path, tmp_path: Path) -> None:
    folder = tmp_path / "mine" / "class1"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for number in range(2):
        Image.fromarray(rng.integers(0, 255, (40, 30), dtype=np.uint8)).save(folder / f"{number}.png")
    content = explain(parts_run, images=tmp_path / "mine", clients=["a-0"], out=tmp_path / "why")
    assert [image["label"] for image in content["images"]] == ["class1", "class1"]
    assert [image["name"] for image in content["images"]] == ["class1/0.png", "class1/1.png"]
    assert content["agreement"] is None


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "give the images to explain"),
        ({"domain": "nowhere"}, "unknown domain 'nowhere'"),
        ({"domain": "a", "label": "ill"}, "unknown class 'ill'"),
        ({"images": "missing"}, "there is no missing"),
        ({"domain": "a", "clients": ["x-0"]}, "unknown client 'x-0'"),
    ],
)
def test_mistakes_are_named(parts_run: Path, tmp_path: Path, options: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=text):
        explain(parts_run, out=tmp_path / "why", **options)


def test_projection_on_demand_gives_what_the_end_of_the_run_gave(parts_run: Path, tmp_path: Path) -> None:
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(parts_run, copy)
    kept = {path.name: path.read_bytes() for path in copy.glob("clients/*.projection.safetensors")}
    assert len(kept) == 3
    for name in kept:
        (copy / "clients" / name).unlink()
    content = explain(copy, domain="a", count=1, project=True, out=tmp_path / "why")
    assert {path.name: path.read_bytes() for path in copy.glob("clients/*.projection.safetensors")} == kept
    assert content["projection"] == OpenRun(parts_run).run.summary["projection"]


def test_metrics_by_hand() -> None:
    probabilities = np.array([[0.9, 0.1], [0.6, 0.4], [0.3, 0.7], [0.7, 0.3]])
    found = metrics(probabilities, np.array([0, 0, 1, 1]))
    assert found["accuracy"] == 0.75
    assert found["balanced_accuracy"] == 0.75
    assert found["auc"] == 0.75
    assert found["confusion"] == [[2, 0], [1, 1]]
    assert metrics(probabilities, np.array([0, 0, 0, 0]))["auc"] is None


def test_auc_of_three_classes_is_that_of_scikit_learn() -> None:
    from sklearn.metrics import roc_auc_score

    rng = np.random.default_rng(0)
    probabilities = rng.dirichlet(np.ones(3), 60).round(1) + 1e-3
    probabilities /= probabilities.sum(1, keepdims=True)
    y = rng.integers(0, 3, 60)
    expected = roc_auc_score(y, probabilities, multi_class="ovr", average="macro")
    assert metrics(probabilities, y)["auc"] == pytest.approx(expected)


def test_evaluation_equals_that_of_the_run(parts_run: Path) -> None:
    opened = OpenRun(parts_run)
    content = evaluate(parts_run, opened.config["options"]["data"])
    final = opened.run.summary["accuracy_final"]["global"]
    for domain in ("a", "b", "c"):
        assert content["models"]["global"]["domains"][domain] == pytest.approx(final[domain])
    assert set(content["models"]) == {"a-0", "b-0", "c-0", "global"}
    assert content["images"] == 36
    with pytest.raises(UserError, match="regroup"):
        evaluate(parts_run, opened.config["options"]["data"], labels="0=well,1=ill")


def test_commands(parts_run: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = OpenRun(parts_run).config["options"]["data"]
    assert main(["explain", str(parts_run), "--domain", "a", "--count", "2", "--out", str(tmp_path / "why")]) == 0
    assert "Agreement" in capfd.readouterr().out
    assert main(["evaluate", str(parts_run), "--data", data, "--part", "all", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["images"] == 3 * 36
    assert main(["explain", str(tmp_path), "--domain", "a"]) == 2
    assert "not a run folder" in capfd.readouterr().err


def test_figures_of_the_papers_are_drawn(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "root"
    toy_data(
        root / "office_caltech10", ["caltech", "amazon", "webcam", "dslr"], classes=10, train=60, test=20, channels=3
    )
    words = ["reproduce", "i2pfl.figure11", "--data-root", str(root), "--methods", "fedavg,i2pfl", "--engine", "loop"]
    tiny = ["--model", "mlp", "--image-size", "8", "--rounds", "1", "--epochs", "1", "--set", "data.augment=none"]
    assert main([*words, *tiny, "--out", str(tmp_path / "out")]) == 0
    assert "drawn: " in capfd.readouterr().out
    folder = tmp_path / "out" / "office_caltech10" / "embeddings"
    panels = json.loads((folder / "embeddings.json").read_text())["panels"]
    assert [panel["method"] for panel in panels] == ["fedavg", "i2pfl"]
    assert (folder / "embeddings.png").exists()

import html
import json
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from protofed.cli import main
from protofed.errors import UserError
from protofed.explain import embed, explain, explaining
from protofed.explain.agreement import agreement
from protofed.explain.evidence import explain_with
from protofed.explain.explanation import Evidence, Explanation
from protofed.explain.faithfulness import FRACTIONS, _by_activation, blur, faithfulness
from protofed.explain.maps import Box, peak_box, random_box
from protofed.explain.pictures import COOL, WARM, Column, figure, overlay
from protofed.explain.wording import findings
from protofed.report.content import read
from protofed.report.galleries import galleries
from protofed.runs.opened import OpenRun
from protofed.seeding import numpy_generator
from protofed.studies.tables.results import read_results
from protofed.testing import toy_data


def evidence(peak: tuple[int, int], label: int = 1) -> Evidence:
    rows, columns = np.mgrid[0:32, 0:32]
    values = np.exp(-((rows - peak[0]) ** 2 + (columns - peak[1]) ** 2) / 30).astype(np.float32)
    return Evidence(0, label, 1.0, 1.0, 1.0, values, peak_box(values), (8, 8))


def view(client: str, peak: tuple[int, int], label: int = 1) -> Explanation:
    return Explanation(client, (0.1, 0.9) if label else (0.9, 0.1), (evidence(peak, label),))


def red_columns(picture: Image.Image) -> np.ndarray:
    drawn = np.asarray(picture).astype(int)
    return ((drawn[:, :, 0] > 200) & (drawn[:, :, 1] < 40) & (drawn[:, :, 2] < 50)).any(0).nonzero()[0]


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
    assert found["classes"]["healthy"]["compared"] == 0
    assert found["classes"]["healthy"]["iou"] is None
    assert found["images"][0]["same_class"] == 1.0
    assert found["images"][0]["iou"] == pytest.approx(1 / 3)  # a and b alike, c elsewhere
    assert found["images"][1]["same_class"] == pytest.approx(1 / 3)
    assert 0 < found["overall"]["iou_random"] < found["overall"]["iou"]
    assert found["overall"]["compared"] == 6
    assert found["overall"]["same_class"] == pytest.approx(4 / 6)


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


def test_warm_is_for_and_cool_against_and_grey_is_neither() -> None:
    image = np.full((32, 32, 3), 128, dtype=np.uint8)
    spoken = evidence((8, 8))
    warm, cool = overlay(image, spoken), overlay(image, replace(spoken, lift=-1.0))
    for drawn, shade in ((warm, WARM), (cool, COOL)):
        assert np.abs(drawn[8, 8].astype(int) - shade).max() < 40
        assert np.ptp(drawn[30, 30]) == 0
    assert np.abs(overlay(image, spoken, 0.1).astype(int) - overlay(image, spoken, 0.0)).max() < 20


def test_a_weaker_prototype_is_paler() -> None:
    loud, quiet = evidence((8, 8)), replace(evidence((20, 20)), lift=-0.25)
    both = Explanation("a", (0.1, 0.9), (loud, quiet))
    assert Column("a", both, loud, None).strength == 1.0
    assert Column("a", both, quiet, None).strength == 0.25


def test_a_figure_has_a_red_box_for_each_client_and_none_in_the_unmarked_image() -> None:
    image = np.zeros((32, 32, 3), dtype=np.uint8)
    columns = [Column(name, each, each.strongest, None, True) for name in "ab" for each in [view(name, (8, 8))]]
    across = red_columns(figure(image, columns, ["healthy", "diseased"]))
    assert 1 + int((np.diff(across) > 20).sum()) == 2  # boxes that lie apart
    flat = replace(columns[0].evidence, box=None)
    without = [Column("a", Explanation("a", (0.1, 0.9), (flat,)), flat, None, False)]
    assert not len(red_columns(figure(image, without, ["healthy", "diseased"])))


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
    assert text.count("data:image/png;base64,") == 3 * 2 + 2 + 1
    assert "://" not in text
    assert stored["faithfulness"]["fractions"] == list(FRACTIONS)
    for curves in stored["faithfulness"]["clients"].values():
        assert curves["deletion"][0] == pytest.approx(curves["deletion_random"][0])
        assert curves["insertion"][0] == pytest.approx(curves["insertion_random"][0])
        assert 0 <= curves["deletion_wins"] <= 1
    for finding in stored["findings"]:
        assert finding in html.unescape(text)


def test_the_report_of_a_run_shows_its_explanations_and_embeddings(parts_run: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(parts_run, copy)
    explain(copy, domain="b", count=2, faithful=True)
    embed([copy], out=copy / "embeddings", samples=20, rounds=[0, 2])
    # Its clients have projected their prototypes, so pictures of images show pieces of training images, too.
    fit_to_send = {gallery.name: gallery for gallery in galleries(read(copy).all_runs)}["explanations"]
    assert (len(fit_to_send.pictures), fit_to_send.of_training_images) == (2 + 1, 2)
    assert "pieces of training images" in (copy / "explanations" / "index.html").read_text()
    found = {gallery.name: gallery for gallery in galleries(read(copy).all_runs, with_training_images=True)}
    assert len(found["explanations"].pictures) == 2 + 2 + 1
    assert found["explanations"].left_out == 0
    assert found["explanations"].tables[0].title == "Agreement between clients"
    assert "overlap" in found["explanations"].text
    assert len(found["embeddings"].pictures) == 1
    assert len(found["embeddings"].tables[0].rows) == 2


def test_findings_say_whether_boxes_matter() -> None:
    def verdict(costs: float, brings: float) -> str:
        curves = {"deletion_gap": costs, "insertion_gap": brings}
        content = {"images": [], "agreement": None, "faithfulness": {"clients": {"a-0": curves}}}
        (text,) = findings(content)
        return text

    assert verdict(0.3, 0.2).endswith("the box matters.")
    assert verdict(0.0, -0.1).endswith("the box hardly explains the decision.")
    assert verdict(0.3, 0.0).endswith("the two tests disagree on whether the box matters.")


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
    copy = tmp_path / "copy"
    shutil.copytree(parts_run, copy)
    kept = {path.name: path.read_bytes() for path in copy.glob("clients/*.projection.safetensors")}
    assert len(kept) == 3
    for name in kept:
        (copy / "clients" / name).unlink()
    content = explain(copy, domain="a", count=1, project=True, out=tmp_path / "why")
    assert {path.name: path.read_bytes() for path in copy.glob("clients/*.projection.safetensors")} == kept
    assert content["projection"] == OpenRun(parts_run).run.summary["projection"]


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


@pytest.mark.parametrize("table", ["fedadapterproto.figure4", "fedadapterproto.figure4*"], ids=["one", "several"])
def test_explanations_of_the_papers_are_drawn(table: str, tmp_path: Path) -> None:
    """Figure 4 of FedAdapterProto: a site that took no part is explained by the others' models, seed by seed."""
    sites = ["eyepacs", "idrid", "aptos"]
    toy_data(tmp_path / "root" / "dr_fundus", sites, classes=5, train=40, test=20, size=16, channels=3)
    words = ["reproduce", table, "--data-root", str(tmp_path / "root"), "--engine", "loop", "--seeds", "0,1"]
    tiny = ["--rounds", "1", "--image-size", "16", "--set", "model.width=2", "--set", "prototype_dim=4"]
    tiny += ["--labels", "class0=healthy,class1-class4=diseased"]
    assert main([*words, *tiny, "--out", str(tmp_path / "out"), "--results", str(tmp_path / "data")]) == 0
    drawn = sorted((tmp_path / "out").rglob("explanations/index.html"))
    written = read_results(tmp_path / "data" / "fedadapterproto.figure4-external-lite.json")["runs"]
    assert len(drawn) == len(written) == 2
    for page, record in zip(drawn, written, strict=True):
        content = json.loads((page.parent / "explanations.json").read_text())
        assert content["clients"] == ["eyepacs-0", "idrid-0"]
        assert {image["label"] for image in content["images"]} == {"diseased"}
        assert content["projection"] is not None
        # What the pictures come to is in the results, which can be read without them.
        scores = record["explanations"]
        assert scores["images"] == len(content["images"])
        (pair,) = content["agreement"]["pairs"]
        assert list(scores["agreement"]) == ["eyepacs-0 and idrid-0", "all"]
        for who, compared in zip(scores["agreement"], (pair, content["agreement"]["overall"]), strict=True):
            for key, agreed in scores["agreement"][who].items():
                assert agreed == pytest.approx(compared[key], abs=1e-6)
        for number, client in enumerate(content["clients"]):
            curves, model = content["faithfulness"]["clients"][client], scores["models"][client]
            right = [image["clients"][number]["agrees"] for image in content["images"]]
            ends = (curves["deletion"][0], curves["deletion"][-1], curves["deletion_random"][-1])
            ends += (curves["insertion"][0], curves["insertion"][-1], curves["insertion_random"][-1])
            assert list(model.values()) == pytest.approx([sum(right) / len(right), *ends], abs=1e-6)


def test_every_column_is_its_own_clients(parts_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[list[Column]] = []

    def keep(image: np.ndarray, columns: list[Column], classes: list[str]) -> Image.Image:
        drawn.append(columns)
        return figure(image, columns, classes)

    monkeypatch.setattr(explaining, "figure", keep)
    explain(parts_run, domain="b", count=1, top=1, out=tmp_path / "why")
    (columns,) = drawn
    opened = OpenRun(parts_run, with_data=True)
    pixels = opened.context.dataset.domains["b"].test.x[:1]
    assert [column.title for column in columns] == opened.clients
    for column in columns:
        (own,) = explain_with(opened, column.title, pixels, top=1)
        assert column.explanation.probabilities == pytest.approx(own.probabilities)
        assert column.evidence.lift == pytest.approx(own.strongest.lift)
    assert len({column.evidence.lift for column in columns}) > 1


def test_curves_begin_at_the_image_and_at_its_blur(parts_run: Path) -> None:
    opened = OpenRun(parts_run, with_data=True)
    pixels = opened.context.dataset.domains["a"].test.x[:6]
    views = explain_with(opened, "a-0", pixels, top=1)
    boxed = [i for i, each in enumerate(views) if each.strongest.box is not None]
    curves = faithfulness(opened, "a-0", pixels, views, numpy_generator(0, "faithful"))
    assert curves is not None
    assert curves.images == len(boxed)
    net, at = opened.model_of("a-0")
    ends = []
    for change in (lambda image: image, blur):
        x = opened.normalised(torch.stack([change(pixels[i].float()) for i in boxed]) / 255)
        with torch.no_grad(), net.eval():
            given = opened.method.predict(net, x, at)
        ends.append(np.mean([given[n, views[i].predicted].item() for n, i in enumerate(boxed)]))
    assert curves.deletion[0] == pytest.approx(ends[0], abs=1e-6)
    assert curves.insertion[0] == pytest.approx(ends[1], abs=1e-6)


def test_a_box_wins_over_the_mean_of_random_ones() -> None:
    """A model whose probability is the brightness of the image, and a box about its only bright spot."""
    spot = np.zeros((32, 32), dtype=np.float32)
    spot[8:16, 8:16] = 255
    bright = torch.from_numpy(spot)[None]
    shown = replace(evidence((12, 12)), map=spot, box=Box(8, 16, 8, 16))
    seen: list[torch.Tensor] = []

    def brightness(_net: Any, x: torch.Tensor, _at: Any) -> torch.Tensor:
        seen.append(x.mean((1, 2, 3)))
        return torch.stack([1 - seen[-1], seen[-1]], 1)

    opened = SimpleNamespace(
        model_of=lambda _: (SimpleNamespace(eval=nullcontext), None),
        normalised=lambda x: x,
        method=SimpleNamespace(predict=brightness),
    )
    view = Explanation("a", (0.0, 1.0), (shown,))
    curves = faithfulness(opened, "a", bright[None], [view], numpy_generator(0, "f"), randoms=3)  # type: ignore[arg-type]
    assert curves is not None
    assert (curves.deletion_wins, curves.insertion_wins) == (1, 1)
    by_box = seen[0].double().view(2, 4, len(FRACTIONS)).numpy()
    assert len({round(float(value), 6) for value in by_box[0, 1:, -1]}) > 1
    assert curves.deletion_random == pytest.approx(by_box[0, 1:].mean(0))
    assert curves.insertion_random == pytest.approx(by_box[1, 1:].mean(0))


def test_pixels_go_in_the_order_of_the_map() -> None:
    shown = evidence((10, 20))
    assert shown.box is not None
    order = _by_activation(shown, shown.box)
    values = shown.map.ravel()[order]
    assert (np.diff(values) <= 0).all()
    assert order[0] == 10 * 32 + 20
    assert len(order) == shown.box.height * shown.box.width

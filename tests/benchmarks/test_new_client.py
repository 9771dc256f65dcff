"""A newcomer whose images nobody else has, with and without prototypes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protofed.runs.opened import OpenRun
from protofed.studies.tables.result_tables import ResultTables
from protofed.studies.tables.results import read_results

CLASSES = 5


@pytest.fixture
def study(benchmark: Any, monkeypatch: Any, tmp_path: Path) -> Any:
    """The benchmark on a little noise: no image is there twice."""
    found = benchmark("new_client")
    rng = np.random.default_rng(0)
    arrays = {"classes": np.array([str(digit) for digit in range(CLASSES)])}
    for part, count in (("train", 100), ("test", 30)):
        arrays[f"y_{part}"] = np.arange(count) % CLASSES
        arrays[f"x_{part}"] = rng.integers(0, 256, (count, 16, 16, 1), dtype=np.uint8)
    (tmp_path / "digits").mkdir()
    np.savez(tmp_path / "digits" / "mnist.npz", **arrays)
    monkeypatch.setattr(found, "SIZES", (8, 16))
    monkeypatch.setattr(found, "TESTED", 4)
    for name, value in {"rounds": 1, "protocol": "iid=2", "image_size": 16}.items():
        monkeypatch.setitem(found.FEDERATION, name, value)
    return found


def images_in(x: Any) -> set[bytes]:
    return {np.asarray(image).tobytes() for image in x}


def test_the_newcomers_images_take_no_part_in_the_federation(study: Any, tmp_path: Path) -> None:
    others, newcomers = study.write_images(tmp_path / "digits" / "mnist.npz", 0, tmp_path / "out")
    run = OpenRun(study.federation("fedproto", others, 0, tmp_path / "out"), with_data=True)
    domain = run.context.dataset.domains["mnist"]
    used = images_in(domain.train.x[:].numpy()) | images_in(domain.test.x[:].numpy())
    assert len(used) == 130 - 16 - 4 * 4
    held = {}
    for size, folder in newcomers.items():
        own = np.load(folder / "mnist.npz")
        held[size] = images_in(own["x_train"].transpose(0, 3, 1, 2))
        tested = images_in(own["x_test"].transpose(0, 3, 1, 2))
        assert [len(held[size]), len(tested)] == [size, 4 * 4]
        assert used.isdisjoint(held[size] | tested)
        assert held[size].isdisjoint(tested)
        assert set(own["y_train"]) == set(own["y_test"])
        assert np.bincount(own["y_train"]).max() == size // 4
    assert held[8] < held[16]


def test_only_the_newcomer_alone_does_without_prototypes(study: Any, tmp_path: Path, monkeypatch: Any) -> None:
    """Prototypes of other classes change the model of every other newcomer."""
    join, models = study.join, []

    def watched(*given: Any, out: Path, **options: Any) -> Any:
        result = join(*given, out=out, **options)
        models.append((out / "model.safetensors").read_bytes())
        return result

    monkeypatch.setattr(study, "join", watched)
    others, newcomers = study.write_images(tmp_path / "digits" / "mnist.npz", 0, tmp_path / "out")
    runs = {method: study.federation(method, others, 0, tmp_path / "out") for method in ("fedproto", "conffedproto")}
    turned = {method: study.swapped(run, tmp_path / "turned") for method, run in runs.items()}
    for name, row in study.ROWS.items():
        for chosen in (runs, turned):
            assert len(study.joined(row, chosen, newcomers[16], 0, 2)[1].rounds) == 2
        assert (models[-2] == models[-1]) == name.startswith("alone"), name


def test_the_file_has_every_row_and_size(study: Any, tmp_path: Path, capsys: Any) -> None:
    folders = ["--data-root", str(tmp_path), "--out", str(tmp_path / "out"), "--results", str(tmp_path / "results")]
    content = study.main([*folders, "--seeds", "0", "--rounds", "1"])
    assert read_results(tmp_path / "results" / "conffedproto.new_client-mnist-lite.json") == content
    assert len(content["runs"]) == 2 * len(study.ROWS)
    tables = ResultTables(content)
    assert [row[0] for row in tables.table("accuracy", "personal").rows] == list(study.ROWS)
    costs = {row[0]: row for row in tables.costs().rows}
    assert [costs[name][4] for name in ("alone", "alone, cnn")] == ["0 B", "0 B"]
    assert costs["conffedproto"][4] not in ("0 B", "-")
    assert str(tmp_path) not in content["command"]
    assert "round 1" in capsys.readouterr().out

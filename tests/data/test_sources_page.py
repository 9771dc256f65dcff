"""`protofed data NAME` and whole runs on original files."""

import gzip
import hashlib
import json
import struct
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

import protofed
from protofed.cli.app import main
from protofed.data.sources import SOURCES
from protofed.errors import UserError


@pytest.fixture
def root(tmp_path):
    """A data root with PACS and MNIST as their publishers hand them out, a few images of each."""
    rng = np.random.default_rng(0)
    for domain in ("photo", "art_painting", "cartoon", "sketch"):
        for label in ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person"):
            folder = tmp_path / "pacs" / domain / label
            folder.mkdir(parents=True)
            for each in range(3):
                Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)).save(folder / f"pic_{each:03}.jpg")
    (tmp_path / "mnist").mkdir()
    for part, number in (("train", 20), ("t10k", 10)):
        x, y = rng.integers(0, 256, (number, 28, 28), dtype=np.uint8), np.arange(number, dtype=np.uint8) % 10
        for name, values in (("images-idx3", x), ("labels-idx1", y)):
            header = struct.pack(f">HBB{values.ndim}I", 0, 8, values.ndim, *values.shape)
            (tmp_path / "mnist" / f"{part}-{name}-ubyte.gz").write_bytes(gzip.compress(header + values.tobytes()))
    return tmp_path


def page(capsys, *arguments):
    assert main(["data", *map(str, arguments)]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", list(SOURCES))
def test_every_set_has_a_page(capsys, name):
    text = page(capsys, name)
    assert "State: " in text
    if name not in ("digits", "tb", "dr_fundus"):
        for word in ("From: ", "Download: ", "Licence: ", "Layout under the data root:", "Split: ", "not found"):
            assert word in text


def test_the_page_says_what_is_there(capsys, root):
    text = page(capsys, "pacs", "--data-root", root)
    assert f"State: found, as original files in {root}" in text
    assert "--set data.pacs_test=heldout|all (default heldout)" in text
    assert "has 17 training and 4 test images" not in text, "photographs are counted on demand only"
    assert "has 17 training and 4 test images" in page(capsys, "pacs", "--data-root", root, "--check")
    assert f"mnist: {root / 'mnist'}" in page(capsys, "digits", "--data-root", root)
    assert "State: not found" in page(capsys, "tb", "--data-root", root)


def test_checksums_are_verified(capsys, root, monkeypatch):
    text = page(capsys, "mnist", "--data-root", root, "--check")
    assert text.count("does not match") == 4
    right = {path.name: hashlib.md5(path.read_bytes()).hexdigest() for path in (root / "mnist").iterdir()}
    monkeypatch.setitem(SOURCES, "mnist", replace(SOURCES["mnist"], md5=right))
    assert "does not match" not in page(capsys, "mnist", "--data-root", root, "--check")


def test_the_page_for_machines(capsys, root):
    facts = json.loads(page(capsys, "pacs", "--data-root", root, "--json"))
    assert facts["original_files"]["state"] == "original"
    assert facts["original_files"]["settings"]["pacs_test"]["values"] == "heldout|all"
    assert facts["original_files"]["counts"]["sketch"] == [3144, 785]
    facts = json.loads(page(capsys, "digits", "--data-root", root, "--check", "--json"))
    assert [domain["name"] for domain in facts["domains"]] == ["mnist"]
    assert facts["original_files"]["members"]["usps"] is None
    assert len(facts["wrong_files"]) == 4


def test_the_list_names_sets_to_get(capsys, root):
    text = page(capsys, "--data-root", root)
    at_hand, _, others = text.partition("Read from original files")
    assert " pacs " in at_hand
    assert "covid_qu_ex" in others
    assert " pacs " not in others


def run(root, folder, **settings):
    return protofed.run(
        method="fedavg", data="pacs", data_root=str(root), image_size=8, model="mlp", rounds=1, engine="loop",
        set=settings, out=str(folder),
    )  # fmt: skip


def test_a_run_on_original_files_says_so(root, tmp_path):
    done = run(root, tmp_path / "run", **{"data.pacs_test": "all"})
    data = done.config["data"]
    assert data["source"].startswith("original files of pacs in folder pacs; split: ")
    assert data["source"].endswith("pacs_test=all")
    assert data["domains"]["photo"] == {"train": 17, "test": 21}


def test_settings_of_a_run_are_checked(root, tmp_path):
    for setting, line in (
        ({"data.pacs_test": "some"}, "data.pacs_test=some is not valid; it takes heldout|all"),
        ({"data.pacs_tset": "all"}, "did you mean pacs_test"),
        ({"data.circle_crop": "on"}, "unknown setting of the data: 'circle_crop'"),
    ):
        with pytest.raises(UserError, match=line.replace("|", r"\|")):
            run(root, tmp_path / "run", **setting)

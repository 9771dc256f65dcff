"""Where a run's images are: found from other folders, after a move, and never taken for others of the same name."""

import json
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import protofed
from protofed.cli import main
from protofed.errors import UserError
from protofed.inference.join import join
from protofed.runs.opened import OpenRun
from protofed.runs.place import relocate

RNG = np.random.default_rng(0)
TINY = {"model": "mlp", "set": {"model.hidden": 8}, "rounds": 2, "batch": 8, "engine": "loop"}


def images(root: Path, patients: int = 6) -> Path:
    for site in ("a", "b"):
        for label in ("x", "y"):
            for patient in range(patients):
                place = root / site / label / f"p{label}{patient}"
                place.mkdir(parents=True)
                Image.fromarray(RNG.integers(0, 256, (8, 8), dtype=np.uint8)).save(place / "0.bmp")
    return root


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> protofed.Run:
    """A run on a folder that was given by a relative name."""
    images(tmp_path / "here" / "scans")
    monkeypatch.chdir(tmp_path / "here")
    return protofed.run("fedavg", "scans", out="run", **TINY)


def test_images_are_found_from_another_folder(
    run: protofed.Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = run.config["data"]["place"]
    assert place["path"] == str(tmp_path / "here" / "scans")
    assert place["reading"]["sites"]["a"]["grouped_by"] == "folder"
    (tmp_path / "there").mkdir()
    images(tmp_path / "there" / "scans")
    monkeypatch.chdir(tmp_path / "there")
    path = tmp_path / "here" / "run"
    opened = OpenRun(path, with_data=True)
    assert int(opened.context.dataset.domains["a"].train.x.max()) > 0
    again = protofed.run("fedavg", out="again", **{**TINY, "data": str(tmp_path / "here" / "scans")})
    assert again.config["data"]["place"] == place
    assert main(["run", "--from", str(path / "run.json"), "--out", "from", "--quiet"]) == 0
    assert protofed.Run("from").config["data"]["place"]["fingerprint"] == place["fingerprint"]


@pytest.mark.usefixtures("run")
def test_other_images_of_the_same_name_are_never_read(tmp_path: Path) -> None:
    path = tmp_path / "here" / "run"
    shutil.move(tmp_path / "here" / "scans", tmp_path / "moved")
    with pytest.raises(UserError, match=r"were at .*scans, but nothing is there now; .*protofed data relocate RUN NEW"):
        OpenRun(path, with_data=True).context  # noqa: B018
    images(tmp_path / "here" / "scans")  # the same names and sizes, other pixels
    with pytest.raises(UserError, match=r"scans does not hold the images of this run"):
        OpenRun(path, with_data=True).context  # noqa: B018
    with pytest.raises(UserError, match="does not hold the images of this run"):
        relocate(path, tmp_path / "here" / "scans")
    (path / "summary.json").unlink()
    with pytest.raises(UserError, match="does not hold the images of this run"):
        protofed.run(out=path, resume=True)
    assert main(["data", "relocate", str(path), str(tmp_path / "moved")]) == 0
    assert protofed.run(out=path, resume=True).config["data"]["place"]["path"] == str(tmp_path / "moved")
    assert len(OpenRun(path, with_data=True).context.dataset.domains["a"].train) > 0


@pytest.mark.usefixtures("run")
def test_a_data_root_has_them_under_their_name(tmp_path: Path) -> None:
    (tmp_path / "root").mkdir()
    shutil.move(tmp_path / "here" / "scans", tmp_path / "root" / "scans")
    opened = OpenRun(tmp_path / "here" / "run", with_data=True, data_root=tmp_path / "root")
    assert len(opened.context.dataset.domains["b"].train) > 0
    assert main(["embed", str(tmp_path / "here/run"), "--samples", "8", "--out", "map"]) == 2
    assert main(["embed", str(tmp_path / "here/run"), "--samples", "8", "--out", "map", "--data-root", "../root"]) == 0


@pytest.mark.usefixtures("run")
def test_the_images_of_sites_are_not_looked_for(tmp_path: Path) -> None:
    path = tmp_path / "here" / "run" / "run.json"
    config = json.loads(path.read_text())
    config["data"]["place"] = None
    path.write_text(json.dumps(config))
    with pytest.raises(UserError, match="held by its sites"):
        OpenRun(path.parent, with_data=True).context  # noqa: B018


def test_join_goes_by_its_own_options(tiny_run: Any, make_data: Any, tmp_path: Path) -> None:
    host = tiny_run("fedavg", rounds=3, snapshot_rounds="0,3", seed=5)
    newcomer = make_data(["d"], name="newcomer")
    assert len(join(host.path, newcomer, out=tmp_path / "one", rounds=1).rounds) == 1
    words = ["join", str(host.path), "--data", newcomer, "--rounds", "2", "--lr", "0.5", "--epochs", "2"]
    assert main([*words, "--out", str(tmp_path / "two"), "--set", "data.augment=flip"]) == 0
    assert (tmp_path / "one/model.safetensors").read_bytes() != (tmp_path / "two/model.safetensors").read_bytes()


# --- disks ----------------------------------------------------------------------------------------------------------


def test_files_that_may_not_grow_end_a_run_with_one_line(tmp_path: Path) -> None:
    """The limit of a process stands for a full disk: the same kind of error, from the same calls."""
    images(tmp_path / "scans")
    options = [
        "--model",
        "mlp",
        "--set",
        "model.hidden=200",
        "--rounds",
        "2",
        "--batch",
        "8",
        "--engine",
        "loop",
        "--quiet",
    ]
    words = [sys.executable, "-m", "protofed", "run", "fedavg", "--data", "scans", *options, "--out", "run"]

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, preexec_fn=limited, env=os.environ)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert "file too large" in line
    assert list((tmp_path / "run").rglob("*.tmp")) == []
    assert (tmp_path / "run/run.json").exists()
    assert main(["run", "--resume", "--quiet", "--out", str(tmp_path / "run")]) == 0
    whole = protofed.run(
        "fedavg", str(tmp_path / "scans"), out=tmp_path / "whole", **{**TINY, "set": {"model.hidden": 200}}
    )
    assert (whole.path / "model.safetensors").read_bytes() == (tmp_path / "run/model.safetensors").read_bytes()


def test_an_out_below_a_file_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("no folder")
    images(tmp_path / "scans")
    words = ["--model", "mlp", "--rounds", "1", "--quiet", "--out", str(tmp_path / "file" / "run")]
    assert main(["run", "fedavg", "--data", str(tmp_path / "scans"), *words]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "not a directory" in line

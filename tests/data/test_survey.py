"""A look at data: copies, near copies, shortcuts, the index, the page."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from protofed import UserError
from protofed.cli import main
from protofed.data.survey import looks, page, survey
from protofed.data.survey.findings import hashes, near_pairs

RNG = np.random.default_rng(0)


def smooth() -> Any:
    """A picture with content at all scales."""
    small = Image.fromarray(RNG.integers(0, 256, (6, 6), dtype=np.uint8))
    return np.asarray(small.resize((32, 32), Image.Resampling.BICUBIC))


def write(path: Path, pixels: Any, **options: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, **options)


def site(root: Path, name: str = "a", train: int = 12, test: int = 4) -> Path:
    for part, count in (("train", train), ("test", test)):
        for label in ("x", "y"):
            for number in range(count):
                write(root / name / part / label / f"{number}.png", smooth())
    return root


def kinds(report: Any) -> list[str]:
    return sorted(problem.kind for problem in report.problems)


def test_a_clean_folder_has_no_findings(tmp_path: Path) -> None:
    report = survey(str(site(tmp_path)))
    assert report.problems == ()
    (domain,) = report.summary.domains
    assert (domain.train_per_class, domain.test_per_class) == ((12, 12), (4, 4))
    assert report.summary.image_shape == (1, 32, 32)
    assert report.sites[0].sizes == {"32x32": 32}


def test_a_folder_of_which_nothing_can_be_read(tmp_path: Path) -> None:
    for part in ("train", "test"):
        path = tmp_path / "a" / part / "x" / "0.png"
        path.parent.mkdir(parents=True)
        path.write_bytes(b"no image")
    assert kinds(survey(str(tmp_path))) == ["no-images", "unreadable", "unreadable"]


def test_dicom_without_its_extra_is_no_damaged_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be remembered as one, and still be one after the extra was installed."""
    path = tmp_path / "a" / "x" / "0.dcm"
    path.parent.mkdir(parents=True)
    path.write_bytes(b" " * 128 + b"DICM")
    monkeypatch.setitem(sys.modules, "pydicom", None)
    with pytest.raises(UserError, match=r"needs pydicom.*pip install 'protofed\[dicom\]'"):
        survey(str(tmp_path))


def test_copies_are_told_by_what_they_spoil(tmp_path: Path) -> None:
    a = site(tmp_path) / "a"
    (a / "test/x/0.png").write_bytes((a / "train/x/3.png").read_bytes())
    (a / "train/y/5.png").write_bytes((a / "train/x/5.png").read_bytes())
    (a / "train/y/7.png").write_bytes((a / "train/y/8.png").read_bytes())
    report = survey(str(tmp_path))
    assert kinds(report) == ["copies", "copy-in-test", "two-labels"]
    assert "1 test image is also a training image" in report.advice[0]


def test_near_copies_between_train_and_test(tmp_path: Path) -> None:
    a = site(tmp_path) / "a"
    original = np.asarray(Image.open(a / "train/x/3.png"))
    brighter = np.clip(original.astype(int) + 2, 0, 255).astype(np.uint8)
    Image.fromarray(brighter).save(a / "test/y/1.jpg", quality=90)
    (found,) = [problem for problem in survey(str(tmp_path)).problems if problem.kind == "near-copy-in-test"]
    assert found.files == ("a/test/y/1.jpg",)
    assert "a/train/x/3.png" in found.text


def test_near_pairs_are_those_a_plain_search_finds() -> None:
    train = RNG.integers(0, 256, (300, 8, 9), dtype=np.uint8)
    test = np.concatenate([train[:40], RNG.integers(0, 256, (60, 8, 9), dtype=np.uint8)])
    test[:40, 3, 4] += 1
    one, other = hashes(train), hashes(test)
    wanted = {}
    for number in range(len(test)):
        distances = [int(other[number] ^ each).bit_count() for each in one]
        near = [
            (distance, place)
            for place, distance in enumerate(distances)
            if distance <= 3 and np.abs(train[place].astype(int) - test[number]).mean() <= 4
        ]
        if near:
            wanted[number] = min(near)[1]
    assert len(wanted) >= 40
    assert near_pairs(train, test) == wanted


def test_shortcuts(tmp_path: Path) -> None:
    for number in range(20):
        write(tmp_path / "sizes" / "x" / f"{number}.png", RNG.integers(0, 256, (20, 20), dtype=np.uint8))
        write(tmp_path / "sizes" / "y" / f"{number}.png", RNG.integers(0, 256, (24, 20), dtype=np.uint8))
        write(tmp_path / "bright" / "x" / f"{number}.png", smooth() // 3)
        write(tmp_path / "bright" / "y" / f"{number}.png", 160 + smooth() // 3)
        write(tmp_path / "single" / "x" / f"{number}.png", smooth())
    found = {(problem.kind, problem.file) for problem in survey(str(tmp_path)).problems}
    assert ("size-shortcut", "sizes") in found
    assert ("brightness-shortcut", "bright") in found
    assert ("one-class", "single") in found
    assert not {kind for kind, place in found if place == "single"} & {"size-shortcut", "brightness-shortcut"}


def test_a_second_look_reads_only_what_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = site(tmp_path / "data")
    seen: list[str] = []
    really = looks.look_at
    monkeypatch.setattr(looks, "look_at", lambda path: seen.append(path.name) or really(path))
    first = survey(str(root))
    assert len(seen) == 32
    seen.clear()
    told: list[tuple[int, int]] = []
    again = survey(str(root), tell=lambda done, total: told.append((done, total)))
    assert seen == []
    assert told == [(32, 32)]
    assert again.as_dict() == first.as_dict()
    write(root / "a/train/x/0.png", smooth())
    survey(str(root))
    assert seen == ["0.png"]


def test_many_files_are_looked_at_by_several_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = site(tmp_path / "data")
    one = survey(str(root)).as_dict()
    monkeypatch.setattr(looks, "_WORTH_PROCESSES", 1)
    monkeypatch.setattr(looks, "_CHUNK", 5)
    monkeypatch.setenv("PROTOFED_CACHE", str(tmp_path / "other"))
    assert survey(str(root)).as_dict() == one


def test_arrays_and_embedded_data_are_looked_at_too(tiny_data: str) -> None:
    report = survey(tiny_data)
    assert [domain.name for domain in report.summary.domains] == ["a", "b", "c"]
    assert sum(report.sites[0].sizes.values()) == report.summary.domains[0].train + report.summary.domains[0].test


def test_the_command_lists_everything_and_writes_a_page(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = site(tmp_path / "<my> data")
    monkeypatch.chdir(tmp_path)
    assert main(["data", str(root), "--json", "--out", "pages/p.html"]) == 0
    content = json.loads(capfd.readouterr().out)
    assert content["classes"] == ["x", "y"]
    assert content["problems"] == []
    text = (tmp_path / "pages/p.html").read_text()
    assert text.count("<img") == 8
    assert "<my>" not in text
    assert "<script" not in text
    assert text == page(survey(str(root)))
    for name in ("0.png", "1.png"):
        (root / "a/train/x" / name).write_bytes(b"broken")
    assert main(["data", str(root), "--page"]) == 2
    said = capfd.readouterr()
    assert said.out.count("error (unreadable)") == 2
    assert said.err == f"error: {root} cannot be trained on yet: 2 of the problems above have to be fixed\n"
    assert (tmp_path / "<my> data.data.html").exists()

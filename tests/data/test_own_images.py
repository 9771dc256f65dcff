"""Images as clinics have them: every oddity in one folder, told once each; groups, splits, labels, tables."""

import csv
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from protofed.data import ReadOptions, load
from protofed.data.survey import survey
from protofed.errors import UserError

pydicom = pytest.importorskip("pydicom")

RNG = np.random.default_rng(0)


def noise(*shape: int) -> Any:
    return RNG.integers(0, 256, shape, dtype=np.uint8)


def write(path: Path, pixels: Any = None, **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(noise(16, 16) if pixels is None else pixels).save(path, **options)
    return path


def sample(name: str) -> bytes:
    """A file that comes with pydicom."""
    return (Path(pydicom.__file__).parent / "data" / "test_files" / name).read_bytes()


def sides(dataset: Any, site: str) -> tuple[set[int], set[int]]:
    """The first pixels of training and of test images, where they say whose image it is."""
    domain = dataset.domains[site]
    return tuple(set(part.x[:, 0, 0, 0].tolist()) for part in (domain.train, domain.test))  # type: ignore[return-value]


@pytest.fixture
def oddities(tmp_path: Path) -> Path:
    """A folder with everything that folders have."""
    root = tmp_path / "Kliniken"
    for site in ("Zürich", "हिन्दी"):
        for label in ("gesund", "krank"):
            for patient in range(6):
                write(root / site / label / f"p{label[0]}{patient}" / "a.png")
                write(root / site / label / f"p{label[0]}{patient}" / "2024-01-01" / "b.JPG")
    north = root / "Zürich"
    write(north / "gesund" / "flat.webp")
    frames = [Image.fromarray(noise(16, 16)) for _ in range(3)]
    frames[0].save(north / "gesund" / "film.gif", save_all=True, append_images=frames[1:])
    frames[0].save(north / "krank" / "stack.tif", save_all=True, append_images=frames[1:])
    (north / "krank" / "ct.dcm").write_bytes(sample("CT_small.dcm"))
    (north / "krank" / "mr").write_bytes(sample("MR_small.dcm"))
    (north / "krank" / "report.dcm").write_bytes(sample("reportsi.dcm"))
    (north / "gesund" / "notes.txt").write_text("a note")
    (north / "gesund" / "other.txt").write_text("another")
    (north / "gesund" / "volume.nii.gz").write_bytes(b"volume")
    (north / "gesund" / "Thumbs.db").write_bytes(b"windows")
    (north / "gesund" / ".hidden.png").write_bytes(b"hidden")
    (north / "unklar").mkdir()
    (north / "gesund" / "gone.png").symlink_to(tmp_path / "nowhere.png")
    (north / "gesund" / "round").symlink_to(north / "gesund")
    write(north / "loose.png")
    (root / "हिन्दी" / "krank" / "broken.png").write_bytes(b"no image")
    (root / "हिन्दी" / "krank" / "cut.png").write_bytes((root / "हिन्दी" / "krank" / "pk0" / "a.png").read_bytes()[:100])
    return root


def test_every_oddity_is_told_once(oddities: Path) -> None:
    report = survey(str(oddities))
    kinds = sorted(problem.kind for problem in report.problems if problem.kind not in ("few", "no-class"))
    assert kinds == [
        "burned-in",
        "dangling-link",
        "empty-folder",
        "endless-link",
        "first-frame",
        "no-image",
        "no-window",
        "not-an-image",
        "not-an-image",
        "outside",
        "pages",
        "unreadable",
        "unreadable",
    ]
    told = {problem.kind: problem for problem in report.problems}
    texts = [str(problem) for problem in report.problems]
    for name in ("loose.png", "film.gif", "stack.tif", "ct.dcm", "gone.png", "broken.png", "cut.png", "unklar"):
        assert sum(name in text for text in texts) >= 1, name
    assert any("2 files ending in .txt are not images and are left out" in text for text in texts)
    assert any("volumes are not supported" in text for text in texts)
    assert "3 pages or frames in total, of which 3 are read" in str(told["pages"])
    assert {problem.file.rpartition("/")[2] for problem in report.errors} == {"broken.png", "cut.png"}
    north, south = report.summary.domains
    # 12 patients with two images each; a webp and the first frame of a gif; three pages, a CT, an MR.
    assert (north.name, north.train + north.test) == ("Zürich", 24 + 2 + 5)
    assert (south.name, south.train + south.test) == ("हिन्दी", 24)
    assert report.summary.classes == ("gesund", "krank")
    assert "2 problems prevent training on this data" in report.advice[0]


def test_all_broken_files_are_refused_at_once_or_skipped(oddities: Path) -> None:
    with pytest.raises(UserError, match=r"has 1 problem|broken\.png") as caught:
        load(str(oddities))
    assert "broken.png" in str(caught.value)
    (oddities / "हिन्दी" / "krank" / "broken.png").unlink()
    for name in ("cut2.png", "cut3.png"):
        whole = (oddities / "हिन्दी" / "krank" / "pk0" / "a.png").read_bytes()
        (oddities / "हिन्दी" / "krank" / name).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"problems:.*cut\.png.*cut2\.png.*cut3\.png"):
        load(str(oddities))
    dataset = load(str(oddities), reading=ReadOptions(unreadable="skip"))
    assert sum(len(part) for part in (dataset.domains["हिन्दी"].train, dataset.domains["हिन्दी"].test)) == 24
    assert sum("is left out: the image cannot be read" in warning for warning in dataset.warnings) == 3


def test_sites_split_themselves_by_patient(tmp_path: Path) -> None:
    for patient in range(20):
        for number in range(3):
            pixels = np.full((8, 8), patient, dtype=np.uint8)
            pixels[7, 7] = number
            label = "sick" if patient % 2 else "well"
            write(tmp_path / "nested" / "a" / label / f"p{patient}" / f"{number}.png", pixels)
            write(tmp_path / "flat" / "a" / label / f"p{patient}_{number}.png", pixels)
    nested = load(str(tmp_path / "nested"))
    train, test = sides(nested, "a")
    assert not train & test
    assert len(test) == 4
    assert nested.domains["a"].test.y.bincount().tolist() == [6, 6]
    assert nested.place is not None
    assert nested.place.reading["sites"]["a"] == {"test_share": 0.2, "seed": 0, "groups": 20, "grouped_by": "folder"}
    matched = load(str(tmp_path / "flat"), reading=ReadOptions(test_share=0.3, group_by=r"p(\d+)_"))
    train, test = sides(matched, "a")
    assert not train & test
    assert len(test) == 6
    alone = load(str(tmp_path / "flat"))
    assert len(alone.domains["a"].test) == 12
    assert set.intersection(*sides(alone, "a")), "without groups images of a patient are on both sides"
    other = load(str(tmp_path / "nested"), reading=ReadOptions(split_seed=1))
    assert sides(other, "a")[1] != sides(nested, "a")[1]
    with pytest.raises(UserError, match="not a regular expression"):
        ReadOptions(group_by="(")
    with pytest.raises(UserError, match="above 0 and below 1"):
        ReadOptions(test_share=1.0)


def test_a_patient_in_train_and_test_is_refused(tmp_path: Path) -> None:
    for part, patients in (("train", (1, 2)), ("test", (2, 3))):
        for patient in patients:
            write(tmp_path / "a" / part / "x" / f"p{patient}" / "0.png")
            write(tmp_path / "a" / part / "y" / f"q{patient}" / "0.png")
    with pytest.raises(
        UserError, match=r"has 2 problems.*patient p2 of domain a is in both train and test.*patient q2"
    ):
        load(str(tmp_path))
    assert len(load(str(tmp_path), reading=ReadOptions(group_by="none")).domains["a"].train) == 4


def test_dicom_patients_stay_together_and_are_not_named(tmp_path: Path) -> None:
    for part in ("train", "test"):
        place = tmp_path / "a" / part / "x"
        place.mkdir(parents=True)
        (place / "1.dcm").write_bytes(sample("CT_small.dcm"))
        write(tmp_path / "a" / part / "y" / "0.png")
    with pytest.raises(UserError, match="the patient of this file of domain a is in both train and test") as caught:
        load(str(tmp_path))
    assert str(pydicom.dcmread(tmp_path / "a/test/x/1.dcm").PatientID) not in str(caught.value)


def test_val_is_for_validation(tmp_path: Path, tiny_run: Any) -> None:
    for part, count in (("Train", 8), ("test", 4), ("val", 5)):
        for label in ("x", "y"):
            for number in range(count):
                write(tmp_path / "data" / "a" / part / label / f"{number}.png")
    dataset = load(str(tmp_path / "data"))
    assert dataset.domains["a"].validation is not None
    assert len(dataset.domains["a"].validation) == 10
    assert dataset.validation_offsets == {"a": range(16, 26)}
    unused = tiny_run("fedavg", str(tmp_path / "data"), rounds=1)
    assert any("10 validation images of the sites are not used" in text for text in unused.config["warnings"])
    used = tiny_run("fedavg", str(tmp_path / "data"), rounds=1, set={"data.validation": "0.1"})
    assert used.rounds[0]["validation"] is not None
    assert used.rounds[0]["samples"] == 16, "nothing is taken away from training"
    assert used.config["data"]["domains"]["a"] == {"train": 16, "test": 8, "validation": 10}


# --- labels ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def spelled(tmp_path: Path) -> Path:
    root = tmp_path / "spelled"
    for site, labels in (("a", ("normal", "very sick")), ("b", ("Normal", "very_sick", "extra"))):
        for label in labels:
            for part in ("train", "test"):
                for number in range(3):
                    write(root / site / part / label / f"{number}.png")
    return root


def test_spellings_are_shown_and_a_file_joins_them(spelled: Path, tmp_path: Path) -> None:
    plain = load(str(spelled))
    assert len(plain.classes) == 5
    hints = [warning for warning in plain.warnings if "look like one class" in warning]
    assert len(hints) == 2
    assert "--labels FILE" in hints[0]
    file = tmp_path / "labels.csv"
    file.write_text("label;class;site\nNormal;normal;b\nvery_sick;very sick;\nextra;;\n")
    joined = load(str(spelled), labels=str(file))
    assert joined.classes == ("normal", "very sick")
    assert joined.domains["b"].train.y.bincount().tolist() == [3, 3]
    assert any("images of extra of b are left out" in warning for warning in joined.warnings)
    assert survey(str(spelled), labels=str(file)).summary.classes == joined.classes
    file.write_text("Normal=normal\nvery_sick=very sick\n")
    assert set(load(str(spelled), labels=str(file)).classes) == {"extra", "normal", "very sick"}
    file.write_text("normall=normal\n")
    with pytest.raises(UserError, match="did you mean normal"):
        load(str(spelled), labels=str(file))
    with pytest.raises(UserError, match="there is no file"):
        load(str(spelled), labels="none.csv")


def test_a_file_of_labels_is_for_arrays_and_manifests_too(tmp_path: Path) -> None:
    (tmp_path / "arrays").mkdir()
    x, y = noise(6, 8, 8), np.arange(6) % 2
    for site, names in (("a", ["Normal", "sick"]), ("b", ["normal", "ill"])):
        np.savez(tmp_path / "arrays" / f"{site}.npz", x_train=x, y_train=y, x_test=x, y_test=y, classes=names)
    file = tmp_path / "labels.txt"
    file.write_text("Normal=normal\nill=sick\n")
    assert load(str(tmp_path / "arrays"), labels=str(file)).classes == ("normal", "sick")
    rows = [[f"{n}.png", ("Normal", "ill", "normal", "sick")[n % 4], "ab"[n % 2]] for n in range(24)]
    for name, *_ in rows:
        write(tmp_path / name)
    table = tmp_path / "list.csv"
    table.write_text("\n".join(",".join(row) for row in [["file", "label", "domain"], *rows]))
    assert set(load(str(table), labels=str(file)).classes) == {"normal", "sick"}


# --- tables ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "cp1252", "utf-16"])
@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
def test_tables_as_people_save_them(tmp_path: Path, encoding: str, delimiter: str) -> None:
    rows = [["File Name", "Diagnosis", "Site", "Patient-ID"]]
    for patient in range(10):
        for number in range(2):
            pixels = np.full((8, 8), patient, dtype=np.uint8)
            write(tmp_path / "bilder" / f"ü{patient}-{number}.png", pixels)
            slash = "\\" if number else "/"
            rows.append(
                [f"bilder{slash}ü{patient}-{number}.png", "größer" if patient % 2 else "klein", "Zürich", f"{patient}"]
            )
    path = tmp_path / "liste.csv"
    with path.open("w", newline="", encoding=encoding) as file:
        csv.writer(file, delimiter=delimiter, lineterminator="\r\n").writerows(rows)
    dataset = load(str(path))
    assert dataset.classes == ("größer", "klein")
    train, test = sides(dataset, "Zürich")
    assert not train & test
    assert len(test) == 2
    assert any("not in UTF-8" in warning for warning in dataset.warnings) == (encoding == "cp1252")
    assert dataset.place is not None
    assert dataset.place.reading["sites"]["Zürich"]["grouped_by"] == "column Patient-ID"


def test_every_wrong_row_is_told(tmp_path: Path) -> None:
    write(tmp_path / "a.png")
    path = tmp_path / "list.csv"
    path.write_text("file,label,domain,split\na.png,x,s,train\nb.png,,s,train\na.png,x,s,maybe\n")
    with pytest.raises(
        UserError, match=r"problems.*line 3: the label is empty.*line 3: there is no file b.*line 4: split"
    ):
        load(str(path))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_what_may_not_be_read_is_told(tmp_path: Path) -> None:
    for label in ("x", "y"):
        for number in range(3):
            write(tmp_path / "a" / label / f"{number}.png")
    (tmp_path / "a" / "x" / "0.png").chmod(0)
    with pytest.raises(UserError, match=r"no permission.*chmod"):
        load(str(tmp_path))

import contextlib
import csv

import numpy as np
import pytest
import torch
from PIL import Image

from protofed.data import Dataset, Normalise, available, describe, load, register_data
from protofed.data.files import read_images
from protofed.data.images import Domain, Images, RawData, to_channels, to_size, unify
from protofed.data.labels import parse_labels, renaming
from protofed.errors import UserError

RNG = np.random.default_rng(0)


def noise(*shape):
    return RNG.integers(0, 256, shape, dtype=np.uint8)


def arrays(n=6, shape=(8, 8, 3), labels=3, **changes):
    y = np.arange(n) % labels
    return {"x_train": noise(n, *shape), "y_train": y, "x_test": noise(n, *shape), "y_test": y} | changes


def write_npz(folder, name, **content):
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / f"{name}.npz", **content)
    return folder


def write_image(path, pixels, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, **options)
    return path


def image_folders(root, domains=("a", "b"), classes=("cat", "dog"), shape=(8, 8, 3), suffix=".png"):
    for domain in domains:
        for part in ("train", "test"):
            for label in classes:
                for number in range(2):
                    write_image(root / domain / part / label / f"{number}{suffix}", noise(*shape))
    return root


def refused(spec, line, **options):
    with pytest.raises(UserError, match=line) as caught:
        load(str(spec), **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# --- npz -------------------------------------------------------------------------------------------------------------


def test_npz_domains_are_unified(tmp_path):
    grey, colour = arrays(shape=(8, 8)), arrays(shape=(12, 10, 3))
    write_npz(tmp_path, "grey", **grey, classes=["x", "y", "z"], source="here", license="free")
    write_npz(tmp_path, "colour", **colour)
    data = load(str(tmp_path))
    assert list(data.domains) == ["colour", "grey"]
    assert data.classes == ("x", "y", "z")
    assert data.image_shape == (3, 12, 10)
    assert data.image_size == (12, 10)
    assert data.licence == "free"
    assert "here" in data.source
    assert torch.equal(data.domains["colour"].train.x, torch.from_numpy(colour["x_train"]).permute(0, 3, 1, 2))
    assert load(str(tmp_path), domains="grey").image_shape == (1, 8, 8)
    assert load(str(tmp_path), image_size=16, channels=1).image_shape == (1, 16, 16)
    assert load(str(tmp_path / "grey.npz")).name == "grey"


def test_npz_number_types(tmp_path):
    pixels = noise(6, 8, 8, 1)
    pixels[0, 0, 0] = 255
    forms = {
        "plain": pixels,
        "wide": pixels.astype(np.int64),
        "unit": pixels / 255,
        "deep": pixels.astype(np.uint16) * 257,
    }
    for name, x in forms.items():
        write_npz(tmp_path, name, **arrays(shape=(8, 8, 1), x_train=x, x_test=x[::-1]))
    data = load(str(tmp_path))
    for domain in data.domains.values():
        assert torch.equal(domain.train.x, torch.from_numpy(pixels).permute(0, 3, 1, 2))


def test_npz_twelve_bits_are_noticed(tmp_path):
    x = np.full((6, 8, 8), 4095, dtype=np.uint16)
    data = load(str(write_npz(tmp_path, "scan", **arrays(shape=(8, 8), x_train=x, x_test=x // 2))))
    assert int(data.domains["scan"].train.x.max()) == 255
    assert int(data.domains["scan"].test.x.max()) == 127
    assert any("12 bits" in warning for warning in data.warnings)


def test_npz_labels_in_a_column(tmp_path):
    write_npz(tmp_path, "a", **arrays(y_train=np.arange(6).reshape(6, 1) % 3))
    assert load(str(tmp_path)).domains["a"].train.y.tolist() == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({"x_train": np.full((6, 8, 8, 3), np.nan)}, "x_train holds NaN or infinite"),
        ({"x_test": np.full((6, 8, 8, 3), np.inf)}, "x_test holds NaN or infinite"),
        ({"x_train": np.full((6, 8, 8, 3), 1.5)}, "floats between 0 and 1"),
        ({"x_train": np.full((6, 8, 8, 3), -0.5)}, "floats between 0 and 1"),
        ({"x_train": np.full((6, 8, 8, 3), 300)}, "0 to 255"),
        ({"x_train": np.full((6, 8, 8, 3), "a")}, "save images as uint8"),
        ({"x_train": noise(6, 64)}, "2 dimensions"),
        ({"x_train": noise(6, 3, 8, 8)}, "move the channels to the end"),
        ({"x_train": noise(6, 8, 8, 4)}, "C of 1 or 3"),
        ({"x_train": noise(6, 0, 8, 3)}, "without pixels"),
        ({"y_train": np.array([0, 1, 2, 3, 4, -1])}, "label -1; labels must be integers from 0 up"),
        ({"y_train": np.arange(6) / 2}, "labels must be integers"),
        ({"y_train": np.arange(6), "classes": ["a", "b", "c"]}, "label 5, but there are 3 classes.*between 0 and 2"),
        ({"y_train": np.arange(6) * 100_000}, "out of range"),
        ({"y_train": np.arange(5)}, "6 images and y_train 5 labels"),
        ({"y_train": np.zeros((6, 2), dtype=int)}, "one integer per image"),
        ({"x_test": noise(0, 8, 8, 3), "y_test": np.arange(0)}, "at least one test image"),
        ({"classes": ["a", "a", "b"]}, "different names"),
        ({"classes": np.array(["a", None, "b"], dtype=object)}, "Python objects"),
    ],
)
def test_npz_mistakes(tmp_path, changes, line):
    write_npz(tmp_path, "site", **arrays(**changes))
    assert "site.npz" in refused(tmp_path, line)


def test_npz_missing_key(tmp_path):
    content = arrays()
    del content["y_test"]
    assert "site.npz lacks y_test" in refused(write_npz(tmp_path, "site", **content), "must hold x_train")


@pytest.mark.parametrize("damage", ["empty", "text", "truncated"])
def test_npz_broken(tmp_path, damage):
    write_npz(tmp_path, "site", **arrays())
    path = tmp_path / "site.npz"
    whole = path.read_bytes()
    path.write_bytes({"empty": b"", "text": b"text", "truncated": whole[: len(whole) // 2]}[damage])
    assert "site.npz" in refused(tmp_path, "not a readable npz file")


def test_npz_every_flipped_byte_is_read_or_refused(tmp_path):
    write_npz(tmp_path, "site", **arrays(n=3, shape=(4, 4)))
    path = tmp_path / "site.npz"
    whole = path.read_bytes()
    for position in range(0, len(whole), 7):
        damaged = bytearray(whole)
        damaged[position] ^= 0xFF
        path.write_bytes(damaged)
        with contextlib.suppress(UserError):
            load(str(tmp_path))


@pytest.mark.parametrize(
    ("other", "classes", "labels"),
    [
        (["x", "y", "w"], ("x", "y", "z", "w"), [0, 1, 3]),
        (["y", "x", "z"], ("x", "y", "z"), [1, 0, 2]),
        (["x", "y", "z", "w"], ("x", "y", "z", "w"), [0, 1, 2]),
    ],
)
def test_npz_classes_are_joined_by_name(tmp_path, other, classes, labels):
    write_npz(tmp_path, "a", **arrays(), classes=["x", "y", "z"])
    write_npz(tmp_path, "b", **arrays(), classes=other)
    data = load(str(tmp_path))
    assert data.classes == classes
    assert data.domains["a"].train.y.tolist() == [0, 1, 2, 0, 1, 2]
    assert data.domains["b"].train.y.tolist() == labels * 2
    lacking = [warning for warning in data.warnings if warning.startswith("domain b has no training")]
    assert bool(lacking) == (set(classes) != {classes[label] for label in labels})


def test_all_broken_archives_are_named_at_once(tmp_path):
    for name in ("a", "b", "c"):
        write_npz(tmp_path, name, **arrays())
    (tmp_path / "a.npz").write_bytes(b"text")
    (tmp_path / "c.npz").write_bytes(b"")
    line = refused(tmp_path, "has 2 problems")
    assert "a.npz" in line
    assert "c.npz" in line


# --- image folders ---------------------------------------------------------------------------------------------------


def test_image_folders(tmp_path):
    image_folders(tmp_path)
    (tmp_path / "a" / "train" / "cat" / "notes.txt").write_text("not an image")
    (tmp_path / "a" / "train" / "cat" / ".hidden.png").write_text("nor this")
    data = load(str(tmp_path))
    assert list(data.domains) == ["a", "b"]
    assert data.classes == ("cat", "dog")
    assert data.image_shape == (3, 8, 8)
    assert data.domains["a"].train.y.tolist() == [0, 0, 1, 1]
    first = np.asarray(Image.open(tmp_path / "a" / "train" / "cat" / "0.png"))
    assert np.array_equal(data.domains["a"].train.x[0].permute(1, 2, 0).numpy(), first)
    (only,) = data.warnings
    assert "1 file ending in .txt is not an image and is left out: a/train/cat/notes.txt" in only


@pytest.mark.parametrize("suffix", [".jpg", ".jpeg", ".tif", ".tiff", ".bmp", ".PNG"])
def test_image_formats(tmp_path, suffix):
    assert len(load(str(image_folders(tmp_path, suffix=suffix))).pooled_train()) == 8


def test_numbered_classes_sort_as_numbers(tmp_path):
    assert load(str(image_folders(tmp_path, classes=("10", "9", "1")))).classes == ("1", "9", "10")


def test_sixteen_bits(tmp_path):
    ramp = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    paths = [write_image(tmp_path / "full.png", ramp), write_image(tmp_path / "full.tif", ramp // 2)]
    x, notes = read_images(paths)
    assert x.shape == (2, 1, 8, 8)
    assert np.array_equal(x[0, 0].numpy(), np.rint(ramp * (255 / 65535)))
    assert int(x[1].max()) == 127
    assert notes == []
    x, notes = read_images([write_image(tmp_path / "twelve.png", ramp // 16)])
    assert int(x.max()) == 255
    assert "12 bits" in notes[0]


def test_mixed_modes_and_sizes(tmp_path):
    grey = write_image(tmp_path / "grey.png", np.full((10, 10), 100, dtype=np.uint8))
    clear = write_image(tmp_path / "clear.png", np.full((10, 10, 4), 200, dtype=np.uint8))
    large = write_image(tmp_path / "large.png", np.full((20, 20, 3), 50, dtype=np.uint8))
    black = tmp_path / "black.png"
    Image.new("1", (10, 10)).save(black)
    x, notes = read_images([grey, clear, large, black])
    assert x.shape == (4, 3, 10, 10)
    assert [int(picture.max()) for picture in x] == [100, 200, 50, 0]
    assert "resized to 10x10" in notes[0]
    x, notes = read_images([grey, large], (6, 5))
    assert x.shape == (2, 3, 6, 5)
    assert notes == []
    assert read_images([grey])[0].shape == (1, 1, 10, 10)


def test_floating_point_images_are_refused(tmp_path):
    path = write_image(tmp_path / "float.tif", np.ones((8, 8), dtype=np.float32))
    with pytest.raises(UserError, match="floating-point"):
        read_images([path])


def test_large_images_of_mixed_sizes_are_bounded(tmp_path):
    paths = [write_image(tmp_path / f"{side}.png", noise(side, 2 * side)) for side in (300, 302)]
    assert read_images(paths)[0].shape == (2, 1, 128, 256)


def test_a_domain_may_lack_a_class(tmp_path):
    image_folders(tmp_path, domains=("a",), classes=("cat", "dog", "owl"))
    image_folders(tmp_path, domains=("b",), classes=("cat", "dog"))
    data = load(str(tmp_path))
    assert data.classes == ("cat", "dog", "owl")
    assert data.warnings == (
        "domain b has no training images of class owl",
        "domain b has no test images of class owl",
    )


def test_test_images_in_training_are_reported(tmp_path):
    content = arrays()
    content["x_test"][2] = content["x_train"][4]
    warnings = load(str(write_npz(tmp_path, "a", **content))).warnings
    assert warnings == ("domain a: the training images include 1 of 6 test images",)


def test_folder_mistakes(tmp_path):
    refused(tmp_path / "absent", "does not exist; a folder holds")
    refused(tmp_path / "gone" / "absent", "does not exist; a folder holds")
    refused(tmp_path, "contains no data; a folder holds")
    file = tmp_path / "file.txt"
    file.write_text("text")
    refused(file, "is not a folder")
    (tmp_path / "site").mkdir()
    refused(tmp_path, "site holds no images; images .* go into site/CLASS/ or site/train/CLASS/")
    (tmp_path / "site" / "test").mkdir()
    refused(tmp_path, "but no folder train")
    (tmp_path / "site" / "train").mkdir()
    refused(tmp_path, "train holds no images")
    refused(tmp_path / "site", "one folder per domain")
    write_image(tmp_path / "site" / "train" / "cat" / "0.png", noise(8, 8))
    refused(tmp_path, "test holds no images")


def test_damaged_images(tmp_path):
    image_folders(tmp_path, shape=(64, 64, 3))
    path = tmp_path / "b" / "test" / "dog" / "1.png"
    whole = path.read_bytes()
    for content in (b"", b"text", whole[: len(whole) // 2]):
        path.write_bytes(content)
        assert str(path) in refused(tmp_path, "cannot be read .*replace or remove")


# --- manifest --------------------------------------------------------------------------------------------------------


def manifest(folder, rows):
    for row in rows:
        if "file" in row and not (folder / row["file"]).exists():
            write_image(folder / row["file"], noise(8, 8))
    path = folder / "MANIFEST.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def rows_of_patients(patients=20, images=3, domain="site"):
    return [
        {
            "file": f"{domain}/{who}-{n}.png",
            "label": "sick" if who % 2 else "well",
            "domain": domain,
            "patient": f"p{who}",
        }
        for who in range(patients)
        for n in range(images)
    ]


def test_manifest_with_a_split(tmp_path):
    rows = [
        {"file": f"{n}.png", "label": str(n % 2), "domain": "ab"[n % 2], "split": "train" if n < 6 else "Test"}
        for n in range(10)
    ]
    data = load(str(manifest(tmp_path, rows)))
    assert data.name == "MANIFEST"
    assert {name: (len(d.train), len(d.test)) for name, d in data.domains.items()} == {"a": (3, 2), "b": (3, 2)}
    assert data.classes == ("0", "1")


def test_manifest_never_divides_a_patient(tmp_path):
    rows = rows_of_patients()
    # The image says whose it is, so that the split can be checked on the pixels alone.
    for row in rows:
        write_image(tmp_path / row["file"], np.full((8, 8), int(row["patient"][1:]), dtype=np.uint8))
    first = load(str(manifest(tmp_path, rows))).domains["site"]
    sides = [set(part.x[:, 0, 0, 0].tolist()) for part in (first.train, first.test)]
    assert not sides[0] & sides[1]
    assert len(sides[1]) == 4
    assert first.test.y.bincount().tolist() == [6, 6]
    again = load(str(manifest(tmp_path, rows[::-1]))).domains["site"]
    assert set(again.test.x[:, 0, 0, 0].tolist()) == sides[1]


def test_manifest_without_patients_splits_by_image(tmp_path):
    rows = [{"file": f"{n}.png", "label": "ab"[n % 2], "domain": "d"} for n in range(20)]
    domain = load(str(manifest(tmp_path, rows))).domains["d"]
    assert domain.test.y.bincount().tolist() == [2, 2]


def test_manifest_mistakes(tmp_path):
    good = rows_of_patients(4, 1)
    refused(tmp_path / "none.csv", "does not exist")
    path = manifest(tmp_path, [{"file": "a.png", "label": "x"}])
    refused(path, "lacks the column domain; a manifest has the columns file, label, domain")
    refused(manifest(tmp_path, [*good, good[0]]), "more than once")
    refused(manifest(tmp_path, [good[0] | {"label": " "}]), "line 2: the label is empty")
    refused(manifest(tmp_path, good[:1]), "only one patient or group")
    refused(manifest(tmp_path, [row | {"split": "train"} for row in good]), "domain site has no test images")
    refused(manifest(tmp_path, [row | {"split": "both"} for row in good]), "line 2: split is 'both'; it must be train")
    both = [row | {"split": part, "patient": "p"} for row, part in zip(good, ("train", "test") * 2, strict=True)]
    refused(manifest(tmp_path, both), "line 3: patient p of domain site is in both train and test")
    path = manifest(tmp_path, good)
    (tmp_path / good[2]["file"]).unlink()
    refused(path, "line 4: there is no file site/2-0.png; files are relative to the csv")
    (tmp_path / "scan.txt").write_bytes(b"")
    refused(manifest(tmp_path, [good[0] | {"file": "scan.txt"}]), "not an image file")
    path.write_text("file,label,domain\n")
    refused(path, "lists no images")
    path.write_bytes(b"")
    refused(path, "lacks the column")


# --- labels, shapes, catalogue ---------------------------------------------------------------------------------------


def test_labels_regroup(tmp_path):
    write_npz(tmp_path, "eye", **arrays(n=10, labels=5))
    data = load(str(tmp_path), labels="0=healthy,1-4=diseased")
    assert data.classes == ("healthy", "diseased")
    assert data.domains["eye"].train.y.tolist() == [0, 1, 1, 1, 1] * 2
    data = load(str(tmp_path), labels="0=healthy,3=bad,4=bad")
    assert len(data.domains["eye"].train) == 6
    assert "images of 1, 2 are left out" in data.warnings[0]
    assert len(data.warnings) == 1, "these classes are numbers themselves"


def test_label_rules_take_names():
    classes = ("No DR", "Mild", "Pre-severe", "Severe")
    assert parse_labels("No DR=a, Mild-Severe=b", classes) == {"a": [0], "b": [1, 2, 3]}
    assert parse_labels("Pre-severe=a,0-1=b", classes) == {"a": [2], "b": [0, 1]}
    assert parse_labels("Pre-severe-Severe=a,0=b", classes) == {"a": [2, 3], "b": [0]}


def test_numbers_for_classes_with_names_are_spelt_out():
    grades = ("Mild", "Moderate", "No DR", "Proliferative", "Severe")  # folders, in the order of the alphabet
    held = {"site": set(grades)}
    (note,) = renaming("0=healthy,1-4=diseased", grades, held).notes
    assert "0 is Mild; 1-4 is Moderate, No DR, Proliferative, Severe" in note
    assert renaming("No DR=healthy,Mild-Moderate=diseased,Proliferative-Severe=diseased", grades, held).notes == ()
    left_out, note = renaming("No DR=healthy,3=diseased", grades, held).notes
    assert "Mild, Moderate, Severe are left out" in left_out
    assert "by number: 3 is Proliferative;" in note


@pytest.mark.parametrize(
    ("rule", "line"),
    [
        ("healthy", "is not OLD=NEW"),
        ("0=healthy,9=ill", "unknown class in labels '9'"),
        ("0-4=ill", "only one class"),
        ("0=a,0-1=b", "choose one"),
        ("2-1=a,0=b", "backwards"),
    ],
)
def test_label_mistakes(rule, line):
    with pytest.raises(UserError, match=line):
        parse_labels(rule, tuple("01234"))


def test_labels_must_leave_images(tmp_path):
    write_npz(tmp_path, "a", **arrays(y_train=np.zeros(6, dtype=int)))
    refused(tmp_path, "leaves no train images in domain a", labels="1=x,2=y")


def test_luminance_and_resize():
    x = torch.tensor([[[[255]], [[0]], [[0]]], [[[10]], [[10]], [[10]]]], dtype=torch.uint8)
    assert to_channels(x, 1).flatten().tolist() == [76, 10]
    assert torch.equal(to_channels(to_channels(x, 1), 3)[:, 2], to_channels(x, 1)[:, 0])
    checks = (torch.arange(64).view(1, 1, 8, 8) + torch.arange(8).view(8, 1)) % 2 * 255
    assert (to_size(checks.to(torch.uint8), (2, 2)).float() - 127.5).abs().max() < 2
    with pytest.raises(UserError, match="1 or 3"):
        unify({"a": Domain("a", *[Images(x, torch.zeros(2, dtype=torch.int64))] * 2)}, channels=2)
    with pytest.raises(UserError, match="at least 4 pixels"):
        load("digits", image_size=0)


def test_images_check_their_types():
    with pytest.raises(ValueError, match="uint8"):
        Images(torch.zeros(1, 1, 4, 4), torch.zeros(1, dtype=torch.int64))
    with pytest.raises(ValueError, match="int64"):
        Images(torch.zeros(1, 1, 4, 4, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64))


def test_data_root_comes_first(tmp_path, monkeypatch):
    write_npz(tmp_path / "digits", "usps", **arrays(shape=(16, 16, 1)))
    image_folders(tmp_path / "pets")
    (tmp_path / "empty").mkdir()
    assert list(load("digits", data_root=tmp_path).domains) == ["usps"]
    assert list(load("pets", data_root=str(tmp_path)).domains) == ["a", "b"]
    assert {info.name: info.domains for info in available(tmp_path)} == {
        "digits": ("usps",),
        "lesions": ("amber", "rose", "olive", "atlas"),
        "pets": ("a", "b"),
    }
    assert describe("pets", tmp_path).domains[0].train_per_class == (2, 2)
    refused("pest", "did you mean pets", data_root=tmp_path)
    monkeypatch.setenv("PROTOFED_DATA", str(tmp_path))
    assert list(load("digits").domains) == ["usps"]
    monkeypatch.setenv("PROTOFED_DATA", str(tmp_path / "empty"))
    assert "has no folder digits" in load("digits").warnings[0]
    monkeypatch.setenv("PROTOFED_DATA", str(tmp_path / "absent"))
    refused("digits", "from PROTOFED_DATA")


def test_unknown_names():
    line = refused("digist", "did you mean digits")
    assert "DOMAIN/train/CLASS" in line
    refused("digits", "did you mean mnist", domains="minst")
    refused("digits", "names none", domains=" ,")
    refused("digits", "more than once", domains="mnist,mnist")
    refused("digits", "unknown normalisation", normalise="zscore")
    refused("", "no data given; give a name")


def test_a_registered_loader(monkeypatch):
    from protofed.data import catalog

    monkeypatch.setattr(catalog, "_REGISTRY", dict(catalog._REGISTRY))
    images = Images(torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.tensor([0, 1]))
    register_data("mine", lambda: RawData(("a", "b"), {"d": Domain("d", images, images)}), "my own", domains=("d",))
    assert load("mine", normalise="half").normalise.mean == (0.5,)
    assert [info.description for info in available() if info.name == "mine"] == ["my own"]


@pytest.mark.parametrize("name", ["site/1", "..", "average", "held_out", " a", "a=b", "a,b"])
def test_domain_names_that_would_clash_are_refused(name):
    images = Images(torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.tensor([0, 1]))
    with pytest.raises(UserError, match="needs another name"):
        Dataset("toy", ("a", "b"), {name: Domain(name, images, images)}, Normalise.default(1))

"""Published data sets, each read from a tiny copy in the format its publisher uses."""

import bz2
import csv
import gzip
import json
import os
import pickle
import struct
import sys
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat

from protofed.data import available, describe, load, register_data
from protofed.data.catalog import data_options, form_of
from protofed.data.images import Domain, Images, RawData
from protofed.data.sources import SOURCES, Original
from protofed.data.sources.pictures import GroupedFile, split_80_20
from protofed.errors import UserError

RNG = np.random.default_rng(0)


def noise(*shape):
    return RNG.integers(0, 256, shape, dtype=np.uint8)


def picture(path, shape=(10, 12, 3), pixels=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(noise(*shape) if pixels is None else pixels).save(path)


def table(path, *rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        csv.writer(file).writerows(rows)


def idx(path, values, zipped=True):
    content = struct.pack(">HBB", 0, 8, values.ndim) + struct.pack(f">{values.ndim}I", *values.shape) + values.tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    (path.with_name(path.name + ".gz") if zipped else path).write_bytes(gzip.compress(content) if zipped else content)


def counts(data):
    return {name: (len(domain.train), len(domain.test)) for name, domain in data.domains.items()}


def refused(name, root, *words, **options):
    with pytest.raises(UserError) as caught:
        load(name, data_root=root, **options)
    line = str(caught.value)
    assert "\n" not in line
    for word in words:
        assert word in line, line
    return line


# --- digits ----------------------------------------------------------------------------------------------------------


def write_mnist(folder, zipped=True):
    x = noise(20, 28, 28)
    for part, values in (("train", x), ("t10k", noise(10, 28, 28))):
        idx(folder / f"{part}-images-idx3-ubyte", values, zipped)
        idx(folder / f"{part}-labels-idx1-ubyte", np.arange(len(values), dtype=np.uint8) % 10, zipped)
    return x


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("place", ["mnist", "MNIST/raw"])
def test_mnist(tmp_path, zipped, place):
    x = write_mnist(tmp_path / place, zipped)
    data = load("mnist", data_root=tmp_path)
    assert counts(data) == {"mnist": (20, 10)}
    assert data.domains["mnist"].train.x[:, 0].numpy().tolist() == x.tolist()
    assert data.domains["mnist"].train.y[:11].tolist() == [*range(10), 0]
    assert data.source.startswith(f"original files of mnist in folder {place}; split: official")
    assert data.licence == "CC BY-SA 3.0"
    assert any("the whole set has 60000 and 10000" in warning for warning in data.warnings)


def test_damaged_idx(tmp_path):
    write_mnist(tmp_path / "mnist")
    path = tmp_path / "mnist/train-images-idx3-ubyte.gz"
    for content in (b"", b"no gzip", path.read_bytes()[:40], gzip.compress(b"\0\0\x0d\x03")):
        path.write_bytes(content)
        refused("mnist", tmp_path, "train-images-idx3-ubyte.gz cannot be read", "download it again")


def write_emnist(folder, split="bymerge"):
    x = noise(47, 28, 28)
    for part in ("train", "test"):
        idx(folder / f"emnist-{split}-{part}-images-idx3-ubyte", x)
        idx(folder / f"emnist-{split}-{part}-labels-idx1-ubyte", np.arange(47, dtype=np.uint8))
    characters = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabdefghnqrt"
    lines = [f"{label} {ord(character)}\n" for label, character in enumerate(characters)]
    (folder / f"emnist-{split}-mapping.txt").write_text("".join(lines))
    return x


def test_emnist_is_turned_upright(tmp_path):
    x = write_emnist(tmp_path / "emnist")
    data = load("emnist", data_root=tmp_path)
    assert data.classes[:2] + data.classes[-1:] == ("0", "1", "t")
    assert (data.domains["emnist"].train.x[:, 0].numpy() == x.transpose(0, 2, 1)).all()
    refused("emnist", tmp_path, "emnist-balanced-mapping.txt does not exist", options={"emnist_split": "balanced"})
    write_emnist(tmp_path / "emnist", "balanced")
    assert "emnist_split=balanced" in load("emnist", data_root=tmp_path, options={"emnist_split": "balanced"}).source


def write_usps(folder):
    folder.mkdir(parents=True)
    for name, number in (("usps.bz2", 20), ("usps.t.bz2", 10)):
        lines = []
        for row in range(number):
            pixels = [-1.0] * 255 + [1.0]
            lines.append(
                f"{row % 10 + 1} " + " ".join(f"{at + 1}:{value:g}" for at, value in enumerate(pixels)) + " \n"
            )
        (folder / name).write_bytes(bz2.compress("".join(lines).encode()))


def test_usps_libsvm(tmp_path):
    write_usps(tmp_path / "usps")
    train = load("usps", data_root=tmp_path).domains["usps"].train
    assert train.y[:3].tolist() == [0, 1, 2]
    assert train.x.shape == (20, 1, 16, 16)
    assert (train.x[0].min(), train.x[0, 0, 15, 15]) == (0, 255)
    (tmp_path / "usps/usps.bz2").write_bytes(bz2.compress(b"1 300:0.5\n"))
    refused("usps", tmp_path, "usps.bz2 cannot be read")


def test_usps_h5(tmp_path):
    h5py = pytest.importorskip("h5py")
    (tmp_path / "usps").mkdir()
    with h5py.File(tmp_path / "usps/usps.h5", "w") as file:
        for part, number in (("train", 20), ("test", 10)):
            file[f"{part}/data"] = np.ones((number, 256), np.float32)
            file[f"{part}/target"] = np.arange(number) % 10
    data = load("usps", data_root=tmp_path)
    assert counts(data) == {"usps": (20, 10)}
    assert data.domains["usps"].test.x.min() == 255


def test_usps_h5_needs_its_package(tmp_path, monkeypatch):
    (tmp_path / "usps").mkdir()
    (tmp_path / "usps/usps.h5").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "h5py", None)
    refused("usps", tmp_path, "pip install 'protofed[data]'", "usps.t.bz2")


def test_usps_h5_layout(tmp_path, monkeypatch):
    """The groups and shapes of the file, where the package itself is not installed."""

    class File(dict):
        def __init__(self, path, mode):
            parts = {"train": 20, "test": 10}
            super().__init__(
                {p: {"data": np.full((n, 256), 0.5), "target": np.arange(n) % 10} for p, n in parts.items()}
            )

        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

    (tmp_path / "usps").mkdir()
    (tmp_path / "usps/usps.h5").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "h5py", SimpleNamespace(File=File))
    assert load("usps", data_root=tmp_path).domains["usps"].train.x.unique().tolist() == [128]


def write_svhn(folder):
    folder.mkdir(parents=True)
    x = noise(32, 32, 3, 20)
    savemat(folder / "train_32x32.mat", {"X": x, "y": (np.arange(20) % 10 + 1).astype(np.uint8)[:, None]})
    savemat(folder / "test_32x32.mat", {"X": noise(32, 32, 3, 10), "y": np.full((10, 1), 10, np.uint8)})
    return x


def test_svhn(tmp_path):
    x = write_svhn(tmp_path / "svhn")
    domain = load("svhn", data_root=tmp_path).domains["svhn"]
    assert domain.train.y[:10].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0]
    assert set(domain.test.y.tolist()) == {0}
    assert (domain.train.x[7].numpy() == x[..., 7].transpose(2, 0, 1)).all()
    (tmp_path / "svhn/test_32x32.mat").write_bytes(b"MATLAB 5.0 MAT-file" + b"x" * 200)
    refused("svhn", tmp_path, "test_32x32.mat cannot be read")


def write_syn(folder, train="imgs_train", test="imgs_valid"):
    for part, number in ((train, 2), (test, 1)):
        for digit in range(10):
            for each in range(number):
                picture(folder / part / str(digit) / f"{each}.png", (40, 40, 3))


@pytest.mark.parametrize(
    ("place", "names"), [("syn", ("train", "val")), ("syn/synthetic_digits", ("imgs_train", "imgs_valid"))]
)
def test_syn(tmp_path, place, names):
    write_syn(tmp_path / place, *names)
    data = load("syn", data_root=tmp_path)
    assert counts(data) == {"syn": (20, 10)}
    assert data.image_shape == (3, 32, 32)


def test_mnist_m(tmp_path):
    for part, number in (("train", 20), ("test", 10)):
        for each in range(number):
            picture(tmp_path / f"mnist_m/mnist_m_{part}/{each:08}.png", (32, 32, 3))
        lines = [f"{each:08}.png {each % 10}\n" for each in range(number)]
        (tmp_path / f"mnist_m/mnist_m_{part}_labels.txt").write_text("".join(lines))
    data = load("mnist_m", data_root=tmp_path)
    assert counts(data) == {"mnist_m": (20, 10)}
    assert data.domains["mnist_m"].train.y[:11].tolist() == [*range(10), 0]
    write_syn(tmp_path / "by_folder/mnist_m", "train", "test")
    assert counts(load("mnist_m", data_root=tmp_path / "by_folder")) == {"mnist_m": (20, 10)}


def test_digits_are_those_that_are_there(tmp_path):
    write_mnist(tmp_path / "mnist")
    write_usps(tmp_path / "digits/usps")
    data = load("digits", data_root=tmp_path)
    assert counts(data) == {"mnist": (20, 10), "usps": (20, 10)}
    assert data.image_shape == (1, 28, 28)
    assert "original files of mnist" in data.source
    assert "folder digits/usps" in data.source
    assert sum("is used without" in warning for warning in data.warnings) == 2
    assert form_of("digits", tmp_path) == "original"
    chosen = load("digits", data_root=tmp_path, options={"members": "usps"})
    assert list(chosen.domains) == ["usps"]
    refused("digits", tmp_path, "data svhn was not found", "train_32x32.mat", options={"members": "mnist,svhn"})
    refused("digits", tmp_path, "unknown member of digits", options={"members": "mnist,cifar10"})


def test_all_four_digits(tmp_path):
    write_mnist(tmp_path / "mnist")
    write_usps(tmp_path / "usps")
    write_svhn(tmp_path / "svhn")
    write_syn(tmp_path / "syn")
    data = load("digits", data_root=tmp_path)
    assert list(data.domains) == ["mnist", "usps", "svhn", "syn"]
    assert data.image_shape == (3, 32, 32)
    assert not any("is used without" in warning for warning in data.warnings)


def test_our_own_form_comes_first(tmp_path):
    write_mnist(tmp_path / "mnist")
    (tmp_path / "digits").mkdir()
    x, y = noise(4, 8, 8), np.arange(4)
    np.savez(tmp_path / "digits/usps.npz", x_train=x, y_train=y, x_test=x[:2], y_test=y[:2])
    data = load("digits", data_root=tmp_path)
    assert list(data.domains) == ["usps"]
    assert data.source == "folder digits (npz)"
    refused("digits", tmp_path, "data.members is a setting for the original files", options={"members": "mnist"})


def test_digits_stay_embedded_without_originals(tmp_path):
    assert "syn_generated" in load("digits", data_root=tmp_path).domains


# --- cifar-10 --------------------------------------------------------------------------------------------------------


class OldPickler(pickle._Pickler):
    """Writes bytes as Python 2 wrote its strings, which is how CIFAR-10 was pickled."""

    dispatch: ClassVar = dict(pickle._Pickler.dispatch)

    def save_bytes(self, value):
        self.write(
            b"U" + bytes([len(value)]) + value if len(value) < 256 else b"T" + struct.pack("<i", len(value)) + value
        )
        self.memoize(value)

    dispatch[bytes] = save_bytes


def write_cifar(folder):
    folder.mkdir(parents=True)
    x = noise(10, 3072)
    for name in [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]:
        with (folder / name).open("wb") as file:
            OldPickler(file, protocol=2).dump({b"data": x, b"labels": list(range(10)), b"batch_label": b"a batch"})
    return x


def test_cifar10(tmp_path):
    x = write_cifar(tmp_path / "cifar10/cifar-10-batches-py")
    data = load("cifar10", data_root=tmp_path)
    assert counts(data) == {"cifar10": (50, 10)}
    assert (data.domains["cifar10"].test.x.numpy() == x.reshape(-1, 3, 32, 32)).all()
    assert data.domains["cifar10"].test.y.tolist() == list(range(10))
    assert data.classes[5] == "dog"


class Evil:
    """Runs a command where it is unpickled by the ordinary way."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
def test_a_pickle_cannot_run_anything(tmp_path, protocol):
    folder = tmp_path / "cifar10"
    write_cifar(folder)
    mark = tmp_path / "executed"
    bad = {b"data": noise(10, 3072), b"labels": Evil(f"touch {mark}")}
    (folder / "data_batch_2").write_bytes(pickle.dumps(bad, protocol=protocol))
    refused("cifar10", tmp_path, "data_batch_2 cannot be read")
    assert not mark.exists()
    pickle.loads((folder / "data_batch_2").read_bytes())
    assert mark.exists(), "the fixture would do harm by the ordinary way"


@pytest.mark.parametrize("content", [b"", b"\x80\x02", b"no pickle", pickle.dumps([1, 2]), pickle.dumps({b"data": 1})])
def test_damaged_pickles(tmp_path, content):
    write_cifar(tmp_path / "cifar10")
    (tmp_path / "cifar10/test_batch").write_bytes(content)
    refused("cifar10", tmp_path, "test_batch")


# --- office-caltech10 and pacs ---------------------------------------------------------------------------------------


def test_office_caltech10_is_divided_by_position(tmp_path):
    """11 + 12 images: positions 8, 9, 18 and 19 of the domain are tested, wherever the classes begin."""
    for domain in ("amazon", "caltech", "dslr", "webcam"):
        for label, number in (("backpack", 11), ("mug", 12)):
            for each in range(number):
                shade = np.full((6, 6, 3), each + 100 * (label == "mug"), np.uint8)
                picture(tmp_path / "office_caltech10" / domain / label / f"frame_{each:04}.png", pixels=shade)
    data = load("office_caltech10", data_root=tmp_path)
    assert list(data.domains) == ["caltech", "amazon", "webcam", "dslr"]
    assert counts(data)["dslr"] == (19, 4)
    assert data.classes == ("backpack", "mug")
    assert data.image_shape == (3, 64, 64)
    test = data.domains["dslr"].test
    assert test.y.tolist() == [0, 0, 1, 1]
    assert test.x[:, 0, 0, 0].tolist() == [8, 9, 107, 108]
    assert load("office_caltech10", data_root=tmp_path, image_size=8).image_shape == (3, 8, 8)


PACS = {"photo": 20, "art_painting": 10, "cartoon": 10, "sketch": 10}
PACS_CLASSES = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")


def write_pacs(folder, lists=None):
    for domain in PACS:
        paths = []
        for label in PACS_CLASSES:
            for each in range(3):
                path = folder / domain / label / f"pic_{each:03}.jpg"
                picture(path, (8, 8, 3))
                paths.append(path.relative_to(folder).as_posix())
        if lists:
            (folder / lists).mkdir(exist_ok=True)
            for part, chosen in (("train", paths[::3] + paths[1::3]), ("crossval", paths[2::3]), ("test", paths)):
                lines = [f"{path} {PACS_CLASSES.index(path.split('/')[1]) + 1}\n" for path in chosen]
                (folder / lists / f"{domain}_{part}_kfold.txt").write_text("".join(lines))


def test_pacs(tmp_path):
    write_pacs(tmp_path / "pacs")
    data = load("pacs", data_root=tmp_path, image_size=8)
    assert list(data.domains) == list(PACS)
    assert set(counts(data).values()) == {(17, 4)}
    assert data.classes == PACS_CLASSES
    whole = load("pacs", data_root=tmp_path, image_size=8, options={"pacs_test": "all"})
    assert set(counts(whole).values()) == {(17, 21)}
    assert "tested on the whole domain; pacs_test=all" in whole.source
    assert any("the training images include 17 of 21 test images" in warning for warning in whole.warnings)
    refused("pacs", tmp_path, "data.pacs_test=most is not valid; it takes heldout|all", options={"pacs_test": "most"})
    refused("pacs", tmp_path, "photo_train_kfold.txt", options={"pacs_split": "kfold"})


@pytest.mark.parametrize("lists", [".", "splits"])
def test_pacs_kfold_lists(tmp_path, lists):
    write_pacs(tmp_path / "pacs", lists)
    data = load("pacs", data_root=tmp_path, image_size=8, options={"pacs_split": "kfold"})
    assert set(counts(data).values()) == {(14, 7)}
    assert data.domains["photo"].test.y.tolist() == list(range(7))
    assert "crossval lists" in data.source
    (tmp_path / "pacs/photo/dog/pic_002.jpg").unlink()
    refused("pacs", tmp_path, "photo_crossval_kfold.txt names photo/dog/pic_002.jpg", options={"pacs_split": "kfold"})


def test_an_incomplete_set_says_what_is_missing(tmp_path):
    write_pacs(tmp_path / "pacs")
    for path in (tmp_path / "pacs/sketch/dog").iterdir():
        path.unlink()
    refused("pacs", tmp_path, "data pacs is not complete", "sketch/dog", "https://")


# --- femnist and medmnist --------------------------------------------------------------------------------------------


def leaf(path, writers):
    path.parent.mkdir(parents=True, exist_ok=True)
    data = {
        writer: {"x": RNG.random((len(labels), 784)).round(3).tolist(), "y": labels}
        for writer, labels in writers.items()
    }
    content = {"users": list(writers), "num_samples": [len(each) for each in writers.values()], "user_data": data}
    path.write_text(json.dumps(content))


def test_femnist(tmp_path):
    folder = tmp_path / "femnist/data"
    leaf(folder / "train/all_data_0_niid_0_keep_0_train_9.json", {"f0000_14": [0, 10, 36], "f0001_41": [61, 1]})
    leaf(folder / "train/all_data_1_niid_0_keep_0_train_9.json", {"f0002_05": [3, 4]})
    leaf(folder / "test/all_data_0_niid_0_keep_0_test_9.json", {"f0000_14": [0], "f0001_41": [1]})
    pooled = load("femnist", data_root=tmp_path)
    assert counts(pooled) == {"femnist": (7, 2)}
    assert (pooled.classes[10], pooled.classes[36], len(pooled.classes)) == ("A", "a", 62)
    writers = load("femnist", data_root=tmp_path, options={"femnist_domains": "writers"})
    assert counts(writers) == {"f0000_14": (3, 1), "f0001_41": (2, 1)}
    assert "1 writers are left out" in writers.warnings[0]
    one = load("femnist", data_root=tmp_path, options={"femnist_domains": "writers", "femnist_writers": "1"})
    assert list(one.domains) == ["f0000_14"]
    next((folder / "test").iterdir()).write_text('{"users": []}')
    refused("femnist", tmp_path, "_test_9.json cannot be read")


def med(path, side=28, colour=True, labels=9, **changes):
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = {}
    for part, number in (("train", 20), ("val", 5), ("test", 10)):
        arrays[f"{part}_images"] = noise(number, side, side, *([3] if colour else []))
        arrays[f"{part}_labels"] = (np.arange(number) % labels).astype(np.uint8)[:, None]
    np.savez(path, **(arrays | changes))


def test_medmnist(tmp_path):
    med(tmp_path / "medmnist/pathmnist.npz")
    med(tmp_path / "medmnist/breastmnist.npz", colour=False, labels=2)
    path = load("medmnist_pathmnist", data_root=tmp_path)
    assert counts(path) == {"pathmnist": (25, 10)}
    assert path.classes[0] == "adipose"
    assert load("medmnist_breastmnist", data_root=tmp_path).image_shape == (1, 28, 28)
    names = {info.name for info in available(tmp_path)}
    assert names == {"digits", "lesions", "medmnist_pathmnist", "medmnist_breastmnist"}
    refused("medmnist_octmnist", tmp_path, "octmnist.npz")
    med(tmp_path / "medmnist/pathmnist.npz", test_labels=np.full((10, 1), 9))
    refused("medmnist_pathmnist", tmp_path, "labels run from 9 to 9, but there are 9 classes")
    (tmp_path / "medmnist/pathmnist.npz").write_bytes(pickle.dumps({"train_images": 1}))
    refused("medmnist_pathmnist", tmp_path, "not an npz file")


def test_medmnist_reads_the_fitting_size(tmp_path):
    from protofed.data.sources import medical

    for side in (64, 128):
        med(tmp_path / f"medmnist/pathmnist_{side}.npz", side)
    folder = tmp_path / "medmnist"
    wanted = {None: 64, (32, 32): 64, (64, 64): 64, (100, 100): 128, (224, 224): 128}
    for size, side in wanted.items():
        assert medical._fitting(folder, "pathmnist", size).name == f"pathmnist_{side}.npz"
    assert load("medmnist_pathmnist", data_root=tmp_path, image_size=32).image_shape == (3, 32, 32)


# --- fundus photographs ----------------------------------------------------------------------------------------------


def write_aptos(folder, number=25):
    rows = [(f"{each:012x}", each % 5) for each in range(number)]
    table(folder / "train.csv", ("id_code", "diagnosis"), *rows)
    for name, _ in rows:
        picture(folder / "train_images" / f"{name}.png", (20, 24, 3))


def write_idrid(folder):
    base = folder / "B. Disease Grading"
    for letter, word, number in (("a", "Training", 10), ("b", "Testing", 5)):
        rows = [(f"IDRiD_{each:03}", each % 5, 0, "") for each in range(1, number + 1)]
        columns = ("Image name", "Retinopathy grade", "Risk of macular edema ", "")
        table(base / "2. Groundtruths" / f"{letter}. IDRiD_Disease Grading_{word} Labels.csv", columns, *rows)
        for name, *_ in rows:
            picture(base / "1. Original Images" / f"{letter}. {word} Set" / f"{name}.jpg", (20, 24, 3))


def test_aptos(tmp_path):
    write_aptos(tmp_path / "aptos")
    data = load("aptos", data_root=tmp_path)
    assert counts(data) == {"aptos": (20, 5)}
    assert data.domains["aptos"].test.y.bincount().tolist() == [1] * 5
    assert data.classes == ("No DR", "Mild", "Moderate", "Severe", "Proliferative")
    assert "80/20" in data.source
    (tmp_path / "aptos/train_images/000000000003.png").unlink()
    refused("aptos", tmp_path, "names 000000000003, but there is no such image")
    table(tmp_path / "aptos/train.csv", ("id_code", "diagnosis"), ("0" * 12, 7))
    refused("aptos", tmp_path, "the grade 7")
    table(tmp_path / "aptos/train.csv", ("id", "diagnosis"), ("0" * 12, 1))
    refused("aptos", tmp_path, "no column id_code")


def test_idrid_has_its_own_split(tmp_path):
    write_idrid(tmp_path / "idrid")
    data = load("idrid", data_root=tmp_path)
    assert counts(data) == {"idrid": (10, 5)}
    assert data.domains["idrid"].test.y.tolist() == [1, 2, 3, 4, 0]
    assert "official" in data.source


def test_retino(tmp_path):
    rows = [(f"{each}.png", each % 5) for each in range(10)]
    table(tmp_path / "retino/retino_train.csv", ("img_id", "label"), *rows)
    for name, _ in rows:
        picture(tmp_path / "retino/images" / name)
    assert counts(load("retino", data_root=tmp_path)) == {"retino": (5, 5)}


def write_kaggle(folder, sites=False):
    rows = [(f"{each}_{side}", each % 5) for each in range(20) for side in ("left", "right")]
    columns = ("image", "level", *(["site"] if sites else []))
    table(
        folder / "trainLabels.csv",
        columns,
        *([(*row, f"s{at % 4 // 2}") if sites else row for at, row in enumerate(rows)]),
    )
    for name, _ in rows:
        picture(folder / "train" / f"{name}.jpeg", pixels=np.full((8, 8, 3), 12 * int(name.split("_")[0]), np.uint8))


def test_kaggle_dr_keeps_both_eyes_together(tmp_path):
    write_kaggle(tmp_path / "kaggle_dr")
    data = load("kaggle_dr", data_root=tmp_path)
    domain = data.domains["kaggle_dr"]
    assert counts(data) == {"kaggle_dr": (30, 10)}
    patients = [{round(int(value) / 12) for value in part.x[:, 0, 0, 0]} for part in (domain.train, domain.test)]
    assert not patients[0] & patients[1]


def test_kaggle_dr_by_site(tmp_path):
    write_kaggle(tmp_path / "kaggle_dr", sites=True)
    assert list(load("kaggle_dr", data_root=tmp_path).domains) == ["s0", "s1"]


def write_eyepacs(folder, sizes=(30, 25, 20, 15, 12, 6)):
    columns = (
        *("image_path", "image_field", "session_image_quality", "diagnosis_image_dr_level"),
        *("clinical_siteIdentifier", "patient_id"),
    )
    rows = []
    for site, number in enumerate(sizes):
        for each in range(number):
            rows.append((f"images-set-1/{site}_{each}.jpg", "field 1", ("Adequate", "Good", "Excellent")[each % 3]))
            rows[-1] += (f"{each % 5}.0", f"site-{site}", f"p{site}-{each // 2}")
    # None of these is usable: another field, bad quality, no quality, no grade.
    for at, (field, quality, grade) in enumerate(
        (("field 2", "Good", "0"), ("field 1", "Insufficient", "1"), ("field 1", "", "1"), ("field 1", "Good", ""))
    ):
        rows += [
            (f"images-set-1/x{at}_{each}.jpg", field, quality, grade, "site-5", f"q{at}{each}") for each in range(40)
        ]
    table(folder / "metadata.csv", columns, *rows)
    for name, *_, site, _ in rows:
        if not name.startswith("images-set-1/x"):
            shade = np.full((6, 6, 3), 10 * int(site[-1]) + 5, np.uint8)
            picture(folder / "images" / name.replace(".jpg", ".png"), pixels=shade)


def test_eyepacs_sites(tmp_path):
    write_eyepacs(tmp_path / "eyepacs")
    data = load("eyepacs", data_root=tmp_path, image_size=8)
    assert list(data.domains) == ["site1", "site2", "site3", "site4", "site5"]
    assert [sum(each) for each in counts(data).values()] == [30, 25, 20, 15, 12]
    assert [int(domain.train.x[0, 0, 0, 0]) for domain in data.domains.values()] == [5, 15, 25, 35, 45]
    assert data.domains["site1"].train.y.unique().tolist() == [0, 1, 2, 3, 4]


def test_dr_fundus_joins_sites(tmp_path):
    write_aptos(tmp_path / "dr_fundus/aptos")
    write_idrid(tmp_path / "idrid")
    write_eyepacs(tmp_path / "eyepacs")
    assert list(load("dr_fundus", data_root=tmp_path).domains) == ["aptos", "idrid"]
    chosen = load(
        "dr_fundus", data_root=tmp_path, options={"members": "eyepacs,aptos"}, labels="0=healthy,1-4=diseased"
    )
    assert list(chosen.domains) == ["site1", "site2", "site3", "site4", "site5", "aptos"]
    assert chosen.classes == ("healthy", "diseased")


def test_circle_crop_setting(tmp_path):
    y, x = np.mgrid[:60, :80]
    for each in range(3):
        photograph = np.zeros((60, 80, 3), np.uint8)
        photograph[(x - 40) ** 2 + (y - 30) ** 2 <= 25**2] = (200 - each, 100, 50)
        picture(
            tmp_path / "aptos/train_images" / f"{each}.png", pixels=photograph if each else np.zeros_like(photograph)
        )
    table(tmp_path / "aptos/train.csv", ("id_code", "diagnosis"), *((each, 0) for each in range(3)))
    plain = load("aptos", data_root=tmp_path, image_size=16)
    data = load("aptos", data_root=tmp_path, image_size=16, options={"circle_crop": "on"})
    assert counts(data) == counts(plain)
    assert any("no circle was found in 1 images" in warning for warning in data.warnings)
    pixels = np.concatenate([part.x.numpy() for part in (data.domains["aptos"].train, data.domains["aptos"].test)])
    assert not pixels[:, :, 0, 0].any()
    assert (pixels[:, 0, 8, 1:-1].min(1) > 150).sum() == 2, "the disc reaches from side to side"
    assert "circle_crop=True" in data.source
    refused("aptos", tmp_path, "it takes on|off", options={"circle_crop": "perhaps"})


# --- chest, ultrasound, skin -----------------------------------------------------------------------------------------


def write_tb(root):
    for place, prefix in (("montgomery", "MCUCXR"), ("shenzhen", "CHNCXR")):
        for each in range(20):
            picture(root / place / "CXR_png" / f"{prefix}_{each:04}_{each % 2}.png", (12, 10))
        (root / place / "CXR_png/Thumbs.db").write_bytes(b"")
    for part, number in (("Training", 7), ("Testing", 3)):
        for kind in "np":
            for each in range(number):
                picture(root / "india/DatasetA" / part / f"{kind}x{each}.jpg", (12, 10))


def test_tb_joins_three_sites(tmp_path):
    write_tb(tmp_path)
    data = load("tb", data_root=tmp_path)
    assert counts(data) == {"shenzhen": (16, 4), "india": (16, 4), "montgomery": (16, 4)}
    assert data.classes == ("normal", "tuberculosis")
    assert all(domain.test.y.bincount().tolist() == [2, 2] for domain in data.domains.values())
    assert load("montgomery", data_root=tmp_path).image_shape == (1, 64, 64)
    picture(tmp_path / "montgomery/CXR_png/MCUCXR_9999.png", (12, 10))
    refused("montgomery", tmp_path, "does not end in _0 (normal) or _1")
    picture(tmp_path / "india/DatasetA/Testing/other.jpg", (12, 10))
    refused("india", tmp_path, "starts neither with n")


@pytest.mark.parametrize("inner", ["images", "."])
def test_covid_qu_ex(tmp_path, inner):
    for part, number in (("Train", 3), ("Val", 2), ("Test", 1)):
        for label in ("COVID-19", "Non-COVID", "Normal"):
            folder = tmp_path / "covid_qu_ex/Lung Segmentation Data" / part / label
            for each in range(number):
                picture(folder / inner / f"{label}_{each}.png", (8, 8))
                picture(folder / "lung masks" / f"{label}_{each}.png", (8, 8))
    data = load("covid_qu_ex", data_root=tmp_path)
    assert counts(data) == {"covid_qu_ex": (15, 3)}
    assert "validation images join the training images" in data.source


def test_busi_leaves_masks_out(tmp_path):
    for label in ("benign", "malignant", "normal"):
        for each in range(1, 7):
            for end in ("", "_mask", "_mask_1"):
                picture(tmp_path / "busi" / label / f"{label} ({each}){end}.png", (8, 8))
    data = load("busi", data_root=tmp_path)
    assert counts(data) == {"busi": (12, 6)}
    assert data.classes == ("normal", "benign", "malignant")


def test_neojaundice(tmp_path):
    rows = [(f"{each // 3:04}-{each % 3 + 1}.jpg", each // 3, 5 + each // 3 * 2.0, 0) for each in range(30)]
    table(
        tmp_path / "neojaundice/chd_jaundice_published_2.csv",
        ("image_idx", "patient_id", "blood(mg/dL)", "Treatment"),
        *rows,
    )
    for name, *_ in rows:
        picture(tmp_path / "neojaundice/images" / name)
    data = load("neojaundice", data_root=tmp_path)
    # Bilirubin 5, 7, 9, 11 is low, 13 to 23 is high: 4 and 6 newborns with three photographs each.
    assert counts(data) == {"neojaundice": (3 * (3 + 4), 3 * (1 + 2))}
    assert data.domains["neojaundice"].test.y.bincount().tolist() == [3, 6]
    all_high = load("neojaundice", data_root=tmp_path, options={"bilirubin": "1"})
    assert set(all_high.domains["neojaundice"].train.y.tolist()) == {1}


# --- the split, the table and the page -------------------------------------------------------------------------------


def test_split_80_20_rounds_as_the_papers_count(tmp_path):
    """BUSI's 437, 210 and 133 images give FedMP's 157 test images."""
    sizes = {"benign": 437, "malignant": 210, "normal": 133, "single": 1}
    pictures = [
        GroupedFile(tmp_path / f"{label}{each}.png", label) for label, number in sizes.items() for each in range(number)
    ]
    files = split_80_20("busi", pictures)
    assert sum(file.part == "test" for file in files) == 157
    assert files == split_80_20("busi", pictures)
    assert [file.part for file in files if file.label == "single"] == ["train"]
    backwards = {file.path: file.part for file in split_80_20("busi", pictures[::-1])}
    assert all(backwards[file.path] == file.part for file in files), "the order of the files does not matter"


@pytest.mark.parametrize("name", [name for name in SOURCES if name != "digits"])  # these are embedded
def test_a_missing_set_gives_one_line(name, tmp_path):
    refused(name, tmp_path, f"`protofed data {name}` explains how")
    refused(name, None, "--data-root ROOT", f"`protofed data {name}` explains how")
    assert form_of(name, tmp_path) == "absent"


def test_the_table_is_complete():
    wanted = "digits mnist emnist usps svhn syn mnist_m cifar10 office_caltech10 pacs femnist medmnist_pathmnist "
    wanted += "aptos idrid eyepacs kaggle_dr montgomery shenzhen india tb retino dr_fundus neojaundice busi covid_qu_ex"
    assert set(wanted.split()) <= set(SOURCES)
    for name, source in SOURCES.items():
        assert name == source.name
        assert source.domains
        assert source.licence
        for option in source.options.values():
            assert option.description, f"{name}: {option.name}"
        if isinstance(source, Original):
            assert source.download
            assert source.layout
            assert source.split
            assert source.counts or source.sites or name in ("retino", "neojaundice")


def test_available_names_originals(tmp_path):
    write_pacs(tmp_path / "pacs")
    write_mnist(tmp_path / "mnist")
    (tmp_path / "cifar10").mkdir()
    infos = {info.name: info for info in available(tmp_path)}
    assert set(infos) == {"digits", "lesions", "pacs", "mnist"}
    assert infos["pacs"].domains == ("photo", "art_painting", "cartoon", "sketch")
    assert "original files" in infos["pacs"].description
    assert describe("mnist", tmp_path).domains[0].train == 20


def test_our_image_folders_are_still_read(tmp_path):
    for part in ("train", "test"):
        for label in ("backpack", "mug"):
            picture(tmp_path / "office_caltech10/amazon" / part / label / "0.png")
    assert form_of("office_caltech10", tmp_path) == "folders"
    assert load("office_caltech10", data_root=tmp_path).source == "folder office_caltech10 (image files)"


def test_a_registered_loader_may_take_settings(monkeypatch):
    from protofed.data import catalog

    monkeypatch.setattr(catalog, "_REGISTRY", dict(catalog._REGISTRY))

    def toy(*, side: int = 4) -> RawData:
        images = Images(*(torch.from_numpy(each) for each in (noise(2, 1, side, side), np.arange(2))))
        return RawData(("a", "b"), {"toy": Domain("toy", images, images)})

    register_data("toy", toy, "a toy")
    assert load("toy").image_size == (4, 4)
    assert load("toy", options={"side": "6"}).image_size == (6, 6)
    assert data_options("toy")["side"].default == 4
    refused("toy", None, "data.side=six is not valid; it takes a whole number", options={"side": "six"})
    refused("toy", None, "unknown setting of the data toy: 'size'", options={"size": 6})
    refused("digits", None, "has no settings", options={"side": 6})

    def careless(*, side=4):
        return side

    with pytest.raises(UserError, match="needs a type"):
        register_data("careless", careless, "no type")

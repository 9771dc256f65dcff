"""Pixels in a file are the same pixels: the same images, partitions and rounds, read a few at a time."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import protofed
from protofed.audit.victim import make_victim
from protofed.data import Dataset, files, images, load, npz, pixels
from protofed.data.files import read_images
from protofed.data.images import to_shape
from protofed.data.pixels import PixelFile, StoredPixels, join, pieces
from protofed.errors import UserError
from protofed.inference.classifier import Classifier
from protofed.inference.evaluating import evaluate
from protofed.inference.predict import predict
from protofed.runs.opened import OpenRun

_OnDisk = Callable[[], None]


@pytest.fixture
def on_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> _OnDisk:
    """From when it is called on, no pixels stay in memory, and few are looked at together."""

    def switch() -> None:
        monkeypatch.setenv("PROTOFED_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(pixels, "MEMORY_LIMIT", 0)
        monkeypatch.setattr(pixels, "_PIECE", 4000)

    return switch


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """Photographs of two domains: grey and colour, of several sizes, one test image that is trained on."""
    rng = np.random.default_rng(0)
    for domain, shape in (("a", (60, 52, 3)), ("b", (50, 50))):
        for part, count in (("train", 9), ("test", 4)):
            for label in ("cat", "dog"):
                place = tmp_path / "images" / domain / part / label
                place.mkdir(parents=True)
                for number in range(count):
                    height, width, *channels = shape
                    size = (height + (number % 3 if domain == "a" else 0), width, *channels)
                    Image.fromarray(rng.integers(256, size=size, dtype=np.uint8)).save(place / f"{number}.png")
    test = tmp_path / "images/b/test/cat/0.png"
    test.write_bytes((tmp_path / "images/b/train/cat/0.png").read_bytes())
    return str(tmp_path / "images")


def _stored(dataset: Dataset) -> list[bool]:
    parts = [part for domain in dataset.domains.values() for part in (domain.train, domain.test)]
    return [isinstance(part.x, StoredPixels) for part in parts]


def _same(one: Dataset, other: Dataset) -> None:
    assert (one.classes, one.warnings, one.image_shape) == (other.classes, other.warnings, other.image_shape)
    for name, domain in one.domains.items():
        for mine, others in ((domain.train, other.domains[name].train), (domain.test, other.domains[name].test)):
            assert torch.equal(mine.x[:], others.x[:])
            assert torch.equal(mine.y, others.y)


@pytest.mark.parametrize(
    "options",
    [{}, {"image_size": 48}, {"channels": 1}, {"domains": "b"}, {"domains": "a", "labels": "cat=x,dog=y"}],
    ids=str,
)
def test_a_folder_on_disk_is_the_folder_in_memory(folder: str, options: dict[str, Any], on_disk: _OnDisk) -> None:
    in_memory = load(folder, **options)
    assert not any(_stored(in_memory))
    on_disk()
    stored = load(folder, **options)
    assert all(_stored(stored))
    _same(stored, in_memory)
    _same(stored.resized(32), in_memory.resized(32))
    _same(stored.with_tests_in_training(), in_memory.with_tests_in_training())
    assert torch.equal(stored.pooled_train().x[:], in_memory.pooled_train().x)
    everywhere = torch.randperm(len(in_memory.pooled_train()), generator=torch.Generator().manual_seed(0))
    for some in (everywhere, everywhere[:3], everywhere[:0]):
        taken = stored.take_train(some)
        assert torch.equal(taken.x[:], in_memory.take_train(some).x)
        assert torch.equal(taken.y, in_memory.take_train(some).y)
        assert taken.x[:].is_contiguous()
    for dataset in (stored, in_memory):
        with pytest.raises(IndexError, match="2 of 3 positions"):
            dataset.take_train([-1, 0, 1000])


def test_sixteen_bits_are_scaled_together_on_disk_too(tmp_path: Path, on_disk: _OnDisk) -> None:
    rng = np.random.default_rng(0)
    paths = [tmp_path / f"{number}.png" for number in range(20)]
    for number, path in enumerate(paths):
        shape = (20, 20 + number % 2)
        deep = rng.integers(4000, size=shape, dtype=np.uint16)
        Image.fromarray(deep if number % 3 else rng.integers(256, size=(*shape, 3), dtype=np.uint8)).save(path)
    in_memory, notes = read_images(paths)
    on_disk()
    stored, same_notes = read_images(paths)
    assert isinstance(stored, StoredPixels)
    assert torch.equal(stored[:], in_memory[:])
    assert notes == same_notes != []


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float32])
@pytest.mark.parametrize("order", ["C", "F"])
def test_an_archive_is_unpacked_in_pieces(
    dtype: Any, order: Any, tmp_path: Path, on_disk: _OnDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    x = rng.integers(200, size=(13, 9, 8, 3)) / (200 if dtype == np.float32 else 1)
    x, y = np.asarray(x, dtype=dtype, order=order), np.arange(13) % 3
    np.savez_compressed(tmp_path / "a.npz", x_train=x, y_train=y, x_test=x[:4], y_test=y[:4])
    in_memory = load(str(tmp_path / "a.npz"))
    on_disk()
    monkeypatch.setattr(npz, "_PIECE", 1000)
    stored = load(str(tmp_path / "a.npz"))
    assert all(_stored(stored))
    _same(stored, in_memory)


def test_a_damaged_archive_is_refused_in_pieces_too(
    tmp_path: Path, on_disk: _OnDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = np.random.default_rng(0).integers(256, size=(13, 9, 8, 3), dtype=np.uint8), np.arange(13) % 3
    path = tmp_path / "a.npz"
    np.savez(path, x_train=x, y_train=y, x_test=x, y_test=y)
    on_disk()
    monkeypatch.setattr(npz, "_PIECE", 1000)
    content = bytearray(path.read_bytes())
    content[2000] ^= 1
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"a\.npz is not a readable npz file .Bad CRC"):
        load(str(path))


def test_what_shrinks_below_the_limit_comes_back_to_memory(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = load(folder, image_size=48)
    size = sum(len(part) for d in dataset.domains.values() for part in (d.train, d.test)) * 3 * 48**2
    # The limit is of the whole data set: every domain alone is smaller.
    monkeypatch.setattr(pixels, "MEMORY_LIMIT", size - 1)
    large = load(folder, image_size=48, channels=3)
    assert all(_stored(large)[:2])
    small = large.resized(32)
    assert not any(_stored(small))
    _same(small, dataset.resized(32))


def test_pixels_are_indexed_like_a_tensor(on_disk: _OnDisk) -> None:
    on_disk()
    tensor = torch.randint(256, (11, 3, 5, 4), dtype=torch.uint8)
    file = PixelFile(tensor.shape)
    file[0:4], file[4], file[5:11] = tensor[:4].numpy(), tensor[4].numpy(), tensor[5:].numpy()
    stored = StoredPixels([file])
    assert (stored.shape, stored.dtype, stored.ndim, len(stored)) == (tensor.shape, tensor.dtype, 4, 11)
    several: list[Any] = [0, -1, slice(None), slice(2, 5), slice(9, 99), slice(5, 5), [3, 1, 1], torch.tensor([10, 0])]
    for index in [*several, torch.arange(11) % 2 == 0, torch.tensor(3)]:
        assert torch.equal(stored[index], tensor[index])
    turned = torch.arange(11).flip(0)
    assert torch.equal(stored.select(turned).select(turned[:4])[:], tensor[:4])
    mixed = join([stored.select(turned), tensor, stored])
    assert isinstance(mixed, StoredPixels)
    assert torch.equal(mixed[:], torch.cat([tensor.flip(0), tensor, tensor]))
    assert torch.equal(mixed[torch.tensor([32, 0, 12, 11])], torch.stack([tensor[i] for i in (10, 10, 1, 0)]))
    for x in (stored, tensor):
        assert [len(part) for part in pieces(x, 4)] == [4, 4, 3]
        assert [len(part) for part in pieces(x[:0], 4)] == [0]
    for index in (11, torch.tensor([11])):
        with pytest.raises(IndexError):
            stored[index]


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [(7, 9), (30, 20), (40, 44)])
def test_an_image_is_resized_alike_whatever_is_resized_with_it(channels: int, size: tuple[int, int]) -> None:
    x = torch.randint(256, (40, channels, 30, 31), dtype=torch.uint8)
    together = to_shape(x, (channels, *size))
    for count in (1, 2, 7):
        parts = [to_shape(part, (channels, *size))[:] for part in torch.split(x, count)]
        assert torch.equal(torch.cat(parts), together[:])


def _rounds(run: protofed.Run) -> list[dict[str, Any]]:
    timeless = []
    for record in run.rounds:
        timeless.append({key: value for key, value in record.items() if "seconds" not in key and key != "time"})
    return timeless


@pytest.mark.parametrize(
    ("method", "options"),
    [
        ("fedavg", {"model": "cnn", "set": {"data.validation": "0.2"}}),
        ("fedavg", {"model": "cnn", "set": {"data.augment": "rotate,flip"}, "engine": "workers", "workers": 2}),
        ("fedproto", {"protocol": "dirichlet=0.5,clients=2", "model": "cnn", "set": {"data.merge_test": "true"}}),
        ("fedavg", {"train": "head", "views": 2, "model": "efficientnet_lite0", "image_size": 32}),
        ("fedavg", {"train": "head", "model": "cnn", "frozen": "cached"}),
    ],
)
def test_a_run_does_not_know_where_its_pixels_are(
    method: str, options: dict[str, Any], folder: str, tiny_run: Any, on_disk: _OnDisk
) -> None:
    in_memory = tiny_run(method, folder, **options)
    on_disk()
    stored = tiny_run(method, folder, **options)
    assert in_memory.config["partition"] == stored.config["partition"]
    assert json.dumps(_rounds(in_memory)) == json.dumps(_rounds(stored))


def test_a_finished_run_does_not_either(folder: str, tiny_run: Any, on_disk: _OnDisk, tmp_path: Path) -> None:
    run = tiny_run("fedavg", folder, model="cnn")

    def look(name: str) -> tuple[Any, ...]:
        opened = OpenRun(run.path, with_data=True)
        victim = make_victim(opened, opened.clients[0])
        predict(Classifier(run.path), folder, tmp_path / name)
        scores = evaluate(run.path, folder, part="all")
        return victim.pixels.tolist(), victim.confidence(victim.members).tolist(), scores, (tmp_path / name).read_text()

    before = look("before")
    on_disk()
    assert look("after") == before


def test_few_images_are_read_together(
    folder: str, tiny_run: Any, on_disk: _OnDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_disk()
    monkeypatch.setattr(pixels, "_PIECE", 60_000)
    read: list[int] = []
    whole = PixelFile.read

    def counted(self: PixelFile, rows: Any) -> Any:
        found = whole(self, rows)
        read.append(found.nbytes)
        return found

    monkeypatch.setattr(PixelFile, "read", counted)
    tiny_run("fedavg", folder, train="head", views=2, model="efficientnet_lite0", image_size=32, batch=4)
    assert len(read) > 50
    assert max(read) <= 60_000
    assert sum(read) > 52 * 3 * 32**2  # all of them, one piece after the other


def test_decoding_leaves_nothing_behind(folder: str, on_disk: _OnDisk, tmp_path: Path) -> None:
    on_disk()
    load(folder)
    assert list((tmp_path / "cache").iterdir()) == []
    broken = Path(folder) / "a/train/dog/8.png"
    broken.write_bytes(broken.read_bytes()[:200])
    with pytest.raises(UserError, match=r"8\.png: the image cannot be read"):
        load(folder)
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_folder_that_changes_while_it_is_read_is_refused(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = Path(folder) / "a/train/cat/3.png"
    make = files.empty_pixels

    def meanwhile(*given: Any) -> Any:
        Image.fromarray(np.zeros((9, 9), dtype=np.uint8)).save(changed)
        return make(*given)

    monkeypatch.setattr(files, "empty_pixels", meanwhile)
    with pytest.raises(UserError, match=r"3\.png changed while it was read; try again"):
        load(folder)

    def removed(*given: Any) -> Any:
        changed.unlink(missing_ok=True)
        return make(*given)

    monkeypatch.setattr(files, "empty_pixels", removed)
    with pytest.raises(UserError, match=r"3\.png changed while it was read"):
        load(folder)


def _full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_disk_without_room_is_told_and_memory_takes_its_place(
    folder: str, on_disk: _OnDisk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    in_memory = load(folder)
    on_disk()
    monkeypatch.setattr(pixels, "_claim", _full)
    dataset = load(folder)
    assert not any(_stored(dataset))
    _same(dataset, in_memory)
    assert "No space left on device" in caplog.text
    assert "set PROTOFED_CACHE" in caplog.text
    monkeypatch.setattr("protofed.system.available_memory", lambda: 1000)
    with pytest.raises(UserError, match=r"No space left on device.*GB are free; set PROTOFED_CACHE") as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def test_a_cache_folder_that_cannot_be_made_is_told(
    folder: str, on_disk: _OnDisk, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    on_disk()
    (tmp_path / "file").touch()
    monkeypatch.setenv("PROTOFED_CACHE", str(tmp_path / "file/below"))
    assert not any(_stored(load(folder)))
    assert "Not a directory" in caplog.text


def test_a_disk_that_fills_or_fails_later_is_one_line(
    folder: str, on_disk: _OnDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_disk()
    dataset = load(folder)
    with monkeypatch.context() as patch:
        patch.setattr(pixels.os, "pwrite", _full)
        with pytest.raises(UserError, match="decoded images cannot be written"):
            load(folder)
    with monkeypatch.context() as patch:
        patch.setattr(pixels.os, "preadv", _full)
        with pytest.raises(UserError, match="decoded images cannot be read"):
            dataset.pooled_train().x[0]
    file = PixelFile((4, 1, 2, 2))
    os.ftruncate(file._file.fileno(), 10)
    assert file[1].shape == (1, 2, 2)
    with pytest.raises(UserError, match="truncated"):
        StoredPixels([file])[:]


def test_images_must_be_bytes_on_disk_too(on_disk: _OnDisk) -> None:
    on_disk()
    with pytest.raises(ValueError, match="labels must be"):
        images.Images(StoredPixels([PixelFile((2, 1, 4, 4))]), torch.zeros(3, dtype=torch.int64))

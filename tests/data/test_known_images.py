"""Files that were decoded before are recognised by their bytes, and decoded again only when somebody wants pixels."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from protofed.data import Dataset, files, load
from protofed.data.known_images import KnownImages
from protofed.data.listing import ReadOptions
from protofed.data.pixels import StoredPixels, UndecodedPixels, digest_of
from protofed.errors import UserError

IMAGES = 2 * 2 * (5 + 3)
Decoded = Callable[[], list[str]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Colour images of two domains and classes, five to train on and three to test on of each."""
    rng = np.random.default_rng(0)
    for domain in ("a", "b"):
        for part, count in (("train", 5), ("test", 3)):
            for label in ("cat", "dog"):
                place = tmp_path / "images" / domain / part / label
                place.mkdir(parents=True)
                for number in range(count):
                    pixels = rng.integers(256, size=(12, 10, 3), dtype=np.uint8)
                    Image.fromarray(pixels).save(place / f"{number}.png")
    return tmp_path / "images"


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> Decoded:
    """Which files were decoded since the last call."""
    names: list[str] = []
    decode = files.decode

    def noted(picture: Any, *rest: Any) -> Any:
        names.append(str(picture.path))
        return decode(picture, *rest)

    def taken() -> list[str]:
        found = sorted(names)
        names.clear()
        return found

    monkeypatch.setattr(files, "decode", noted)
    return taken


def recognised(folder: Path) -> Dataset:
    return load(str(folder), reading=ReadOptions(undecoded=True))


def _same(one: Dataset, other: Dataset) -> None:
    assert (one.classes, one.warnings, one.place) == (other.classes, other.warnings, other.place)
    for name, domain in one.domains.items():
        for mine, others in ((domain.train, other.domains[name].train), (domain.test, other.domains[name].test)):
            assert torch.equal(mine.y, others.y)
            assert [digest_of(mine.x, i) for i in range(len(mine))] == [
                digest_of(others.x, i) for i in range(len(mine))
            ]
            assert torch.equal(mine.x[:], others.x[:])


def test_the_second_reading_decodes_what_is_asked_for_and_once(folder: Path, decoded: Decoded) -> None:
    first = recognised(folder)
    assert len(decoded()) == IMAGES
    second = recognised(folder)
    train = second.domains["a"].train
    assert isinstance(train.x, StoredPixels)
    digest_of(train.x, 1)
    assert decoded() == []
    assert torch.equal(train.x[1], first.domains["a"].train.x[1])
    assert decoded() == [str(folder / "a/train/cat/1.png")]
    assert len(train.take([0, 1, 1]).x[:]) == 3
    assert decoded() == [str(folder / "a/train/cat/0.png")]
    _same(second, load(str(folder)))


def test_who_wants_pixels_at_once_gets_them(folder: Path, decoded: Decoded) -> None:
    recognised(folder)
    decoded()
    assert isinstance(load(str(folder)).domains["a"].train.x, torch.Tensor)
    assert len(decoded()) == IMAGES


def test_another_file_and_another_size_are_decoded(folder: Path, decoded: Decoded) -> None:
    recognised(folder)
    decoded()
    changed = folder / "a/train/cat/0.png"
    changed.write_bytes((folder / "b/train/dog/0.png").read_bytes() + b"\0")
    recognised(folder)
    assert str(changed) in decoded()
    assert recognised(folder).domains["a"].train.x[0].equal(load(str(folder)).domains["a"].train.x[0])
    decoded()
    load(str(folder), image_size=8, reading=ReadOptions(undecoded=True))
    assert len(decoded()) == IMAGES


def test_leaks_are_found_by_pixels_without_decoding(folder: Path, decoded: Decoded) -> None:
    train, test = folder / "a/train/cat/0.png", folder / "a/test/cat/0.png"
    Image.open(train).save(test, compress_level=1)
    assert train.read_bytes() != test.read_bytes()
    told = [warning for warning in recognised(folder).warnings if "training images include" in warning]
    assert told == ["domain a: the training images include 1 of 6 test images"]
    decoded()
    assert recognised(folder).warnings == load(str(folder)).warnings
    assert len(decoded()) == IMAGES


def test_a_damaged_memory_is_no_memory(folder: Path, decoded: Decoded) -> None:
    recognised(folder)
    path = KnownImages().path
    content = bytearray(path.read_bytes())
    content[20] ^= 1
    path.write_bytes(content)
    decoded()
    recognised(folder)
    assert len(decoded()) == IMAGES // 2  # those of the domain whose entry was lost
    path.write_bytes(content[:-1])
    recognised(folder)
    recognised(folder)
    path.unlink()
    path.mkdir()
    decoded()
    _same(recognised(folder), load(str(folder)))
    assert len(decoded()) == 2 * IMAGES


def test_a_file_that_breaks_after_it_was_recognised_is_named(folder: Path) -> None:
    recognised(folder)
    known = recognised(folder)
    (folder / "a/train/cat/0.png").write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"0\.png"):
        known.domains["a"].train.x[:]


def test_processes_share_what_one_of_them_decoded() -> None:
    calls: list[int] = []

    def decode(rows: Any) -> list[np.ndarray[Any, Any]]:
        calls.extend(rows)
        return [np.full((1, 2, 2), row, dtype=np.uint8) for row in rows]

    pixels = UndecodedPixels((4, 1, 2, 2), [b"0", b"1", b"2", b"3"], decode)
    child = os.fork()
    if child == 0:
        pixels.read(np.array([2, 0]))
        os._exit(0)
    os.waitpid(child, 0)
    assert pixels.read(np.array([0, 2, 3, 0]))[:, 0, 0, 0].tolist() == [0, 2, 3, 0]
    assert calls == [3]


@pytest.mark.parametrize("engine", [{"engine": "loop"}, {"engine": "workers", "workers": 2}])
def test_a_run_does_not_know_whether_its_images_were_decoded(
    engine: dict[str, Any], folder: Path, tiny_run: Any, same_results: Any
) -> None:
    first = tiny_run("protoridge", str(folder), **engine)
    assert KnownImages().path.exists()
    same_results(first, tiny_run("protoridge", str(folder), **engine))

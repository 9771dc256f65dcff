"""Features on disk: found again, bounded, shared between processes, and never trusted when damaged."""

import multiprocessing
import os
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from protofed.clients.feature_cache import FeatureCache
from protofed.system import cache_folder

BACKBONE, OTHER = b"backbone", b"another"


def some(count: int, width: int = 4) -> dict[bytes, torch.Tensor]:
    return {f"image {n}".encode(): torch.arange(n, n + width, dtype=torch.float32) for n in range(count)}


def test_what_was_written_is_read(tmp_path: Path) -> None:
    features = some(1200)
    FeatureCache(tmp_path).write(BACKBONE, features)
    cache = FeatureCache(tmp_path)
    found = cache.read(BACKBONE, [*features, b"unknown", b"image 3"])
    assert found.keys() == features.keys()
    assert all(torch.equal(found[key], features[key]) for key in features)
    assert cache.read(OTHER, list(features)) == {}
    assert cache.content().features == 1200


def test_nothing_is_made_by_looking(tmp_path: Path) -> None:
    cache = FeatureCache(tmp_path / "none")
    assert cache.read(BACKBONE, [b"x"]) == {}
    assert cache.content().bytes == 0
    assert not (tmp_path / "none").exists()


def test_the_least_recently_used_make_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protofed.clients.feature_cache._FRESH", 0.0)
    cache = FeatureCache(tmp_path, limit=10 * 24)  # 8 bytes of checksum and 4 numbers each
    features = some(10)
    for key, value in features.items():
        cache.write(BACKBONE, {key: value})
    cache.read(BACKBONE, [b"image 0"])
    cache.write(BACKBONE, {b"new": torch.zeros(4)})
    left = cache.read(BACKBONE, [*features, b"new"])
    assert {b"new", b"image 0", b"image 9"} <= left.keys()
    assert b"image 1" not in left
    assert cache.content().bytes <= 10 * 24


def test_a_damaged_feature_counts_as_missing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = FeatureCache(tmp_path)
    cache.write(BACKBONE, some(3))
    with sqlite3.connect(cache.path) as database:
        (value,) = database.execute("SELECT value FROM features WHERE image = ?", (b"image 1",)).fetchone()
        database.execute("UPDATE features SET value = ? WHERE image = ?", (value[:-4], b"image 1"))
    assert cache.read(BACKBONE, list(some(3))).keys() == {b"image 0", b"image 2"}
    assert "1 cached features" in caplog.text


@pytest.mark.parametrize("damage", ["truncated", "rubbish"])
def test_a_damaged_file_is_said_and_begun_anew(damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = FeatureCache(tmp_path)
    cache.write(BACKBONE, some(500, width=100))
    with sqlite3.connect(cache.path) as database:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    content = cache.path.read_bytes()
    cache.path.write_bytes(content[: len(content) // 3] if damage == "truncated" else b"rubbish" * 10_000)
    assert cache.read(BACKBONE, list(some(500))) == {}
    assert "is damaged" in caplog.text
    cache.write(BACKBONE, some(2))
    assert len(cache.read(BACKBONE, list(some(2)))) == 2


def test_a_folder_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    cache = FeatureCache(tmp_path / "file")  # also root may not put a file below a file
    cache.write(BACKBONE, some(2))
    assert cache.read(BACKBONE, list(some(2))) == {}
    assert "features are not cached" in caplog.text
    assert "set PROTOFED_CACHE" in caplog.text


@pytest.fixture
def nobody() -> Iterator[Path]:
    """A folder that others may look into, and the rights of somebody else; root may write anywhere."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)
        if os.getuid() == 0:
            os.seteuid(0)
        Path(folder).chmod(0o755)


def test_a_folder_that_can_only_be_read(nobody: Path, caplog: pytest.LogCaptureFixture) -> None:
    FeatureCache(nobody).write(BACKBONE, some(3))
    before = {path.name: path.read_bytes() for path in nobody.iterdir()}
    (nobody / "features.sqlite").chmod(0o444)
    nobody.chmod(0o555)
    if os.getuid() == 0:
        os.seteuid(65534)
    cache = FeatureCache(nobody)
    for _ in range(2):
        found = cache.read(BACKBONE, list(some(4)))
        assert found.keys() == some(3).keys()
        cache.write(BACKBONE, some(4))
    assert cache.content().features == 3
    (line,) = caplog.messages
    assert "is read-only" in line
    assert "its features are used" in line
    assert {path.name: path.read_bytes() for path in nobody.iterdir()} == before


def test_a_full_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def execute(self, *_: object) -> None:
            raise sqlite3.OperationalError("database or disk is full")

        def close(self) -> None:
            pass

    monkeypatch.setattr(sqlite3, "connect", lambda *_, **__: Full())
    FeatureCache(tmp_path).write(BACKBONE, some(1))
    assert "disk is full" in caplog.text


def write_some(folder: Path, first: int) -> None:
    cache = FeatureCache(folder)
    for n in range(first, first + 50):
        cache.write(BACKBONE, {f"image {n}".encode(): torch.full((4,), float(n))})


def test_processes_write_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write_some, args=(tmp_path, 50 * number)) for number in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    kept = FeatureCache(tmp_path).read(BACKBONE, [f"image {n}".encode() for n in range(200)])
    assert len(kept) == 200
    assert all(float(value[0]) == int(key.split()[1]) for key, value in kept.items())


def test_clear(tmp_path: Path) -> None:
    cache = FeatureCache(tmp_path)
    cache.write(BACKBONE, some(3))
    assert cache.clear().features == 3
    assert list(tmp_path.iterdir()) == []
    assert cache.content().features == 0


def test_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PROTOFED_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path
    monkeypatch.delenv("PROTOFED_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "protofed"

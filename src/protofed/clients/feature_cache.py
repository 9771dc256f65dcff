"""Features of frozen backbones, kept on disk from run to run: an image that was seen once is not computed again.

A feature is found by what it was computed from: the pixels, and the backbone (its weights, its stages, the runtime).
One SQLite file holds them all, so that several processes may read and write at once. Where it can only be read, what is
in it is used. Whatever else is wrong with the file, a run goes on without it and says so.
"""

import logging
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from protofed.system import cache_folder

log = logging.getLogger("protofed")

T = TypeVar("T")

LIMIT = 8 * 2**30
"""Bytes that are kept; beyond them the least recently used are removed."""

_FILE = "features.sqlite"
_AT_ONCE = 500
_CHECKSUM = 8
_DTYPE = torch.float32
_FRESH = 3600.0
"""Seconds for which a feature counts as just used."""
_PATIENCE = 60.0
"""Seconds to wait for another process that writes."""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS features (
    backbone BLOB NOT NULL, image BLOB NOT NULL, value BLOB NOT NULL, used REAL NOT NULL,
    PRIMARY KEY (backbone, image)
) WITHOUT ROWID
"""


_NO_WRITING = (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN)


class _Unwritable(Exception):
    """A file that is there, in a place where nothing can be written."""


@dataclass(frozen=True)
class CacheContent:
    """How much is kept, and where."""

    path: Path
    features: int
    bytes: int
    limit: int


class FeatureCache:
    """Features by backbone and image. It never raises: an unusable cache behaves like an empty one."""

    def __init__(self, folder: Path | None = None, limit: int = LIMIT) -> None:
        self.path = (folder or cache_folder()) / _FILE
        self._limit = limit
        self._told: set[str] = set()
        self._read_only = False

    def read(self, backbone: bytes, images: Sequence[bytes]) -> dict[bytes, Tensor]:
        """The features that are kept, as flat float32 tensors; a damaged one counts as missing."""

        def select(database: sqlite3.Connection) -> dict[bytes, bytes]:
            values: dict[bytes, bytes] = {}
            for part in _parts(list(dict.fromkeys(images))):
                where = f"WHERE backbone = ? AND image IN ({','.join('?' * len(part))})"
                values.update(database.execute(f"SELECT image, value FROM features {where}", (backbone, *part)))
                if not self._read_only:
                    now = time.time()
                    # To write that a feature was used rewrites the feature.
                    stale = (now, backbone, *part, now - _FRESH)
                    database.execute(f"UPDATE features SET used = ? {where} AND used < ?", stale)
            return values

        nothing: dict[bytes, bytes] = {}
        values = self._look(select, nothing)
        intact = {image: value for image, value in values.items() if _is_intact(value)}
        if len(intact) < len(values):
            self._warn(f"{len(values) - len(intact)} cached features in {self.path} are damaged and will be recomputed")
        return {image: torch.frombuffer(bytearray(value[_CHECKSUM:]), dtype=_DTYPE) for image, value in intact.items()}

    def write(self, backbone: bytes, features: Mapping[bytes, Tensor]) -> None:
        """Keep features for the next run, where they can be."""
        if self._read_only:
            return
        now = time.time()

        def insert(database: sqlite3.Connection) -> None:
            rows = ((backbone, image, _with_checksum(feature), now) for image, feature in features.items())
            database.executemany("INSERT OR REPLACE INTO features VALUES (?, ?, ?, ?)", rows)
            self._shrink(database)

        self._transact("write", insert, None)

    def content(self) -> CacheContent:
        """What is kept now."""

        def total(database: sqlite3.Connection) -> tuple[int, int]:
            count, size = database.execute("SELECT COUNT(*), TOTAL(LENGTH(value)) FROM features").fetchone()
            return int(count), int(size)

        count, size = self._look(total, (0, 0))
        return CacheContent(self.path, count, size, self._limit)

    def clear(self) -> CacheContent:
        """Remove everything; what was there."""
        before = self.content()
        self._remove()
        return before

    def _shrink(self, database: sqlite3.Connection) -> None:
        """Remove the least recently used, until a tenth of the limit is free."""
        (size,) = database.execute("SELECT TOTAL(LENGTH(value)) FROM features").fetchone()
        excess = size - 0.9 * self._limit
        if size <= self._limit:
            return
        oldest = database.execute("SELECT backbone, image, LENGTH(value) FROM features ORDER BY used")
        removed = []
        while excess > 0 and (row := oldest.fetchone()) is not None:
            removed.append(row[:2])
            excess -= row[2]
        database.executemany("DELETE FROM features WHERE backbone = ? AND image = ?", removed)

    def _look(self, work: Callable[[sqlite3.Connection], T], otherwise: T) -> T:
        """What the work finds in a file that may be there, also where it cannot be written."""
        if not self.path.exists():
            return otherwise
        if not self._read_only:
            try:
                return self._transact("read", work, otherwise)
            except _Unwritable as problem:
                self._read_only = True
                self._warn(
                    f"{self.path} is read-only ({problem}): its features are used, but new ones are not cached; "
                    "set PROTOFED_CACHE to cache them"
                )
        try:
            # Nobody writes it from here, so no file is needed beside it by which writers and readers would agree.
            address = f"{self.path.absolute().as_uri()}?immutable=1"
            with closing(sqlite3.connect(address, uri=True)) as database:
                return work(database)
        except sqlite3.Error as problem:
            self._warn(f"{self.path} cannot be read ({problem}); features will be recomputed")
        return otherwise

    def _transact(self, purpose: str, work: Callable[[sqlite3.Connection], T], otherwise: T) -> T:
        """What the work returns, done in one transaction; `otherwise` where the file cannot be used."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with closing(sqlite3.connect(self.path, timeout=_PATIENCE)) as database:
                database.execute("PRAGMA journal_mode = WAL")
                database.execute("PRAGMA synchronous = NORMAL")
                with database:
                    database.execute(_SCHEMA)
                    return work(database)
        except sqlite3.OperationalError as problem:
            if purpose == "read" and problem.sqlite_errorcode & 0xFF in _NO_WRITING:
                raise _Unwritable(str(problem)) from None
            self._warn(f"features are not cached: cannot {purpose} {self.path} ({problem}); set PROTOFED_CACHE")
        except sqlite3.DatabaseError as problem:
            self._warn(f"{self.path} is damaged ({problem}); it is removed, and features will be recomputed")
            self._remove()
        except OSError as problem:
            self._warn(f"features are not cached: {self.path.parent}: {problem.strerror}; set PROTOFED_CACHE")
        return otherwise

    def _remove(self) -> None:
        for path in self.path.parent.glob(f"{_FILE}*"):
            path.unlink(missing_ok=True)

    def _warn(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            log.warning("%s", text)


def _parts(images: Sequence[bytes]) -> Iterator[Sequence[bytes]]:
    """Batches small enough for one query."""
    for start in range(0, len(images), _AT_ONCE):
        yield images[start : start + _AT_ONCE]


def _with_checksum(feature: Tensor) -> bytes:
    content = feature.detach().cpu().to(_DTYPE).contiguous().numpy().tobytes()
    return blake2b(content, digest_size=_CHECKSUM).digest() + content


def _is_intact(value: bytes) -> bool:
    return value[:_CHECKSUM] == blake2b(value[_CHECKSUM:], digest_size=_CHECKSUM).digest()

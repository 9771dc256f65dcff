"""A look at every image file: content hash, thumbnail, brightness; kept in an index, so that a second look is quick.

The index lies in the cache folder, a file for every folder that was looked at. A line of it holds as long as path,
size, time of change and inode of its file do. It holds no tags of DICOM files, which are read each time.
"""

import json
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from hashlib import blake2b
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from protofed.data.decoding import BadImage, ImageHeader, Picture, decode, decoder_warnings, headers_of
from protofed.data.images import LUMINANCE
from protofed.data.problems import Problem
from protofed.system import CAN_FORK, cache_folder, cores

THUMBNAIL = (8, 9)
"""Height and width; differences of neighbours in a row are the 64 bits of a perceptual hash."""

_CHUNK = 250
_WORTH_PROCESSES = 2000
_VERSION = 1
_PASSING = ("changed", "no-permission")
"""Problems that may be gone the next time, though the file is the same."""
_COLUMNS = "path, size, changed, inode, digest, thumbnail, mean, std, peak, headers, problem"

Progress = Callable[[int, int], None]
"""Told how many of how many files were looked at."""


class Look(NamedTuple):
    """What one file looks like; of a file with pages its first one."""

    digest: bytes
    thumbnail: bytes
    mean: float
    std: float
    peak: float
    """The largest value."""
    headers: str
    """What every page is, as JSON."""
    problem: str = ""
    """Why it cannot be read, as JSON."""

    def told(self, path: str) -> list[ImageHeader] | Problem:
        """Its pages, or why it cannot be read."""
        return Problem(**{**json.loads(self.problem), "file": path}) if self.problem else _parsed(self.headers)


def look_at(path: Path) -> Look:
    """Read a file once, all of it."""
    digest = b""
    try:
        digest = blake2b(path.read_bytes(), digest_size=16).digest()
        header, values = decode(Picture(path))
        headers = [header] if header.pages == 1 else headers_of(path)
    except (BadImage, OSError) as bad:
        problem = bad.problem if isinstance(bad, BadImage) else _unreadable(path)
        kept = {key: value for key, value in asdict(problem).items() if key not in ("file", "files")}
        return Look(
            digest, b"", 0.0, 0.0, 0.0, "[]", json.dumps({**kept, "text": problem.text.replace(str(path), "it")})
        )
    thumbnail, mean, std, peak = look_of(values)
    kept_headers = [{**asdict(each), "person": ""} for each in headers]
    return Look(digest, thumbnail, mean, std, peak, json.dumps(kept_headers))


def look_of(values: NDArray[Any]) -> tuple[bytes, float, float, float]:
    """Thumbnail, mean, deviation and peak of pixels [C, H, W]; deep ones are brought to 8 bits by their own peak."""
    peak = float(values.max())
    weights = np.array(LUMINANCE, dtype=np.float32)
    grey: NDArray[Any] = values[0] if len(values) == 1 else np.tensordot(weights, values, 1)
    if values.dtype != np.uint8:
        grey = grey * (255 / max(peak, 1e-12))
    picture = Image.fromarray(np.asarray(grey, dtype=np.uint8))
    height, width = THUMBNAIL
    small = picture.resize((width, height), Image.Resampling.BOX)
    return small.tobytes(), float(grey.mean()), float(grey.std()), peak


class LookIndex:
    """Looks at the files of one folder, remembered from time to time; without a place to write to it forgets them."""

    def __init__(self, place: Path) -> None:
        name = blake2b(str(place.resolve()).encode("utf-8", "surrogateescape"), digest_size=12).hexdigest()
        self._path = cache_folder() / "looks" / f"{name}.{_VERSION}.sqlite"

    def looks(self, paths: Sequence[str], tell: Progress | None = None) -> list[Look]:
        """Of every file, in order; only what is new or has changed is read."""
        states = [_state(path) for path in paths]
        known = self._known()
        missing = [
            number
            for number, (path, state) in enumerate(zip(paths, states, strict=True))
            if state is None or known.get(path, (None,))[0] != state
        ]
        new: dict[int, Look] = {}
        if tell is not None:
            tell(len(paths) - len(missing), len(paths))
        for numbers, found in _read_all(paths, missing):
            new |= dict(zip(numbers, found, strict=True))
            if tell is not None:
                tell(len(paths) - len(missing) + len(new), len(paths))
        self._remember((paths[number], states[number], look) for number, look in new.items())
        return [new[number] if number in new else known[path][1] for number, path in enumerate(paths)]

    def _known(self) -> dict[str, tuple[tuple[int, int, int], Look]]:
        if not self._path.exists():
            return {}
        with suppress(sqlite3.Error):
            connection = sqlite3.connect(self._path)
            try:
                rows = connection.execute(f"select {_COLUMNS} from looks")
                return {row[0]: (row[1:4], Look._make(row[4:])) for row in rows}
            finally:
                connection.close()
        return {}

    def _remember(self, new: Iterable[tuple[str, tuple[int, int, int] | None, Look]]) -> None:
        rows = [
            (path, *state, *look)
            for path, state, look in new
            if state is not None and not any(kind in look.problem for kind in _PASSING)
        ]
        if not rows:
            return
        # An index is a convenience: a full disk or a cache of others is no reason to fail.
        with suppress(sqlite3.Error, OSError, UnicodeEncodeError):
            self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            connection = sqlite3.connect(self._path)
            try:
                with connection:
                    connection.execute(f"create table if not exists looks ({_COLUMNS}, primary key (path))")
                    connection.executemany(f"insert or replace into looks values ({','.join('?' * 11)})", rows)
            finally:
                connection.close()


def _read_all(paths: Sequence[str], numbers: Sequence[int]) -> Iterator[tuple[Sequence[int], list[Look]]]:
    """Looks at these files, some at a time, on all cores where they are many."""
    chunks = [numbers[start : start + _CHUNK] for start in range(0, len(numbers), _CHUNK)]
    work = [[paths[number] for number in chunk] for chunk in chunks]
    if len(numbers) < _WORTH_PROCESSES or cores() == 1 or not CAN_FORK:
        yield from zip(chunks, map(_look_at_some, work), strict=True)
        return
    # Small files cost more of Python than of decoders, which threads would have to share.
    with ProcessPoolExecutor(cores(), mp_context=get_context("fork")) as pool:
        yield from zip(chunks, pool.map(_look_at_some, work), strict=True)


def _look_at_some(paths: Sequence[str]) -> list[Look]:
    with decoder_warnings():
        return [look_at(Path(path)) for path in paths]


def _state(path: str) -> tuple[int, int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns, status.st_ino


def _unreadable(path: Path) -> Problem:
    """Why a file cannot even be opened."""
    try:
        headers_of(path)
    except BadImage as bad:
        return bad.problem
    raise OSError(f"{path} cannot be read")


@cache
def _parsed(headers: str) -> list[ImageHeader]:
    """Most files of a folder are alike, so their texts are."""
    return [ImageHeader(**{**each, "size": tuple(each["size"])}) for each in json.loads(headers)]

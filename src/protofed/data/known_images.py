"""Image files whose pixels are known from an earlier run, so that they need not be decoded to be recognised.

A file is known by a hash of its bytes and of how it is read; kept is a hash of the pixels that came of it. What is kept
is a plain file of entries of one length, to which any process may append. A damaged entry counts as missing, and
whatever is wrong with the file, images are decoded as if there were none.
"""

import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path

import PIL

from protofed.data.decoding import Picture
from protofed.system import cache_folder

DIGEST = 16
"""Bytes of a hash."""

_FILE = "known-images.bin"
_READING = 1
"""To be raised when other pixels are made of the same file."""
_CHECK = 4
_ENTRY = 2 * DIGEST + _CHECK
_LIMIT = 64 * 2**20
"""Bytes that are kept; beyond them it begins anew."""


class KnownImages:
    """Hashes of pixels by the marks of files. It never raises: an unusable file behaves like an empty one."""

    def __init__(self, folder: Path | None = None) -> None:
        self.path = (folder or cache_folder()) / _FILE

    def read(self, marks: Iterable[bytes]) -> dict[bytes, bytes]:
        """The hashes that are kept for these marks."""
        wanted = set(marks)
        try:
            content = self.path.read_bytes()
        except OSError:
            return {}
        found: dict[bytes, bytes] = {}
        for start in range(0, len(content) - _ENTRY + 1, _ENTRY):
            mark = content[start : start + DIGEST]
            if mark in wanted:
                digest = content[start + DIGEST : start + 2 * DIGEST]
                if _entry(mark, digest) == content[start : start + _ENTRY]:
                    found[mark] = digest
        return found

    def write(self, digests: Mapping[bytes, bytes]) -> None:
        """Keep hashes for the next run."""
        if not digests:
            return
        entries = b"".join(_entry(mark, digest) for mark, digest in digests.items())
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            size = self.path.stat().st_size if self.path.exists() else 0
            if size % _ENTRY or size + len(entries) > _LIMIT:
                self.path.unlink()
            # One call, so that entries of several processes do not mix.
            target = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                os.write(target, entries)
            finally:
                os.close(target)
        except OSError:
            return


def file_mark(picture: Picture, reading: Sequence[object]) -> bytes:
    """A hash of all that the pixels of a picture follow from: the bytes of its file, its page, and how it is read."""
    about = repr((_READING, picture.page, *reading, PIL.__version__))
    digest = blake2b(about.encode(), digest_size=DIGEST)
    digest.update(picture.path.read_bytes())
    return digest.digest()


def _entry(mark: bytes, digest: bytes) -> bytes:
    return mark + digest + zlib.crc32(mark + digest).to_bytes(_CHECK, "little")

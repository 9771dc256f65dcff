"""Memory that a process shares with those it forks: bytes are written once, and read by whoever needs them."""

import mmap
import os


class SharedBuffer:
    """Anonymous shared memory, as long as what was last written; made before the fork, gone with its last process."""

    def __init__(self) -> None:
        self._file = os.memfd_create("protofed")

    def write(self, blob: bytes) -> None:
        """Replace what is written. Whoever reads must have done so."""
        os.ftruncate(self._file, len(blob))
        if blob:
            with mmap.mmap(self._file, len(blob)) as view:
                view[:] = blob

    def read(self) -> bytes:
        """What is written."""
        if os.fstat(self._file).st_size == 0:
            return b""
        with mmap.mmap(self._file, 0, access=mmap.ACCESS_READ) as view:
            return view[:]

    def close(self) -> None:
        """Give the memory back, once everybody else has."""
        os.close(self._file)

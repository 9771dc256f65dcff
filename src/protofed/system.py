"""This machine: its cores and memory, processes that end together, files that are whole or absent, caches, locks."""

import ctypes
import errno
import fcntl
import gc
import os
import platform
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from math import prod
from pathlib import Path
from typing import IO

import torch

from protofed.errors import InUse, UserError

CAN_FORK = sys.platform == "linux"

_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of Linux
_CGROUP = Path("/sys/fs/cgroup")
_LARGEST_READ = 16 * 2**30

# From glibc's malloc.h: how much is kept at the top of the heap, and from which size on a block is its own mapping.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_KEPT, _LARGE = 512 * 2**20, 128 * 2**20


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def describe_machine() -> str:
    """Processor, cores and memory, for those who read a measurement."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{_processor()}, {cores()} core{'s' if cores() != 1 else ''}, {memory:.0f} GiB"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


@contextmanager
def one_thread() -> Iterator[None]:
    """Inside: one torch thread, so that results do not depend on how many cores a machine has."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Inside: hundreds of thousands of small objects are made that all stay, and are not looked through again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def die_with_parent() -> None:
    """Ask the kernel to kill this process with its parent, so that no worker outlives a killed run."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL)


def available_memory() -> int | None:
    """Bytes still free on this machine or in the container this runs in; None where neither is reported."""
    known = [count for count in (_free_on_machine(), _free_in_container()) if count is not None]
    return min(known) if known else None


def require_memory(needed: float, what: str, remedy: str) -> None:
    """Raise a UserError where `needed` bytes are more than are free."""
    free = available_memory()
    if free is not None and needed > free:
        raise UserError(
            f"{what} needs about {needed / 1e9:.1f} GB of memory, but only {free / 1e9:.1f} GB are free; {remedy}"
        )


def _largest_read() -> int:
    """How many bytes a single file may ask for: half of the machine's memory, at most 16 GiB."""
    return min(_LARGEST_READ, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2)


def check_array_size(path: Path | str, shape: tuple[int, ...], item: int = 1, what: str = "an array") -> int:
    """The bytes of an array that a file announces, whose items take `item` bytes; raises where they are too many."""
    size = prod(shape) * item
    if min(shape, default=0) < 0 or size > _largest_read():
        dimensions = "x".join(map(str, shape))
        raise UserError(
            f"{path} needs {what} of {dimensions}, {size / 2**30:.1f} GiB; the limit on this machine is "
            f"{_largest_read() / 2**30:.1f} GiB"
        )
    return size


@cache
def keep_freed_memory() -> None:
    """Let this process use the memory of one training step again in the next, up to half a GiB of it.

    Otherwise the C library returns every large activation to the system, which hands it out again page by page, each of
    them zeroed: a tenth of the time of a step. Only blocks of 128 MiB and more still go back at once. Where the C
    library has no such setting, nothing happens.
    """
    adjust = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if adjust is not None:
        adjust(_MMAP_THRESHOLD, _LARGE)
        adjust(_TRIM_THRESHOLD, _KEPT)


def cache_folder() -> Path:
    """PROTOFED_CACHE, or the user's cache folder."""
    named = os.environ.get("PROTOFED_CACHE")
    if named:
        return Path(named).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "protofed"


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that a reader sees all of it or nothing of it; a full disk leaves nothing behind."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        raise


_DISK_TROUBLE = {
    errno.ENOSPC: "make room",
    errno.EDQUOT: "free some space, or have your quota raised",
    errno.EFBIG: "choose a place for larger files",
    errno.EACCES: "choose a place you may write to and read from, or have its permissions changed",
    errno.EPERM: "choose a place you may write to and read from, or have its permissions changed",
    errno.EROFS: "choose a place that is writable",
    errno.EEXIST: "choose a path in which every parent is a folder",
    errno.ENOTDIR: "choose a path in which every parent is a folder",
    errno.EISDIR: "choose a file instead of a folder",
    errno.ENAMETOOLONG: "choose a shorter name",
    errno.EIO: "check the disk",
}


def disk_trouble(problem: OSError) -> str | None:
    """In one line, what the disk refuses and what to do about it; None where the error is of another kind."""
    if problem.errno not in _DISK_TROUBLE:
        return None
    where = f"{problem.filename}: " if problem.filename else ""
    text = str(problem.strerror)
    return f"{where}{text[:1].lower()}{text[1:]}; {_DISK_TROUBLE[problem.errno]}; finished work is kept"


def make_private(folder: Path) -> list[Path]:
    """Let nobody but this user into a folder and its files; what had been open to others before."""
    folder.mkdir(parents=True, exist_ok=True)
    opened = []
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink() and path.exists() and path.stat().st_mode & 0o077:
            try:
                path.chmod(0o700 if path.is_dir() else 0o600)
            except OSError:
                raise UserError(f"{path} is readable by others; run chmod -R go= {folder}") from None
            opened.append(path)
    return opened


class FileLock:
    """A lock that the kernel releases when its process dies; a process on a shared file system respects it too."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._handle: IO[str] | None = None

    def acquire(self, busy: str, *, wait: bool = False, note: str = "") -> None:
        """Take the lock and leave a note in its file; without `wait`, InUse with the text `busy` where it is taken."""
        # Not emptied before it is ours: the note names the process that holds it.
        handle = self._path.open("a")
        try:
            fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            handle.close()
            raise InUse(busy) from None
        handle.truncate(0)
        handle.write(note)
        handle.flush()
        self._handle = handle
        _held_locks.add(handle)

    def release(self) -> None:
        """Let other processes in; harmless where the lock is not held."""
        if self._handle is not None:
            _held_locks.discard(self._handle)
            self._handle.truncate(0)
            self._handle.close()
            self._handle = None


_held_locks: set[IO[str]] = set()


def _drop_locks_in_child() -> None:
    """A forked worker must not keep its parent's lock alive after the parent was killed."""
    while _held_locks:
        _held_locks.pop().close()


os.register_at_fork(after_in_child=_drop_locks_in_child)


def _free_on_machine() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    entries = dict(line.split(":", 1) for line in lines)
    return int(entries["MemAvailable"].split()[0]) * 1024 if "MemAvailable" in entries else None


def _free_in_container() -> int | None:
    try:
        limit, used = ((_CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
    except OSError:
        return None
    return None if limit == "max" else max(0, int(limit) - int(used))

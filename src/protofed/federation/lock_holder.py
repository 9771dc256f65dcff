"""Who is at work in a run folder.

What its lock file says is a claim: whoever can write the file could write any process into it. So nobody is asked to
stop who does not hold the lock.
"""

import fcntl
import json
import multiprocessing
import os
import signal
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

LOCK = ".lock"

_PROCESSES = Path("/proc")


@dataclass(frozen=True)
class LockHolder:
    """A process at work in a run folder."""

    pid: int
    answers: int
    """The process to ask to stop: this one, or the comparison that started it."""
    host: str
    began: str
    """When the process to ask began, so that a later one with the same number is not taken for it."""

    @classmethod
    def here(cls) -> "LockHolder":
        """This process."""
        parent = multiprocessing.parent_process()
        answers = os.getpid() if parent is None or parent.pid is None else parent.pid
        return cls(os.getpid(), answers, socket.gethostname(), _began(answers))

    @classmethod
    def of(cls, folder: Path) -> "LockHolder | None":
        """The one in a run folder; None where no process of this machine and user is known to work in it."""
        try:
            holder = cls(**json.loads((folder / LOCK).read_text()))
        except (OSError, ValueError, TypeError, RecursionError):
            return None
        return holder if holder._is_true(folder / LOCK) else None

    def note(self) -> str:
        """What is written into the lock, for `of`."""
        return json.dumps(asdict(self))

    def stop(self) -> None:
        """Ask it to stop as a terminal would: finished rounds are kept and the run can be resumed."""
        os.kill(self.answers, signal.SIGTERM)

    def _is_true(self, lock: Path) -> bool:
        """Whether the process holds the lock, and whoever answers for it is itself or has started it."""
        if not all(type(number) is int and number > 1 for number in (self.pid, self.answers)):
            return False  # 0, 1 and negative numbers are no processes but groups of them
        if self.host != socket.gethostname() or not _is_locked(lock):
            return False
        if not _PROCESSES.is_dir():
            return self.answers == self.pid and _lives(self.pid)
        started_it = self.answers == self.pid or self.answers in _ancestors(self.pid)
        return started_it and bool(self.began) and _began(self.answers) == self.began and _has_open(self.pid, lock)


def _is_locked(lock: Path) -> bool:
    try:
        with lock.open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _has_open(pid: int, lock: Path) -> bool:
    """Whether a process of this user has the file open; of others' nobody tells."""
    try:
        return any(link.exists() and link.samefile(lock) for link in (_PROCESSES / str(pid) / "fd").iterdir())
    except OSError:
        return False


def _ancestors(pid: int) -> list[int]:
    found: list[int] = []
    while pid > 1:
        entries = _stat(pid)
        pid = int(entries[1]) if entries else 0
        found.append(pid)
    return found


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _began(pid: int) -> str:
    """Clock ticks from boot to the start of a process, where the system tells."""
    entries = _stat(pid)
    return entries[19] if entries else ""


def _stat(pid: int) -> list[str]:
    """What the system tells of a process after its name: state, parent, ..., and as the 20th when it began."""
    try:
        return (_PROCESSES / str(pid) / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []

"""Which process holds the lock of a run folder."""

import json
import multiprocessing
import os
import signal
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

LOCK = ".lock"


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
        """The one in a run folder; None where nobody of this machine is at work in it."""
        try:
            worker = cls(**json.loads((folder / LOCK).read_text()))
        except (OSError, ValueError, TypeError):
            return None
        same_machine = worker.host == socket.gethostname()
        return worker if same_machine and _lives(worker.pid) and _began(worker.answers) == worker.began else None

    def note(self) -> str:
        """What is written into the lock, for `of`."""
        return json.dumps(asdict(self))

    def stop(self) -> None:
        """Ask it to stop as a terminal would: finished rounds are kept and the run can be resumed."""
        os.kill(self.answers, signal.SIGTERM)


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
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""

"""Flower's programs as children of ours: started quietly, watched, and ended with us."""

import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from protofed.engines.flower import prepare_flower
from protofed.errors import UserError
from protofed.system import die_with_parent

_TERMINATION_SECONDS = 10.0
_LAST_LINES = 12


class Program:
    """A running program whose output goes to a log file."""

    def __init__(self, command: Sequence[str], log: Path, home: Path) -> None:
        prepare_flower()
        log.parent.mkdir(parents=True, exist_ok=True)
        home.mkdir(parents=True, exist_ok=True)
        self._log = log
        with log.open("ab") as out:
            self._begin = out.tell()
            # Its own session, so that Ctrl-C reaches us first and we end it when we are done.
            self._process = subprocess.Popen(
                command,
                stdout=out,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, "FLWR_HOME": str(home.resolve())},
                preexec_fn=_begin,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    @property
    def ended(self) -> bool:
        """Whether it has come to an end by itself."""
        return self._process.poll() is not None

    def last_lines(self) -> str:
        """The end of its log, in one line."""
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return " | ".join(lines[-_LAST_LINES:])

    def count_in_log(self, text: str) -> int:
        """How often its log has this text since it was started."""
        with self._log.open("rb") as file:
            file.seek(self._begin)
            return file.read().count(text.encode())

    def kill(self) -> None:
        """End it at once, without a word to anybody."""
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        """End it, gently first."""
        if not self.ended:
            self._process.terminate()
            try:
                self._process.wait(_TERMINATION_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
        self._process.wait()


def _begin() -> None:
    """In the child, before its program starts: it ends with us, and nobody else reads what it writes."""
    os.umask(0o077)
    die_with_parent()


def flower_program(module: ModuleType) -> list[str]:
    """The command of a program of ours around one of Flower's, by its file.

    With `-m` Python would import protofed, and with it PyTorch, into a process that only carries messages. `-P` keeps
    the folder of the file off the path, where our `site` would hide Python's own.
    """
    return [sys.executable, "-P", str(module.__file__)]


def new_secret(path: Path) -> bytes:
    """A secret that only this user can read, made afresh."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    secret = secrets.token_hex(32).encode()
    path.touch(mode=0o600)
    path.chmod(0o600)
    path.write_bytes(secret)
    return secret


def free_port() -> int:
    """A free port of this machine."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_for(program: Program, host: str, port: int, seconds: float, what: str) -> None:
    """Until it listens at the port; where it ends instead, the end of its log is the reason."""
    deadline = time.monotonic() + seconds
    while not is_listening(host, port):
        if program.ended:
            raise UserError(f"{what} does not start: {program.last_lines()}")
        if time.monotonic() > deadline:
            raise UserError(f"{what} does not answer after {seconds:g} s: {program.last_lines()}")
        time.sleep(0.1)


def is_listening(host: str, port: int) -> bool:
    """Whether something answers at a port."""
    try:
        socket.create_connection((host, port), timeout=1).close()
    except OSError:
        return False
    return True

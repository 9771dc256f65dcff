"""The site's end of Flower: its SuperNode, and this process as the one that does what the node is asked.

Flower would start a new process for every message, with the code that comes with it. Here the node only carries
messages. What is done with them is the protofed installed at the site, in one process that keeps model and images.
"""

import logging
import time
from collections.abc import Callable
from pathlib import Path

from protofed.deploy import flower, supernode
from protofed.deploy.keys import SiteKeys
from protofed.deploy.programs import Program, flower_program, free_port, new_secret, wait_for
from protofed.deploy.supernode import pause_after
from protofed.errors import UserError
from protofed.system import FileLock

log = logging.getLogger("protofed")

_START_SECONDS = 120.0
_PAUSE = 0.1
_LONGEST_PAUSE = 0.5
_RESTARTS = 3
"""How often a node that ended is started again before its end is taken for an answer."""
_RESTART_PAUSE = 5.0
_LAST_ANSWER_SECONDS = 60.0
_MOST_AHEAD, _MOST_BEHIND = 5.0, 300.0
"""Seconds that Flower 1.41 lets a site's clock be off."""

Answer = Callable[[bytes], bytes]
"""What to reply to an envelope."""


class SuperNode:
    """A running SuperNode."""

    def __init__(self, keys: SiteKeys, state: Path) -> None:
        self._keys = keys
        self._address = ""
        self._answers = 0
        self._state = state
        self._program: Program | None = None
        self._lock = FileLock(state / ".lock")

    def start(self) -> None:
        """Start the SuperNode; it tries to reach the server until it does."""
        if self._program is None:
            self._lock.acquire(f"a site is already running with the state in {self._state}; stop it first")
        port = free_port()
        self._answers = 0
        self._address = f"127.0.0.1:{port}"
        self._secret = new_secret(self._state / "secret")
        command = flower_program(supernode)
        command += ["--superlink", self._keys.server, "--host", "127.0.0.1", "--port", str(port)]
        command += ["--root-certificates", str(self._keys.authority.resolve())]
        command += ["--auth-supernode-private-key", str(self._keys.private.resolve())]
        command += ["--isolation", "process", "--superexec-auth-secret-file", str((self._state / "secret").resolve())]
        problem = clock_problem(self._keys)
        if problem is not None:
            log.warning("the server will refuse this site: %s", problem)
        self._program = Program(command, self._state / "supernode.log", self._state)
        wait_for(self._program, "127.0.0.1", port, _START_SECONDS, "Flower's SuperNode")

    def serve(self, answer: Answer, over: Callable[[], bool]) -> None:
        """Answer what comes, until it is over."""
        assert self._program is not None, "start comes first"
        client, restarts, last = self._connect(), 0, time.monotonic()
        try:
            while not over():
                if self._program.ended:
                    restarts += 1
                    client.close()
                    self._restart(restarts)
                    client = self._connect()
                asked = time.monotonic()
                token = self._next_task(client)
                if token is None:  # as a rule after two seconds, in which the node has waited for a message
                    pause = pause_after(time.monotonic() - last, _LONGEST_PAUSE)
                    time.sleep(max(pause - (time.monotonic() - asked), 0.0))
                else:
                    restarts = 0
                    self._do_task(token, answer)
                    last = time.monotonic()
            self._wait_for_last_answer()
        finally:
            client.close()

    def end(self) -> None:
        """End the SuperNode."""
        if self._program is not None:
            self._program.end()
        self._lock.release()

    def _connect(self) -> "flower.RuntimeHttpClient":
        return flower.runtime_client(self._address, self._secret, None)

    def _restart(self, restarts: int) -> None:
        """Start a node again that has ended: the server may just be starting, and not know its sites yet."""
        assert self._program is not None
        last_lines = self._program.last_lines()
        if restarts > _RESTARTS:
            refused = flower.NOT_ACTIVATED in last_lines
            reason = "it does not know this site's key (any longer)" if refused else last_lines
            reason = clock_problem(self._keys) or reason
            raise UserError(f"the server at {self._keys.server} no longer admits {self._keys.name}: {reason}")
        time.sleep(_RESTART_PAUSE)
        self.start()

    @staticmethod
    def _next_task(client: "flower.RuntimeHttpClient") -> str | None:
        try:
            return flower.acquire_task(client, "client")
        except ConnectionError:
            return None  # where the node has ended, the next look at it says why

    def _do_task(self, token: str, answer: Answer) -> None:
        try:
            flower.answer_as_client_app(self._address, token, answer)
            self._answers += 1
        except Exception as error:  # too late for the round, or the run was stopped: the next one counts
            log.warning("an answer could not be delivered (%s)", type(error).__name__)

    def _wait_for_last_answer(self) -> None:
        """Wait until the node has sent the last answer, or has had time enough, and end it."""
        assert self._program is not None
        deadline = time.monotonic() + _LAST_ANSWER_SECONDS
        while self._program.count_in_log(flower.ANSWER_SENT) < self._answers and time.monotonic() < deadline:
            time.sleep(_PAUSE)
        # A node that takes its leave counts as gone at once, and Flower 1.41.0 then keeps back what it has answered.
        self._program.kill()


def clock_problem(keys: SiteKeys) -> str | None:
    """What is wrong with this machine's clock, as far as the server tells; Flower only says that a site is refused."""
    skew = flower.clock_skew(keys.server, keys.authority.read_bytes())
    if skew is None or -_MOST_BEHIND < skew < _MOST_AHEAD:
        return None
    way = "ahead of" if skew > 0 else "behind"
    return (
        f"this machine's clock is {abs(skew):.0f} s {way} the server's; synchronise both by NTP (timedatectl "
        "set-ntp true)"
    )

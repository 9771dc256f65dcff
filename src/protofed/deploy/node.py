"""The site's end of Flower: its SuperNode, and this process as the one that does what the node is asked.

Flower would start a new process for every message, with the code that comes with it. Here the node only carries
messages. What is done with them is the protofed installed at the site, in one process that keeps model and images.
"""

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from protofed.deploy import supernode
from protofed.deploy.keys import SiteKeys
from protofed.deploy.link import runtime_client
from protofed.deploy.programs import Program, Ready, flower_program, free_port, new_secret, wait_for
from protofed.deploy.supernode import pause_after
from protofed.engines.grid import packed, unpacked
from protofed.errors import UserError

log = logging.getLogger("protofed")

_START_SECONDS = 120.0
_PAUSE = 0.1
_LONGEST_PAUSE = 0.5
_COMEBACKS = 3
"""How often a node that ended is started again before its end is taken for an answer."""
_COMEBACK_PAUSE = 5.0

_SENT = "Sent successfully"
_LAST_ANSWER_SECONDS = 60.0
_NOT_ACTIVATED = "Failed to activate SuperNode"
"""What Flower says where a key is not registered."""

Answer = Callable[[bytes], bytes]
"""What to reply to an envelope."""


class SiteNode:
    """A running SuperNode."""

    def __init__(self, keys: SiteKeys, state: Path) -> None:
        self._keys = keys
        self._address = ""
        self._answers = 0
        self._state = state
        self._program: Program | None = None

    def start(self) -> None:
        """Start the SuperNode; it tries to reach the server until it does."""
        port = free_port()
        self._answers = 0
        self._address = f"127.0.0.1:{port}"
        self._secret = new_secret(self._state / "secret")
        command = flower_program(supernode)
        command += ["--superlink", self._keys.server, "--host", "127.0.0.1", "--port", str(port)]
        command += ["--root-certificates", str(self._keys.authority.resolve())]
        command += ["--auth-supernode-private-key", str(self._keys.private.resolve())]
        command += ["--isolation", "process", "--superexec-auth-secret-file", str((self._state / "secret").resolve())]
        self._program = Program(command, self._state / "supernode.log", self._state)
        wait_for(self._program, Ready("127.0.0.1", port), _START_SECONDS, "Flower's SuperNode")

    def serve(self, answer: Answer, over: Callable[[], bool]) -> None:
        """Answer what comes, until it is over."""
        assert self._program is not None, "start comes first"
        client, comebacks, last = runtime_client(self._address, self._secret, None), 0, time.monotonic()
        try:
            while not over():
                if self._program.ended:
                    comebacks += 1
                    client.close()
                    self._come_back(comebacks)
                    client = runtime_client(self._address, self._secret, None)
                token = self._next(client)
                if token is None:
                    time.sleep(pause_after(time.monotonic() - last, _LONGEST_PAUSE))
                else:
                    comebacks = 0
                    try:
                        self._do(token, answer)
                    except Exception as error:  # too late for the round, or the run was stopped: the next one counts
                        log.warning("an answer did not get through (%s)", type(error).__name__)
                    last = time.monotonic()
            self._let_go()
        finally:
            client.close()

    def _come_back(self, comebacks: int) -> None:
        """Start a node again that has ended: the server may just be starting, and not know its sites yet."""
        assert self._program is not None
        words = self._program.last_words()
        if comebacks > _COMEBACKS:
            refused = _NOT_ACTIVATED in words
            reason = "it does not know this site's key (any more)" if refused else words
            raise UserError(f"the server at {self._keys.server} lets {self._keys.name} in no longer: {reason}")
        time.sleep(_COMEBACK_PAUSE)
        self.start()

    def end(self) -> None:
        """End the SuperNode."""
        if self._program is not None:
            self._program.end()

    def _next(self, client: Any) -> str | None:
        import httpx
        from flwr.proto.runtime_pb2 import AcquireTaskRequest
        from flwr.supercore.constant import TaskType

        try:
            answer = client.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP]))
        except httpx.HTTPError:
            return None  # where the node has ended, the next look at it says why
        return answer.token if answer.HasField("task") and answer.token else None

    def _do(self, token: str, answer: Answer) -> None:
        from flwr.app import Message
        from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
        from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor, RuntimeVersionHttpInterceptor
        from flwr.supercore.runtime import RuntimeHttpClient
        from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

        client = RuntimeHttpClient.from_server_address(
            self._address,
            insecure=True,
            root_certificates=None,
            interceptors=[
                RuntimeVersionHttpInterceptor(component_name="flwr-clientapp"),
                RuntimeTokenHttpInterceptor(token),
            ],
        )
        heart = HeartbeatSender(make_task_heartbeat_fn_http(client))
        heart.start()
        try:
            message, context, _, _ = pull_task_input(client)
            reply = Message(packed(answer(unpacked(message, "server"))), reply_to=message)
            push_message(client, reply, context)
            push_task_output(client, context, "completed", "")
            self._answers += 1
        finally:
            heart.stop()
            client.close()

    def _let_go(self) -> None:
        """Wait until the node has sent the last answer, or has had time enough."""
        assert self._program is not None
        deadline = time.monotonic() + _LAST_ANSWER_SECONDS
        while self._program.said(_SENT) < self._answers and time.monotonic() < deadline:
            time.sleep(_PAUSE)

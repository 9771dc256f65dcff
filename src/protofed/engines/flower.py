"""Jobs and results as Flower messages, and the engine that sends them to the nodes of Flower's simulation.

A job or a result is an envelope of bytes: one in a message, one in its reply. `send_and_receive` carries
envelopes over any Flower grid, that of the simulation here or that of a deployment; a node that does not answer in
time has failed. Flower is optional, so it is imported only where it is used.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from queue import Empty, Queue
from typing import TYPE_CHECKING, Any

import torch

from protofed.clients import (
    ClientSide,
    Failed,
    Job,
    Predict,
    Result,
    Train,
    TrainGroup,
    decode_job,
    decode_result,
    encode_job,
    encode_result,
)
from protofed.errors import BadMessage, missing_extra
from protofed.records import Message

if TYPE_CHECKING:
    from flwr.app import Context, RecordDict
    from flwr.app import Message as FlowerMessage
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid

Recipe = Callable[[], ClientSide]
"""How a process that shares nothing with this one comes by the client side; small, hashable, and pickled by name."""
Pause = Callable[[float], float]
"""How long to wait before asking for replies again, by the seconds since the messages were sent."""

_ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""No telemetry, no check for updates, and nothing is installed behind the user's back."""

_RECORD, _ENVELOPE = "protofed", "envelope"
_LARGEST_WHOLE = 64 * 2**20
_EXPIRED = (3, 4)
"""Of Flower 1.41's ErrorCode: a message or a reply that has outlived its time, or never came to an end."""
_NODE_GONE = 5
"""Of the same: a node whose heartbeats have ended. Renumbered, only the reasons in `events` are wrong."""
_POLLERS = 8
"""With more waiting than so many, each asks less often."""
_GRACE = 0.05
_LOCALHOST = "127.0.0.1"
_SIMULATION_PAUSE = 0.02


def prepare_flower() -> None:
    """Call it before the first import of Flower in a process, and before one of its programs is started."""
    if find_spec("flwr") is None:
        raise missing_extra("this needs Flower, which is not installed", "flower")
    os.environ.update(_ENVIRONMENT)
    # Flower 1.41 sets the level when this module is first imported; should it move, the import fails here.
    import_module("flwr.supercore.logger")
    logging.getLogger("flwr").setLevel(logging.ERROR)


@dataclass(frozen=True)
class OutgoingMessage:
    """An envelope and the node it is for, in the words of Flower's Message."""

    node_id: int
    message_type: str
    """train, evaluate or query."""
    group_id: str
    """What Flower shows as the round."""
    envelope: bytes


def to_record_dict(envelope: bytes) -> "RecordDict":
    """An envelope as Flower carries it.

    Every object of a message is a request of its own, four times on its way. Bytes in a ConfigRecord make three
    objects, an array five and more; but only an array is cut into chunks, which what is very large needs.
    """
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    if len(envelope) <= _LARGEST_WHOLE:
        return RecordDict({_RECORD: ConfigRecord({_ENVELOPE: envelope})})
    array = Array(dtype="uint8", shape=(len(envelope),), stype="protofed", data=envelope)
    return RecordDict({_RECORD: ArrayRecord({_ENVELOPE: array})})


def envelope_in(message: "FlowerMessage", sender: str) -> bytes:
    """The envelope in a message."""
    try:
        content: Any = message.content[_RECORD][_ENVELOPE]
        return content if isinstance(content, bytes) else bytes(content.data)
    except (KeyError, TypeError, AttributeError):
        raise BadMessage(f"{sender}: the message holds no envelope") from None


def send_and_receive(
    grid: "Grid", messages: Sequence[OutgoingMessage], timeout: float | None, pause: Pause
) -> Iterator[tuple[int, bytes | Failed]]:
    """Send all, and yield replies as they come, each with the position of the message it answers, until time is up.

    Every message is answered once, by an envelope or by the reason why there is none. Flower's own `send_and_receive`
    returns only when all replies are there.
    """
    from flwr.app import Message as FlowerMessage

    waiting: dict[str, int] = {}
    for position, out in enumerate(messages):
        message = FlowerMessage(
            to_record_dict(out.envelope), out.node_id, out.message_type, ttl=timeout, group_id=out.group_id
        )
        # One by one: together they might exceed what the link takes in one request.
        sent = [message_id for message_id in grid.push_messages([message]) if message_id]
        if sent:
            waiting[sent[0]] = position
        else:
            yield position, Failed("it is not connected")
    if timeout is None:
        yield from _replies(grid, waiting, pause)
    else:
        yield from _replies_in_time(grid, waiting, pause, timeout)


def _replies(grid: "Grid", waiting: dict[str, int], pause: Pause) -> Iterator[tuple[int, bytes | Failed]]:
    begin = time.monotonic()
    while waiting:
        for reply in grid.pull_messages(list(waiting)):
            yield waiting.pop(reply.metadata.reply_to_message_id), _content(reply)
        if waiting:
            time.sleep(pause(time.monotonic() - begin))


def _replies_in_time(
    grid: "Grid", waiting: dict[str, int], pause: Pause, timeout: float
) -> Iterator[tuple[int, bytes | Failed]]:
    """One thread for each reply: Flower waits for hours for the rest of one whose sender died while sending it."""
    arrived: Queue[tuple[int, bytes | Failed]] = Queue()
    over, begin = threading.Event(), time.monotonic()

    def wait_for(message_id: str, position: int) -> None:
        while not over.is_set():
            asked = time.monotonic()
            try:
                replies = list(grid.pull_messages([message_id]))
            except Exception as error:
                arrived.put((position, Failed(f"its answer cannot be fetched ({type(error).__name__})")))
                return
            if replies:
                arrived.put((position, _content(replies[0])))
                return
            now = time.monotonic()
            # The SuperLink of a deployment holds the question for a while; that is part of the pause.
            over.wait(max(pause(now - begin) * max(1.0, len(waiting) / _POLLERS) - (now - asked), 0.0))

    for message_id, position in waiting.items():
        threading.Thread(target=wait_for, args=(message_id, position), daemon=True).start()
    missing, deadline = set(waiting.values()), begin + timeout
    try:
        while missing:
            position, answer = arrived.get(timeout=max(deadline - time.monotonic(), 0.0) + _GRACE)
            missing.discard(position)
            yield position, answer
    except Empty:
        for position in sorted(missing):
            yield position, Failed(f"it did not answer within {timeout:g} s")
    finally:
        over.set()


def _content(reply: "FlowerMessage") -> bytes | Failed:
    if reply.has_error():
        if reply.error.code in _EXPIRED:
            return Failed("its answer did not arrive in time, or was truncated")
        if reply.error.code == _NODE_GONE:
            return Failed("its node is gone: no recent heartbeat")
        return Failed(f"its node reports error {reply.error.code}: {reply.error.reason}")
    try:
        return envelope_in(reply, "reply")
    except BadMessage as error:
        return Failed(str(error))


class FlowerEngine:
    """Runs the simulation beside the federation, and passes jobs to its nodes."""

    name = "flower"
    scattered = False
    trains_groups = False

    def __init__(self, recipe: Recipe, clients: Sequence[str], workers: int) -> None:
        prepare_flower()
        self.workers = workers
        self._over = threading.Event()
        opened: Queue[Grid | BaseException] = Queue()
        self._simulation = threading.Thread(
            target=_simulate, args=(recipe, len(clients), workers, opened, self._over), name="flower-simulation"
        )
        self._simulation.start()
        try:
            self._grid, nodes = _opened(opened, len(clients))
        except BaseException:
            self.close()
            raise
        self._nodes = dict(zip(clients, nodes, strict=True))

    def perform(self, jobs: Sequence[tuple[Job, Message]]) -> Iterator[tuple[Job, Result]]:
        """The results as they come."""
        messages = [self._address(position, job, message) for position, (job, message) in enumerate(jobs)]
        for position, reply in send_and_receive(self._grid, messages, None, lambda _: _SIMULATION_PAUSE):
            job = jobs[position][0]
            yield job, reply if isinstance(reply, Failed) else _result(reply, job)

    def close(self) -> None:
        """End the simulation and its processes."""
        self._over.set()
        self._simulation.join()

    def _address(self, position: int, job: Job, message: Message) -> OutgoingMessage:
        """To the client's node; what no client owns goes to all nodes in turn."""
        assert not isinstance(job, TrainGroup), "every node has one client"
        client = None if isinstance(job, Predict) else job.client
        nodes = list(self._nodes.values())
        node_id = nodes[position % len(nodes)] if client is None else self._nodes[client]
        message_type = "train" if isinstance(job, Train) else "evaluate"
        return OutgoingMessage(node_id, message_type, str(job.round + 1), encode_job(job, message))


def _opened(opened: "Queue[Grid | BaseException]", wanted: int) -> tuple["Grid", list[int]]:
    """The grid and its nodes, which register after it."""
    grid = opened.get()
    while not isinstance(grid, BaseException):
        nodes = sorted(grid.get_node_ids())
        if len(nodes) == wanted:
            return grid, nodes
        with suppress(Empty):
            failure = opened.get(timeout=_SIMULATION_PAUSE)
            assert isinstance(failure, BaseException), "there is one grid"
            grid = failure
    raise RuntimeError(f"Flower's simulation does not start: {grid}") from grid


def _result(envelope: bytes, job: Job) -> Result:
    try:
        return decode_result(envelope, str(job))
    except BadMessage as error:
        return Failed(str(error))


def _simulate(
    recipe: Recipe, nodes: int, workers: int, opened: "Queue[Grid | BaseException]", over: threading.Event
) -> None:
    """Run the simulation: its server app only hands out the grid and waits for the end."""
    from flwr.serverapp import ServerApp
    from flwr.simulation import run_simulation

    app = ServerApp()

    @app.main()
    def main(grid: "Grid", context: "Context") -> None:  # noqa: ARG001 - Flower's signature
        opened.put(grid)
        over.wait()

    backend: dict[str, Any] = {
        "init_args": {
            "num_cpus": workers,
            "logging_level": logging.ERROR,
            "log_to_driver": False,
            "include_dashboard": False,
            "_node_ip_address": _LOCALHOST,
        },
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
    }
    try:
        run_simulation(app, client_app(recipe), nodes, backend_config=backend)
    except BaseException as error:
        opened.put(error)


def client_app(recipe: Recipe) -> "ClientApp":
    """A Flower app that performs jobs; its client side is made once in every process."""
    from flwr.app import Message as Reply
    from flwr.clientapp import ClientApp

    app = ClientApp()

    def perform(message: "FlowerMessage", context: "Context") -> "FlowerMessage":  # noqa: ARG001 - Flower's signature
        job, record = decode_job(envelope_in(message, "server"), "server")
        return Reply(to_record_dict(encode_result(_side(recipe).perform(job, record))), reply_to=message)

    app.train()(perform)
    app.evaluate()(perform)
    return app


@cache
def _side(recipe: Recipe) -> ClientSide:
    torch.set_num_threads(1)
    return recipe()

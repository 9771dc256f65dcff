"""Envelopes over Flower: one uint8 array in a message, one in its reply; who does not answer in time has failed."""

import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from queue import Empty, Queue
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from protofed.clients import Failed
from protofed.errors import BadMessage, UserError

if TYPE_CHECKING:
    from flwr.app import Message, RecordDict
    from flwr.serverapp import Grid

_ENVIRONMENT = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""Nobody is told that Flower runs here, and nothing is installed behind the user's back."""

_RECORD, _ARRAY = "protofed", "envelope"
_EXPIRED = (3, 4)
"""Flower's codes for a message or a reply that has outlived its time, or never came to an end."""
_NODE_GONE = 5
"""Flower's code for a node whose heartbeats have ended."""
_POLLERS = 8
"""With more waiting than so many, each asks less often."""
_GRACE = 0.05

Pause = Callable[[float], float]
"""How long to wait before the next look for replies, by the seconds since the parcels were sent."""


def prepare_flower() -> None:
    """Before the first import of Flower in a process, or the start of one of its programs."""
    if find_spec("flwr") is None:
        raise UserError("this needs Flower, which is not installed; pip install 'protofed[flower]'")
    os.environ.update(_ENVIRONMENT)
    import_module("flwr.supercore.logger")  # which sets the level when it is first imported
    logging.getLogger("flwr").setLevel(logging.ERROR)


@dataclass(frozen=True)
class Parcel:
    """An envelope and the node it is for."""

    node: int
    kind: str
    """Flower's type of message: train, evaluate or query."""
    group: str
    """What Flower shows as the round."""
    envelope: bytes


def packed(envelope: bytes) -> "RecordDict":
    """An envelope as Flower carries it."""
    from flwr.app import Array, ArrayRecord, RecordDict

    array = Array(dtype="uint8", shape=(len(envelope),), stype="protofed", data=envelope)
    return RecordDict({_RECORD: ArrayRecord({_ARRAY: array})})


def unpacked(message: "Message", sender: str) -> bytes:
    """The envelope in a message."""
    try:
        array: Any = message.content[_RECORD][_ARRAY]
        return bytes(array.data)
    except (KeyError, TypeError, AttributeError):
        raise BadMessage(f"{sender}: the message holds no envelope") from None


def exchange(
    grid: "Grid", parcels: Sequence[Parcel], timeout: float | None, pause: Pause
) -> Iterator[tuple[int, bytes | Failed]]:
    """Send all, and yield what comes back, with the position of the parcel it answers, until the time is up.

    Every parcel is answered once, by an envelope or by the reason why there is none.
    """
    from flwr.app import Message

    waiting: dict[str, int] = {}
    for position, parcel in enumerate(parcels):
        message = Message(packed(parcel.envelope), parcel.node, parcel.kind, ttl=timeout, group_id=parcel.group)
        # One by one: together they might exceed what the link takes in one request.
        sent = [identity for identity in grid.push_messages([message]) if identity]
        if sent:
            waiting[sent[0]] = position
        else:
            yield position, Failed("it is not connected")
    if timeout is None:
        yield from _pulled(grid, waiting, pause)
    else:
        yield from _pulled_in_time(grid, waiting, pause, timeout)


def _pulled(grid: "Grid", waiting: dict[str, int], pause: Pause) -> Iterator[tuple[int, bytes | Failed]]:
    begin = time.monotonic()
    while waiting:
        for reply in grid.pull_messages(list(waiting)):
            yield waiting.pop(reply.metadata.reply_to_message_id), _content(reply)
        if waiting:
            time.sleep(pause(time.monotonic() - begin))


def _pulled_in_time(
    grid: "Grid", waiting: dict[str, int], pause: Pause, timeout: float
) -> Iterator[tuple[int, bytes | Failed]]:
    """One thread for each reply: Flower waits for hours for the rest of one whose sender died while sending it."""
    come: Queue[tuple[int, bytes | Failed]] = Queue()
    over, begin = Event(), time.monotonic()

    def wait_for(identity: str, position: int) -> None:
        while not over.is_set():
            try:
                replies = list(grid.pull_messages([identity]))
            except Exception as error:
                come.put((position, Failed(f"its answer cannot be fetched ({type(error).__name__})")))
                return
            if replies:
                come.put((position, _content(replies[0])))
                return
            over.wait(pause(time.monotonic() - begin) * max(1.0, len(waiting) / _POLLERS))

    for identity, position in waiting.items():
        Thread(target=wait_for, args=(identity, position), daemon=True).start()
    missing, deadline = set(waiting.values()), begin + timeout
    try:
        while missing:
            position, answer = come.get(timeout=max(deadline - time.monotonic(), 0.0) + _GRACE)
            missing.discard(position)
            yield position, answer
    except Empty:
        for position in sorted(missing):
            yield position, Failed(f"it did not answer within {timeout:g} s")
    finally:
        over.set()


def _content(reply: "Message") -> bytes | Failed:
    if reply.has_error():
        if reply.error.code in _EXPIRED:
            return Failed("its answer did not come in time, or was cut off")
        if reply.error.code == _NODE_GONE:
            return Failed("its node is gone: no heartbeat has come for a while")
        return Failed(f"its node reports error {reply.error.code}: {reply.error.reason}")
    try:
        return unpacked(reply, "reply")
    except BadMessage as error:
        return Failed(str(error))

"""Flower's SuperNode with shorter waits, run as a separate program.

Flower's looks for messages every three seconds, for the answer to one every half second, and a part of a message that
is not there yet is asked for again after a second. A round is a few short exchanges, and would consist of waiting. Here
the node and the process that answers wake each other, and our SuperLink holds the question for messages. Where it does
not, the wait follows what is going on: a node that has just answered looks often, an idle one seldom.

It is run by its file and imports nothing of protofed, so that a process that only carries messages does not load
PyTorch. What it takes from Flower's inside is therefore here and not in deploy/flower.py: see `main`.

    python -P supernode.py [arguments of flower-supernode ...]
"""

import threading
import time
from collections.abc import Callable
from typing import Any

_SHORTEST, _LONGEST = 0.05, 3.0
_SHARE = 0.1
_HOLD_SECONDS = 2.0
"""So long the question for a task waits for one; far less than Flower's clients wait for an answer, 30 s."""
_HEARTBEAT_SECONDS = 10
"""Half of the time without heartbeats after which a node is gone; Flower's 30 lets a round wait for a minute. It is the
least that a SuperLink accepts, and a heartbeat is sent about every four seconds."""
_PULL = {"initial_backoff": 0.03, "backoff_cap": 2.0, "max_tries_per_object": 3600}
"""Seconds until a part of a message is asked for again, at first and at most, and how often: Flower's two hours."""


def pause_after(silence: float, longest: float = _LONGEST) -> float:
    """Seconds until the next poll: a message waits at most a tenth of the silence before it."""
    return min(max(_SHARE * silence, _SHORTEST), longest)


def poll_until_message(look: Callable[..., int | None], begin_answer: Callable[[], None]) -> Callable[..., int]:
    """The function that looks for a message, repeated until there is one, whose answer then begins.

    Our SuperLink holds the question until there is a message; what that has taken is no longer to be waited.
    """

    def poll(**arguments: Any) -> int:
        begin = asked = time.monotonic()
        while (run_id := look(**arguments)) is None:
            pause = pause_after(time.monotonic() - begin) - (time.monotonic() - asked)
            if pause > 0:
                time.sleep(pause)
            asked = time.monotonic()
        begin_answer()
        return run_id

    return poll


class AnswerInMaking:
    """Where the answer to a message is: the node's loop and the process that makes it wait here for each other.

    It also stands in for the module `time` where Flower sleeps while an answer is being made.
    """

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._message, self._answer = threading.Event(), threading.Event()

    def begin(self) -> None:
        """A message has come with all its parts, and is being answered from now on."""
        self._since = time.monotonic()
        self._answer.clear()
        self._message.set()

    def after_message(self, acquire: Callable[..., Any]) -> Callable[..., Any]:
        """The function that gives out a task, once there is a message to be answered, or after two seconds."""

        def acquire_later(*arguments: Any, **named: Any) -> Any:
            self._message.wait(_HOLD_SECONDS)
            self._message.clear()
            return acquire(*arguments, **named)

        return acquire_later

    def before_answer(self, push_output: Callable[..., Any]) -> Callable[..., Any]:
        """The function that ends a task, all parts of whose answer are there; who sleeps until then is woken."""

        def push(*arguments: Any, **named: Any) -> Any:
            response = push_output(*arguments, **named)
            self._answer.set()
            return response

        return push

    def sleep(self, seconds: float) -> None:
        """As long as was asked for, or shorter where the message has just come, or until the answer is there."""
        if self._answer.wait(pause_after(time.monotonic() - self._since, seconds)):
            self._answer.clear()

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


def pull_eagerly() -> None:
    """Ask for parts of messages that are not there yet again at once, and then ever more seldom.

    A message is announced before its parts are sent, so whoever looks often comes too early as a rule. Flower 1.41.0
    has no option for the second that it then waits; where its keyword is renamed, this ends in a KeyError.
    """
    from flwr.supercore.inflatable import inflatable_utils

    defaults = inflatable_utils.pull_objects.__kwdefaults__ or {}
    for name, value in _PULL.items():
        if name not in defaults:
            raise KeyError(f"Flower's pull_objects has no {name}")
        defaults[name] = value


def main() -> None:
    """Serve until ended.

    This is `flower-supernode` of Flower 1.41.0 with three functions, an interval and the clock of a module replaced,
    since Flower has no option for it. Where a function is renamed, the SuperNode does not start; where one of them or
    the clock is no longer used, rounds take seconds longer; where the interval is not, a killed site is noticed later.
    """
    from flwr.supercore import heartbeat
    from flwr.supernode import fleet_http_connection, start_client_internal
    from flwr.supernode.cli import flower_supernode
    from flwr.supernode.servicer.runtime import runtime_handlers

    pull_eagerly()
    for module in (heartbeat, fleet_http_connection):
        module.HEARTBEAT_DEFAULT_INTERVAL = _HEARTBEAT_SECONDS  # type: ignore[attr-defined]
    answer, look = AnswerInMaking(), start_client_internal._pull_and_store_message
    start_client_internal._pull_and_store_message = poll_until_message(look, answer.begin)
    start_client_internal.time = answer  # type: ignore[attr-defined, assignment]
    runtime_handlers.acquire_task = answer.after_message(runtime_handlers.acquire_task)
    runtime_handlers.push_task_output = answer.before_answer(runtime_handlers.push_task_output)
    flower_supernode()


if __name__ == "__main__":
    main()

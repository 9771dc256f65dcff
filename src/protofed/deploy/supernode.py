"""Flower's SuperNode with shorter waits, run as a separate program.

Flower's looks for messages every three seconds, for the answer to one every half second, and a part of a message that
is not there yet is asked for again after a second. A round is a few short exchanges, and would consist of waiting. Here
the wait follows what is going on: a node that has just answered looks often, an idle one seldom.

It is run by its file and imports nothing of protofed, so that a process that only carries messages does not load
PyTorch. What it takes from Flower's inside is therefore here and not in deploy/flower.py: see `main`.

    python -P supernode.py [arguments of flower-supernode ...]
"""

import time
from collections.abc import Callable
from typing import Any

_SHORTEST, _LONGEST = 0.05, 3.0
_SHARE = 0.1
_PULL = {"initial_backoff": 0.03, "backoff_cap": 2.0, "max_tries_per_object": 3600}
"""Seconds until a part of a message is asked for again, at first and at most, and how often: Flower's two hours."""


def pause_after(silence: float, longest: float = _LONGEST) -> float:
    """Seconds until the next poll: a message waits at most a tenth of the silence before it."""
    return min(max(_SHARE * silence, _SHORTEST), longest)


def poll_until_message(look: Callable[..., int | None], begin_answer: Callable[[], None]) -> Callable[..., int]:
    """The function that looks for a message, repeated until there is one, whose answer then begins."""

    def poll(**arguments: Any) -> int:
        begin = time.monotonic()
        while (run_id := look(**arguments)) is None:
            time.sleep(pause_after(time.monotonic() - begin))
        begin_answer()
        return run_id

    return poll


class ShortSleeps:
    """Stands in for the module `time` where Flower sleeps while an answer is being made."""

    def __init__(self) -> None:
        self._since = time.monotonic()

    def begin(self) -> None:
        """A message has come, and is being answered from now on."""
        self._since = time.monotonic()

    def sleep(self, seconds: float) -> None:
        """As long as was asked for, or shorter where the message has just come."""
        time.sleep(pause_after(time.monotonic() - self._since, seconds))

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

    This is `flower-supernode` of Flower 1.41.0 with a private function and the clock of its module replaced, since
    Flower has no option for it. Where the function is renamed, the SuperNode does not start; where it or the clock is
    no longer used, rounds take seconds longer.
    """
    from flwr.supernode import start_client_internal
    from flwr.supernode.cli import flower_supernode

    pull_eagerly()
    sleeps, look = ShortSleeps(), start_client_internal._pull_and_store_message
    start_client_internal._pull_and_store_message = poll_until_message(look, sleeps.begin)
    start_client_internal.time = sleeps  # type: ignore[attr-defined, assignment]
    flower_supernode()


if __name__ == "__main__":
    main()

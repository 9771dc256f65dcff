"""Flower's SuperNode with shorter waits, run as a separate program.

Flower's looks for messages every three seconds, whatever happens. A round is a few short exchanges, and would consist
of waiting. Here the wait follows what is going on: a node that has just answered looks often, an idle one seldom.

It is run by its file and imports nothing of protofed, so that a process that only carries messages does not load
PyTorch. What it takes from Flower's inside is therefore here and not in deploy/flower.py: see `main`.

    python -P supernode.py [arguments of flower-supernode ...]
"""

import time
from collections.abc import Callable
from typing import Any

_SHORTEST, _LONGEST = 0.1, 3.0
_SHARE = 0.1


def pause_after(silence: float, longest: float = _LONGEST) -> float:
    """Seconds until the next poll: a message waits at most a tenth of the silence before it."""
    return min(max(_SHARE * silence, _SHORTEST), longest)


def poll_until_message(look: Callable[..., int | None]) -> Callable[..., int]:
    """The function that looks for a message, repeated until there is one."""

    def poll(**arguments: Any) -> int:
        begin = time.monotonic()
        while (run_id := look(**arguments)) is None:
            time.sleep(pause_after(time.monotonic() - begin))
        return run_id

    return poll


def main() -> None:
    """Serve until ended.

    This is `flower-supernode` of Flower 1.41.0 with one private function replaced, since Flower has no option for it.
    Where it is renamed, the SuperNode does not start; where it is no longer called, rounds take seconds longer.
    """
    from flwr.supernode import start_client_internal
    from flwr.supernode.cli import flower_supernode

    start_client_internal._pull_and_store_message = poll_until_message(start_client_internal._pull_and_store_message)
    flower_supernode()


if __name__ == "__main__":
    main()

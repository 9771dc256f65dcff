"""What a command says when somebody stops it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

INTERRUPTED, TERMINATED = 130, 143
"""Exit codes, as shells have them."""


class Terminated(BaseException):
    """SIGTERM: unwinds like Ctrl-C, so that workers end and the run can be resumed."""


class Stopped(BaseException):
    """A command that was stopped and knows how to go on; typer would swallow a KeyboardInterrupt without a word."""

    def __init__(self, how_to_go_on: str, code: int) -> None:
        super().__init__(how_to_go_on)
        self.code = code


@contextmanager
def saying(how_to_go_on: Callable[[], str]) -> Iterator[None]:
    """Where somebody stops what happens inside, say how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        raise Stopped(how_to_go_on(), INTERRUPTED) from None
    except Terminated:
        raise Stopped(how_to_go_on(), TERMINATED) from None

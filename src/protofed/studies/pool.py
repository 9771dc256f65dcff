"""Tasks in processes of their own, some at a time; whatever ends the parent ends them too."""

import logging
import multiprocessing
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Hashable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple, TypeVar

from protofed.system import die_with_parent

K = TypeVar("K", bound=Hashable)

Report = Callable[[str, Any], None]
"""Tells the parent of an event and what there is to say about it."""

_PATIENCE = 5.0
"""Seconds that a process has to leave in good order before it is killed."""


class Ended(NamedTuple):
    """A task's last event: what it returned, or with which code its process died."""

    result: Any
    exit_code: int


def side_by_side(tasks: Mapping[K, Callable[[Report], Any]], at_once: int) -> Generator[tuple[K, str, Any], None, None]:
    """Perform tasks in forked processes, `at_once` at a time.

    Yields (key, event, content) as they come; the last event of every task is `ended`, with an `Ended`. Forking means
    that methods, models and data registered in this process exist there too, and that nothing is pickled on the way in.
    """
    waiting = deque(tasks.items())
    running: dict[Connection, tuple[K, BaseProcess]] = {}
    results: dict[K, Any] = {}
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                key, task = waiting.popleft()
                line, process = _start(task)
                running[line] = (key, process)
            for ready in wait(list(running)):
                assert isinstance(ready, Connection)
                key, process = running[ready]
                try:
                    event, content = ready.recv()
                except (EOFError, OSError):
                    process.join()
                    del running[ready]
                    ready.close()
                    yield key, "ended", Ended(results.pop(key, None), process.exitcode or 0)
                else:
                    if event == "result":
                        results[key] = content
                    else:
                        yield key, event, content
    finally:
        _end([process for _, process in running.values()])


def _start(task: Callable[[Report], Any]) -> tuple[Connection, BaseProcess]:
    context = multiprocessing.get_context("fork")
    line, far_end = context.Pipe(duplex=False)
    # Not a daemon: the workers engine starts processes of its own in there.
    process = context.Process(target=_perform, args=(task, far_end))
    process.start()
    far_end.close()
    return line, process


def _perform(task: Callable[[Report], Any], line: Connection) -> None:
    """The life of a process."""
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides what ends
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    os.dup2(2, 1)  # standard output belongs to the parent

    def report(event: str, content: Any) -> None:
        line.send((event, content))

    logging.root.handlers = [_Forward(report)]
    with suppress(BrokenPipeError):
        report("result", task(report))


class _Forward(logging.Handler):
    """Hands log messages to the parent, which knows what is on the screen."""

    def __init__(self, report: Report) -> None:
        super().__init__()
        self._report = report

    def emit(self, record: logging.LogRecord) -> None:
        """Only the text: what it was made of need not be picklable."""
        with suppress(BrokenPipeError):
            self._report("log", (record.levelno, record.getMessage()))


def _end(processes: list[BaseProcess]) -> None:
    """Ask them to leave, then see to it."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + _PATIENCE
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()

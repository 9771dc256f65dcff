"""Runs tasks in forked processes, some at a time; they end with their parent."""

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

Emit = Callable[[str, Any], None]
"""Sends the parent an event: its name and content."""

_TERMINATION_TIMEOUT = 5.0
"""Seconds that a process has to leave in good order before it is killed."""


class Ended(NamedTuple):
    """A task's last event: what it returned, or with which code its process died."""

    result: Any
    exit_code: int


def run_tasks(tasks: Mapping[K, Callable[[Emit], Any]], max_workers: int) -> Generator[tuple[K, str, Any], None, None]:
    """Run tasks in forked processes, at most `max_workers` at a time.

    Yields (key, event, content) as they come; the last event of every task is `ended`, with an `Ended`. Forking means
    that methods, models and data registered in this process exist there too, and that nothing is pickled on the way in.
    """
    pending = deque(tasks.items())
    running: dict[Connection, tuple[K, BaseProcess]] = {}
    results: dict[K, Any] = {}
    try:
        while pending or running:
            while pending and len(running) < max_workers:
                key, task = pending.popleft()
                receiver, process = _start_process(task)
                running[receiver] = (key, process)
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
        _terminate([process for _, process in running.values()])


def _start_process(task: Callable[[Emit], Any]) -> tuple[Connection, BaseProcess]:
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    # Not a daemon: the workers engine starts its own processes in there.
    process = context.Process(target=_process_main, args=(task, sender))
    process.start()
    sender.close()
    return receiver, process


def _process_main(task: Callable[[Emit], Any], sender: Connection) -> None:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides what ends
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    os.dup2(2, 1)  # standard output belongs to the parent

    def emit(event: str, content: Any) -> None:
        sender.send((event, content))

    logging.root.handlers = [_ForwardingHandler(emit)]
    with suppress(BrokenPipeError):
        emit("result", task(emit))


class _ForwardingHandler(logging.Handler):
    """Sends log messages to the parent, which knows what is on the screen."""

    def __init__(self, emit_event: Emit) -> None:
        super().__init__()
        self._emit_event = emit_event

    def emit(self, record: logging.LogRecord) -> None:
        """Only the text: what it was made of need not be picklable."""
        with suppress(BrokenPipeError):
            self._emit_event("log", (record.levelno, record.getMessage()))


def _terminate(processes: list[BaseProcess]) -> None:
    """Ask them to end, and kill those that do not."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + _TERMINATION_TIMEOUT
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()

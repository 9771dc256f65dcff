"""Flower's simulation: one virtual node per client, and every job and result a message between apps."""

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
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
from protofed.engines.grid import Parcel, exchange, packed, prepare_flower, unpacked
from protofed.errors import BadMessage
from protofed.records import Message

if TYPE_CHECKING:
    from flwr.app import Context
    from flwr.app import Message as FlowerMessage
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid

Recipe = Callable[[], ClientSide]
"""How a process that shares nothing with this one comes by the client side; small, hashable, and pickled by name."""

_LOCALHOST = "127.0.0.1"
_PAUSE = 0.02


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
        parcels = [self._parcel(position, job, message) for position, (job, message) in enumerate(jobs)]
        for position, reply in exchange(self._grid, parcels, None, lambda _: _PAUSE):
            job = jobs[position][0]
            yield job, reply if isinstance(reply, Failed) else _result(reply, job)

    def close(self) -> None:
        """End the simulation and its processes."""
        self._over.set()
        self._simulation.join()

    def _parcel(self, position: int, job: Job, message: Message) -> Parcel:
        """To the client's node; what no client owns goes to all nodes in turn."""
        assert not isinstance(job, TrainGroup), "every node has one client"
        client = None if isinstance(job, Predict) else job.client
        nodes = list(self._nodes.values())
        node = nodes[position % len(nodes)] if client is None else self._nodes[client]
        kind = "train" if isinstance(job, Train) else "evaluate"
        return Parcel(node, kind, str(job.round + 1), encode_job(job, message))


def _opened(opened: "Queue[Grid | BaseException]", wanted: int) -> tuple["Grid", list[int]]:
    """The grid and its nodes, which come into being after it."""
    grid = opened.get()
    while not isinstance(grid, BaseException):
        nodes = sorted(grid.get_node_ids())
        if len(nodes) == wanted:
            return grid, nodes
        with suppress(Empty):
            failure = opened.get(timeout=_PAUSE)
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
    """The life of the simulation: its server app only hands out the grid and waits for the end."""
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
        job, record = decode_job(unpacked(message, "server"), "server")
        return Reply(packed(encode_result(_side(recipe).perform(job, record))), reply_to=message)

    app.train()(perform)
    app.evaluate()(perform)
    return app


@cache
def _side(recipe: Recipe) -> ClientSide:
    torch.set_num_threads(1)
    return recipe()

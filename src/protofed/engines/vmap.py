"""One process in which clients step together: for tiny models, where calls cost more than arithmetic."""

import logging
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from protofed.clients import ClientSide, Job, Prepared, Result, Train, Trained
from protofed.clients.client import ReadyClient, attempted
from protofed.clients.training import TrainingResult
from protofed.clients.trial import training_bytes
from protofed.clients.vectorised import stackable, train_stacked
from protofed.engines.loop import LoopEngine
from protofed.records import Message

log = logging.getLogger("protofed")

_MEMORY = 2**30
"""What a group may take of the main memory."""
_SHARE_OF_DEVICE = 0.5
"""What it may take of the free memory of a graphics card."""


class VmapEngine(LoopEngine):
    """Trains clients in groups as large as memory allows; everything else is done one by one, as in the loop."""

    name = "vmap"
    trains_groups = False

    def __init__(self, prepared: Prepared) -> None:
        self._context = prepared.context
        # Features that are kept are those of a single client's batches.
        self._side = ClientSide(prepared.with_context(frozen=()))
        self._bytes_each: dict[int, int] = {}

    def perform(self, jobs: Sequence[tuple[Job, Message]]) -> Iterator[tuple[Job, Result]]:
        """Group by group, the largest clients first: neighbours then have batches of equal shape most of the time."""
        training = [(job, message) for job, message in jobs if isinstance(job, Train)]
        training.sort(key=lambda entry: self._context.sizes[entry[0].client], reverse=True)
        while training:
            room = self._room(training[0])
            yield from self._train(training[:room])
            training = training[room:]
        yield from super().perform([(job, message) for job, message in jobs if not isinstance(job, Train)])

    def _train(self, jobs: Sequence[tuple[Train, Message]]) -> Iterator[tuple[Job, Result]]:
        """One group. If anything goes wrong the remaining clients train one by one, so a failure costs one client."""
        method, side = self._context.method, self._side
        left = dict(jobs)
        try:
            prepared = [side.prepare(job, message) for job, message in jobs]
            for group in stackable(prepared):
                net = side.net_of(group[0].job.client)
                for ready, weights, result in train_stacked(method, net, group, self._context.precision):
                    net.load(weights)
                    del left[ready.job]
                    yield ready.job, attempted(partial(self._finished, ready, result))
        except Exception as error:
            log.warning("these clients cannot be trained together and train one by one: %s", error)
        for job, message in left.items():
            yield job, side.perform(job, message)

    def _finished(self, ready: ReadyClient, result: TrainingResult) -> Trained:
        return self._side.finish(ready, result)

    def _room(self, entry: tuple[Train, Message]) -> int:
        """How many clients fit into memory together, if all are as large as this one."""
        job, message = entry
        architecture = self._context.architecture_of(job.client)
        if architecture not in self._bytes_each:
            try:
                ready = self._side.prepare(job, message)
                net = self._side.net_of(job.client)
                each = training_bytes(self._context.method, net, ready, self._context.precision)
            except Exception:
                return 1  # alone it will say what is wrong
            self._bytes_each[architecture] = each
        return max(1, self._memory() // self._bytes_each[architecture])

    def _memory(self) -> int:
        if self._context.device.type != "cuda":
            return _MEMORY
        return int(_SHARE_OF_DEVICE * torch.cuda.mem_get_info(self._context.device)[0])

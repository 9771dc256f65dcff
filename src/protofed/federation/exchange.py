"""The uploads of one round as they come in: what is added up, who is left out and why, bytes and losses."""

import logging
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from protofed.clients import (
    DiskFailed,
    Failed,
    Job,
    MaskingCost,
    Prepared,
    Result,
    Train,
    Trained,
    TrainedGroup,
    TrainGroup,
)
from protofed.errors import BadMessage, NotFinite, UserError
from protofed.federation.door import Door, refused
from protofed.guards import SecureTally
from protofed.records import Bytes, Record, Sums, Tally, Weights, decode

log = logging.getLogger("protofed")

LEFT_OUT = "left out"
"""The event of a client whose upload is not used."""


@dataclass
class Exchange:
    """Uploads, bytes, losses and events of one round."""

    prepared: Prepared
    door: Door
    tally: Tally | SecureTally
    seen: Callable[[Train, bytes], None]
    """Called with every upload as it came, whether it can be used or not."""
    member_of: Callable[[Train, Record], Weights] | None = None
    """What an upload's model would be in an ensemble, in the round that makes one."""
    up: Bytes = field(default_factory=Bytes)
    down: Bytes = field(default_factory=Bytes)
    loss: dict[str, float] = field(default_factory=dict)
    samples: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)
    failures: list[Failed] = field(default_factory=list)
    members: dict[str, Weights] = field(default_factory=dict)
    masking: dict[str, Any] = field(default_factory=dict)
    """The entry of the round's line where uploads were masked."""

    @property
    def grouped_tally(self) -> Tally:
        """The tally, of clients in groups: secure sums know none."""
        assert isinstance(self.tally, Tally)
        return self.tally

    def receive(self, job: Job, result: Result) -> dict[str, Failed]:
        """Fold in what a job gave; the clients whose uploads cannot be used, and why."""
        if isinstance(job, TrainGroup):
            if isinstance(result, TrainedGroup):
                return self._receive_group(job, result)
            assert isinstance(result, Failed)
            return dict.fromkeys(job.clients, result)
        assert isinstance(job, Train)
        failure = self._receive_one(job, result) if isinstance(result, Trained) else result
        assert failure is None or isinstance(failure, Failed)
        return {} if failure is None else {job.client: failure}

    def leave_out(self, client: str, failure: Failed) -> None:
        """Note that a client's upload is not used, and why; not where the disk of this machine is at fault."""
        if isinstance(failure, DiskFailed):
            raise UserError(failure.reason)
        log.warning("%s is left out of this round: %s", client, failure.reason)
        self.failures.append(failure)
        not_finite = {"not_finite": True} if failure.not_finite else {}
        self.events.append({"client": client, "event": LEFT_OUT, "reason": failure.reason, **not_finite})

    def average_losses(self) -> None:
        """Over the samples of all clients, once all have been added."""
        self.loss = {name: value / max(self.samples, 1) for name, value in self.loss.items()}

    def loss_parts(self) -> dict[str, float | None]:
        """The losses as they are written; null where one is not finite."""
        return {name: value if math.isfinite(value) else None for name, value in self.loss.items()}

    def _receive_group(self, job: TrainGroup, result: TrainedGroup) -> dict[str, Failed]:
        each = dict(zip(job.clients, result.each, strict=True))
        if result.masking is not None:
            self._add_masking(result.masking)
        trained = {client: one for client, one in each.items() if isinstance(one, Trained)}
        if trained:
            like = self.prepared.templates.upload
            self.grouped_tally.add_group(list(trained), decode(result.blob, Sums.like(like), "group"), like)
        for one in trained.values():
            if not self.prepared.context.method.pools_data:
                self.up += one.size
            self._add_loss(one)
        return {client: one for client, one in each.items() if isinstance(one, Failed)}

    def _receive_one(self, job: Train, result: Trained) -> Failed | None:
        """Fold one upload in, or say why it cannot be used."""
        if not self.prepared.context.method.pools_data:
            self.up += result.size
            self.seen(job, result.blob)
        try:
            upload = self.door.upload(job.client, job.round, result.blob)
            self.tally.add(job.client, upload)
        except BadMessage as error:
            return refused(job, str(error), isinstance(error, NotFinite))
        self._add_loss(result)
        if self.member_of is not None:
            self.members[job.client] = self.member_of(job, upload)
        return None

    def _add_masking(self, cost: MaskingCost) -> None:
        self.up += Bytes(other=cost.up)
        self.down += Bytes(other=cost.down)
        self.masking = {"secure": asdict(cost)}

    def _add_loss(self, result: Trained) -> None:
        self.samples += result.samples
        for name, value in result.loss.items():
            self.loss[name] = self.loss.get(name, 0.0) + value * result.samples

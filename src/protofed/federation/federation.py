"""The server's side: choose clients, send, aggregate, evaluate, record, checkpoint. The only round loop there is."""

import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from protofed.clients import (
    Failed,
    GlobalModel,
    Job,
    MaskingCost,
    Prepared,
    Result,
    RunContext,
    Train,
    Trained,
    TrainedGroup,
    TrainGroup,
)
from protofed.errors import BadMessage
from protofed.federation.class_mean_head import HeadStart, start_from_class_means
from protofed.federation.engine import Engine, MaskingEngine, in_order
from protofed.federation.evaluation import Evaluator, Member
from protofed.federation.folder import RunFolder
from protofed.guards import UNGUARDED, PrivacyLedger, SecureTally, UploadWords
from protofed.records import Bytes, Message, Record, Sums, Tally, Weights, adds_up, decode, encode
from protofed.seeding import generator
from protofed.system import write_atomically

log = logging.getLogger("protofed")

_GROUPS = 64
"""Into how many groups the participants of a round are put to be added up, where there are enough of them."""
_SMALLEST_GROUP = 4


@dataclass(frozen=True)
class RoundPolicy:
    """How rounds are run: who takes part, how often they are scored, and what is kept of them."""

    participation: float = 1.0
    evaluate_every: int = 1
    evaluate_local: bool = False
    ensemble: bool = False
    """After the last round the clients' models predict together."""
    keep_messages: bool = False
    """Every upload is kept as it was sent."""
    min_clients: int = 1
    """A round with fewer uploads does not count."""
    class_mean_head: bool = False
    """Before the first round the head is made of the clients' class means."""
    snapshots: frozenset[int] = frozenset()
    """After how many rounds a snapshot of all states is kept; 0: before the first."""

    def participants_of(self, clients: int) -> int:
        """How many of the clients train in a round."""
        return max(1, math.ceil(self.participation * clients - 1e-9))


class TooFewClients(RuntimeError):
    """A round that cannot be closed, because too few clients have sent something that can be used."""


class Federation:
    """Runs the rounds of one method on one engine and writes them into one folder."""

    def __init__(
        self,
        prepared: Prepared,
        engine: Engine,
        folder: RunFolder,
        policy: RoundPolicy,
    ) -> None:
        self.folder = folder
        self.server = prepared.templates.server
        self._engine = engine
        self._policy = policy
        self._next = 0
        self._head_start: HeadStart | None = None
        self._enrol(prepared)
        self.notes: list[dict[str, str]] = []
        """What happened to clients since the last round, for the events of the next."""

    def resume(self) -> None:
        """Continue after the last committed round."""
        recovered = self.folder.recover(self._prepared.templates.server)
        if recovered is not None:
            self._next, self.server = recovered[0] + 1, recovered[1]
            for line in self.folder.rounds():
                self.evaluator.trained(line["participants"])
            self._snapshot()  # the run may have been killed just before

    @property
    def rounds_done(self) -> int:
        """Rounds that are committed."""
        return self._next

    def rounds(self) -> Iterator[dict[str, Any]]:
        """Run the rounds that are still to be done; each yields its line of rounds.jsonl once it is committed."""
        if self._next == 0:
            if self._policy.class_mean_head:
                self._head_start = start_from_class_means(self._prepared, self._engine, self.folder.path)
                self.server = self._head_start.server
            self._snapshot()
        while self._next < self.context.plan.rounds:
            record = self._round(self._next)
            self._next += 1
            self._snapshot()
            yield record

    def broadcast(self, round: int, client: str | None) -> Record:
        """What a client is sent in a round; None: a newcomer."""
        return self.context.method.broadcast(self.server, self.context.at(round, client))

    @property
    def context(self) -> RunContext:
        """Of the clients that take part now."""
        return self._prepared.context

    def _enrol(self, prepared: Prepared) -> None:
        """Set the clients of the run: everything that depends on them is made here, and nowhere else."""
        context, templates = prepared.context, prepared.templates
        self._prepared = prepared
        self.evaluator = Evaluator(context, self._engine)
        self._ledger = PrivacyLedger(context.guard, context.method, context.plan, context.sizes, templates.upload)

    def admit(self, prepared: Prepared) -> None:
        """Go on with more clients than before; a method whose state is made for certain clients cannot.

        Raises BadMessage where the server's state does not fit the new clients.
        """
        self.server = decode(encode(self.server, "server").blob, prepared.templates.server, "server")
        self._enrol(prepared)
        self.evaluator.trained(prepared.context.partition.clients)

    def adopt(self, server: Record, rounds_done: int, scored: bool) -> dict[str, Any] | None:
        """Go on from another server state, after so many rounds; how it does on test images, where it is asked for."""
        self.server, self._next = server, rounds_done
        self.evaluator.trained(self.context.partition.clients)
        return self._accuracy(rounds_done - 1, {})[0] if scored else None

    def project(self) -> dict[str, Any]:
        """Let clients project their part prototypes, each onto its own images; accuracy before and after."""
        last = self.context.plan.rounds
        return self.evaluator.project(last - 1, _BroadcastEncoder(self, last).message_to)

    def write_results(self, folder: Path) -> None:
        """The model, the prototypes and what a newcomer would receive, where the method has them."""
        method = self.context.method
        weights = method.global_weights(self.server)
        if weights is not None:
            write_atomically(folder / "model.safetensors", save(weights.tensors()))
        table = method.global_prototypes(self.server)
        if table is not None:
            write_atomically(folder / "prototypes.safetensors", save({"rows": table.rows, "count": table.count}))
        write_atomically(folder / "broadcast.safetensors", encode(self.broadcast(self._next, None), "server").blob)

    def _snapshot(self) -> None:
        if self._next in self._policy.snapshots:
            self.folder.keep_snapshot(self._next, self.server, self.write_results)

    def _round(self, round: int) -> dict[str, Any]:
        clock = _Clock()
        participants = self.participants(round)
        with clock.part("train"):
            exchange = self._exchange(round, participants)
        with clock.part("aggregate"):
            at = replace(self.context.at(round, None), participants=tuple(exchange.tally.clients))
            self.server = self.context.method.aggregate(self.server, exchange.tally.total(), at)
        with clock.part("evaluate"):
            accuracy, validation = self._accuracy(round, exchange.members)
        record = {
            "round": round + 1,
            "participants": participants,
            "train_loss": _finite(sum(exchange.loss.values())) if exchange.loss else None,
            "loss_parts": {name: _finite(value) for name, value in exchange.loss.items()},
            "accuracy": accuracy,
            "validation": validation,
            "bytes": {"up": exchange.up.as_dict(), "down": exchange.down.as_dict()},
            "samples": exchange.samples,
            "seconds": clock.seconds(),
            "events": [*self.notes, *exchange.events, *self.evaluator.absences()],
            **exchange.masking,
            **self._privacy(round),
        }
        self.notes = []
        self.folder.commit_round(round, record, self.server, exchange.tally.clients)
        return record

    def privacy(self, rounds: int) -> dict[str, Any] | None:
        """What all uploads of the first `rounds` rounds gave away, client by client; None without a guard."""
        if self.context.guard == UNGUARDED:
            return None
        return self._ledger.total((each, self.participants(each)) for each in range(rounds))

    def _privacy(self, round: int) -> dict[str, Any]:
        """The entry of a round's line: what has been given away so far."""
        if self.context.guard == UNGUARDED:
            return {}
        return {"privacy": self._ledger.after((each, self.participants(each)) for each in range(round + 1))}

    def participants(self, round: int) -> list[str]:
        """Participants of a round, in canonical order; the draw depends on seed and round only."""
        clients = list(self.context.partition.clients)
        wanted = self._policy.participants_of(len(clients))
        if wanted == len(clients):
            return clients
        order = torch.randperm(len(clients), generator=generator(self.context.seed, "participants", round))
        return [clients[index] for index in sorted(order[:wanted].tolist())]

    def _exchange(self, round: int, participants: list[str]) -> "_Exchange":
        """Send to the participants, let them train, take in what comes back in canonical order."""
        exchange = _Exchange(self._tally(participants))
        if round == 0 and self._head_start is not None:
            exchange.up += self._head_start.up
            exchange.down += self._head_start.down
        encoder = _BroadcastEncoder(self, round)
        messages = {client: encoder.message_to(client) for client in participants}
        if not self.context.method.pools_data:
            for message in messages.values():
                exchange.down += message.size
        groups = self._groups(participants)
        jobs = self._jobs(round, groups, messages)
        ends = {group[-1] for group in groups[:-1]}
        for job, result in self._results(round, participants, jobs):
            for client, failure in self._receive(exchange, job, result).items():
                self.folder.store.withdraw(client, round)
                exchange.left_out(client, failure)
            if isinstance(job, Train) and job.client in ends:
                exchange.grouped_tally.end_group()
        if len(exchange.tally.clients) < self._policy.min_clients:
            for client in exchange.tally.clients:
                self.folder.store.withdraw(client, round)
            first = exchange.failures[0]
            some = f"{len(exchange.failures)} of {len(participants)} clients"
            failed = some if exchange.tally.clients else "every client"
            raise TooFewClients(f"{failed} failed in round {round + 1}; the first: {first.reason}\n{first.trace}")
        exchange.average_losses()
        self.evaluator.trained(participants)
        return exchange

    def _results(
        self, round: int, participants: list[str], jobs: list[tuple[Job, Message]]
    ) -> Iterator[tuple[Job, Result]]:
        """What the engine makes of the jobs, in canonical order; of masked uploads one result, their sum."""
        if self.context.guard.secure and isinstance(self._engine, MaskingEngine):
            masked = [(job, message) for job, message in jobs if isinstance(job, Train)]
            yield TrainGroup(round, tuple(participants)), self._engine.train_masked(masked, self._words(participants))
        else:
            yield from in_order(self._engine.perform(jobs), [job for job, _ in jobs], self.folder.path)

    def _words(self, participants: list[str]) -> UploadWords:
        guard, like = self.context.guard, self._prepared.templates.upload
        return UploadWords(len(participants), self.context.sizes, like, guard.secure_range)

    def _groups(self, participants: list[str]) -> list[list[str]]:
        """Participants whose uploads are added up before they join the others.

        By their number alone: whoever adds, and wherever, then adds in the same order.
        """
        size = math.ceil(len(participants) / _GROUPS)
        only_sums = (
            not self.context.guard.secure and self.context.robust is None and adds_up(self._prepared.templates.upload)
        )
        if size < _SMALLEST_GROUP or not only_sums:
            return [participants]
        return [participants[start : start + size] for start in range(0, len(participants), size)]

    def _jobs(self, round: int, groups: list[list[str]], messages: dict[str, Message]) -> list[tuple[Job, Message]]:
        """One job per group where only the sum of its uploads is needed, else one per client."""
        needed_singly = (
            self._policy.keep_messages or self._makes_ensemble(round) or self.context.guard.quantise is not None
        )
        apart = len(groups) == 1 or needed_singly or not self._engine.trains_groups
        jobs: list[tuple[Job, Message]] = []
        for group in groups:
            if apart or len({id(messages[client]) for client in group}) > 1:
                jobs += [(Train(round, client), messages[client]) for client in group]
            else:
                jobs.append((TrainGroup(round, tuple(group)), messages[group[0]]))
        return jobs

    def _makes_ensemble(self, round: int) -> bool:
        return self._policy.ensemble and round + 1 == self.context.plan.rounds

    def _tally(self, participants: list[str]) -> Tally | SecureTally:
        """What sums up the uploads of a round."""
        guard = self.context.guard
        if guard.secure and not isinstance(self._engine, MaskingEngine):
            return SecureTally(self._words(participants), len(participants), self._prepared.templates.upload)
        return Tally(self.context.robust)

    def _receive(self, exchange: "_Exchange", job: Job, result: Result) -> dict[str, Failed]:
        """Fold in what a job gave; the clients whose uploads cannot be used, and why."""
        if isinstance(job, TrainGroup):
            if isinstance(result, TrainedGroup):
                return self._receive_group(exchange, job, result)
            assert isinstance(result, Failed)
            return dict.fromkeys(job.clients, result)
        assert isinstance(job, Train)
        failure = self._receive_one(exchange, job, result) if isinstance(result, Trained) else result
        assert failure is None or isinstance(failure, Failed)
        return {} if failure is None else {job.client: failure}

    def _receive_group(self, exchange: "_Exchange", job: TrainGroup, result: TrainedGroup) -> dict[str, Failed]:
        each = dict(zip(job.clients, result.each, strict=True))
        if result.masking is not None:
            exchange.add_masking(result.masking)
        trained = {client: one for client, one in each.items() if isinstance(one, Trained)}
        if trained:
            like = self._prepared.templates.upload
            exchange.grouped_tally.add_group(list(trained), decode(result.blob, Sums.like(like), "group"), like)
        for one in trained.values():
            if not self.context.method.pools_data:
                exchange.up += one.size
            exchange.add_loss(one)
        return {client: one for client, one in each.items() if isinstance(one, Failed)}

    def _receive_one(self, exchange: "_Exchange", job: Train, result: Trained) -> Failed | None:
        """Fold one upload in, or say why it cannot be used."""
        if not self.context.method.pools_data:
            exchange.up += result.size
            if self._policy.keep_messages:
                self.folder.keep_message(job.round, job.client, result.blob)
        try:
            upload = decode(result.blob, self._prepared.templates.upload, job.client, self.context.guard.quantise)
            exchange.tally.add(job.client, upload)
        except BadMessage as error:
            return Failed(str(error))
        exchange.add_loss(result)
        if self._makes_ensemble(job.round):
            at = self.context.at(job.round, job.client)
            exchange.members[job.client] = self.context.method.client_weights(self.server, upload, at)
        return None

    def _accuracy(self, round: int, members: dict[str, Weights]) -> tuple[dict[str, Any] | None, float | None]:
        """Both views, and the accuracy on validation data; null in rounds that are not evaluated."""
        last = round + 1 == self.context.plan.rounds
        if not last and (round + 1) % self._policy.evaluate_every:
            return None, None
        # What clients would use now is what the next round would send them.
        encoder = _BroadcastEncoder(self, round + 1)
        newcomer = self.broadcast(round + 1, None)
        weights = self.context.method.global_weights(self.server)
        package = None if weights is None else encode(GlobalModel(weights, newcomer), "server")
        ensemble = [
            Member(client, share, encode(GlobalModel(members[client], newcomer), client))
            for client, share in self._ensemble_shares(round, list(members)).items()
        ]
        accuracy = self.evaluator.evaluate(round, package, encoder.message_to, ensemble, self._policy.evaluate_local)
        return accuracy, self.evaluator.validate(round, encoder.message_to)

    def _ensemble_shares(self, round: int, members: list[str]) -> dict[str, float]:
        """How much each member counts, as the method says; they sum to 1."""
        weights = {client: self.context.method.member_weight(self.context.at(round, client)) for client in members}
        return {client: weight / sum(weights.values()) for client, weight in weights.items()}


@dataclass
class _Exchange:
    """Uploads, bytes, losses and events of one round."""

    tally: Tally | SecureTally
    up: Bytes = field(default_factory=Bytes)
    down: Bytes = field(default_factory=Bytes)
    loss: dict[str, float] = field(default_factory=dict)
    samples: int = 0
    events: list[dict[str, str]] = field(default_factory=list)
    failures: list[Failed] = field(default_factory=list)
    members: dict[str, Weights] = field(default_factory=dict)
    masking: dict[str, Any] = field(default_factory=dict)
    """The entry of the round's line where uploads were masked."""

    @property
    def grouped_tally(self) -> Tally:
        """The tally, of clients in groups: secure sums know none."""
        assert isinstance(self.tally, Tally)
        return self.tally

    def add_loss(self, result: Trained) -> None:
        self.samples += result.samples
        for name, value in result.loss.items():
            self.loss[name] = self.loss.get(name, 0.0) + value * result.samples

    def add_masking(self, cost: MaskingCost) -> None:
        self.up += Bytes(other=cost.up)
        self.down += Bytes(other=cost.down)
        self.masking = {"secure": asdict(cost)}

    def average_losses(self) -> None:
        """Over the samples of all clients, once all have been added."""
        self.loss = {name: value / self.samples for name, value in self.loss.items()}

    def left_out(self, client: str, failure: Failed) -> None:
        log.warning("%s is left out of this round: %s", client, failure.reason)
        self.failures.append(failure)
        self.events.append({"client": client, "event": "left out", "reason": failure.reason})


class _BroadcastEncoder:
    """Encodes broadcasts, once where every client is sent the same record."""

    def __init__(self, federation: Federation, round: int) -> None:
        self._federation = federation
        self._round = round
        self._last: tuple[Record, Message] | None = None

    def message_to(self, client: str) -> Message:
        record = self._federation.broadcast(self._round, client)
        if self._last is None or self._last[0] is not record:
            self._last = (record, encode(record, "server"))
        return self._last[1]


class _Clock:
    """Wall time of the parts of a round."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._parts: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._parts[name] = time.perf_counter() - start

    def seconds(self) -> dict[str, float]:
        return {**self._parts, "total": time.perf_counter() - self._start}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None

"""The server's side: choose clients, send, aggregate, evaluate, record, checkpoint. The only round loop there is."""

import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from protofed.clients import Failed, GlobalModel, Job, Prepared, Result, RunContext, Train, Trained, TrainGroup
from protofed.errors import BadMessage, NotFinite, UserError
from protofed.federation.best import BestRound, BestTracker, By
from protofed.federation.broadcasts import BroadcastEncoder
from protofed.federation.class_mean_head import HeadStart, start_from_class_means
from protofed.federation.door import Door
from protofed.federation.engine import Engine, MaskingEngine, in_order
from protofed.federation.evaluation import Evaluator, Member
from protofed.federation.exchange import LEFT_OUT, Exchange
from protofed.federation.failures import Diverged, TooFewClients
from protofed.federation.folder import RunFolder
from protofed.federation.policy import RoundPolicy
from protofed.federation.spending import REPEATED, Spending
from protofed.guards import UNGUARDED, SecureTally, UploadWords, possible_total, sensitivity_of
from protofed.records import Message, Record, Tally, Weights, adds_up, decode, encode
from protofed.seeding import generator
from protofed.system import write_atomically

log = logging.getLogger("protofed")

_GROUPS = 64
"""Into how many groups the participants of a round are put to be added up, where there are enough of them."""
_SMALLEST_GROUP = 4


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
        self._scored = False
        self._head_start: HeadStart | None = None
        self._arrived: dict[int, int] = {}
        self._spending = Spending(folder.path)
        self._enrol(prepared)
        self.notes: list[dict[str, str]] = []
        """What happened to clients since the last round, for the events of the next."""
        judged_by: By = "validation" if self.evaluator.validates else "train_loss"
        self._tracker = BestTracker(judged_by, self._keep_best)

    def resume(self) -> None:
        """Continue after the last committed round."""
        recovered = self.folder.recover(self._prepared.templates.server)
        if recovered is not None:
            self._next, self.server = recovered[0] + 1, recovered[1]
            lines = self.folder.rounds()
            for line in lines:
                self.evaluator.trained(line["participants"])
                absent = {event["client"] for event in line["events"] if event["event"] == LEFT_OUT}
                self._arrived[line["round"] - 1] = len(line["participants"]) - len(absent)
            self._tracker.resume(lines, BestRound.read(self.folder.path))
            self._scored = lines[-1]["accuracy"] is not None
            self._snapshot()  # the run may have been killed just before
        self._spending.resume(self.folder.rounds())

    @property
    def rounds_done(self) -> int:
        """Rounds that are committed."""
        return self._next

    @property
    def flat(self) -> bool:
        """Whether the run stops early because it has not become better for a while; only told of scored rounds."""
        patience = self._policy.stop_when_flat
        return patience is not None and self._scored and self._tracker.rounds_since() >= patience

    @property
    def goes_on(self) -> bool:
        """Whether there is another round to be done."""
        return self._next < self.context.plan.rounds and not self.flat

    def rounds(self) -> Iterator[dict[str, Any]]:
        """Run the rounds that are still to be done; each yields its line of rounds.jsonl once it is committed."""
        if self._next == 0:
            if self._policy.class_mean_head:
                self._head_start = start_from_class_means(self._prepared, self._door, self.folder.path)
                self.server = self._head_start.server
            self._snapshot()
        while self.goes_on:
            record = self._round(self._next)
            self._next += 1
            self._snapshot()
            yield record

    def broadcast(self, round: int, client: str | None) -> Record:
        """What a client is sent in a round; None: a newcomer."""
        return self.context.method.broadcast(self.server, self.context.at(round, client))

    def keep_best(self) -> BestRound | None:
        """Keep the best round beside the last, where one can be told."""
        return self._tracker.finish()

    @property
    def context(self) -> RunContext:
        """Of the clients that take part now."""
        return self._prepared.context

    def _enrol(self, prepared: Prepared) -> None:
        """Set the clients of the run: everything that depends on them is made here, and nowhere else."""
        self._prepared = prepared
        self._door = Door(self._engine, prepared)
        self.evaluator = Evaluator(prepared.context, self._door)
        self._ledger = prepared.privacy_ledger(self._arrived)

    def admit(self, prepared: Prepared) -> None:
        """Go on with more clients than before; a method whose state is made for certain clients cannot.

        Raises BadMessage where the server's state does not fit the new clients.
        """
        self.server = decode(encode(self.server, "server").blob, prepared.templates.server, "server")
        self._enrol(prepared)
        self.evaluator.trained(prepared.context.partition.clients)

    def enrol(self, prepared: Prepared) -> None:
        """Have other clients from now on; the server's state, which may not fit them, follows by `revise`."""
        self._enrol(prepared)
        self.evaluator.trained(prepared.context.partition.clients)

    @property
    def prepared(self) -> Prepared:
        """The run for the clients that take part now."""
        return self._prepared

    def upload_of(self, client: str) -> tuple[Record, Trained]:
        """What a client sends in the first round, asked of it alone, and as it came."""
        job = Train(0, client)
        ((_, result),) = self._door.perform([(job, encode(self._prepared.templates.down, "server"))])
        if not isinstance(result, Trained):
            raise UserError(f"{client} does not send its share: {getattr(result, 'reason', 'it gave no answer')}")
        try:
            return self._door.upload(client, 0, result.blob), result
        except BadMessage as problem:
            raise UserError(str(problem)) from None

    def revise(self, server: Record, clients: list[str], event: dict[str, str]) -> dict[str, Any] | None:
        """Put another server state, in which these clients have a part, in the place of the last round's; its
        accuracy.
        """
        accuracy = self.adopt(server, self._next, scored=True)
        line = self.folder.rounds()[-1]
        revised = {**line, "participants": clients, "accuracy": accuracy, "events": [*line["events"], event]}
        self.folder.revise_round(self._next - 1, revised, encode(server, "server"), clients)
        return accuracy

    def adopt(self, server: Record, rounds_done: int, scored: bool) -> dict[str, Any] | None:
        """Go on from another server state, after so many rounds; how it does on test images, where it is asked for."""
        self.server, self._next = server, rounds_done
        self.evaluator.trained(self.context.partition.clients)
        return self._accuracy(rounds_done - 1, {})[0] if scored else None

    def project(self) -> dict[str, Any]:
        """Let clients project their part prototypes, each onto its own images; accuracy before and after."""
        return self.evaluator.project(self._next - 1, BroadcastEncoder(self.broadcast, self._next).message_to)

    def write_results(self, folder: Path) -> None:
        """The model, the prototypes and what a newcomer would receive, where the method has them."""
        self._write_results(folder, self.server, self._next)

    def _write_results(self, folder: Path, server: Record, done: int) -> None:
        method = self.context.method
        weights = method.global_weights(server)
        if weights is not None:
            write_atomically(folder / "model.safetensors", save(weights.tensors()))
        table = method.global_prototypes(server)
        if table is not None:
            write_atomically(folder / "prototypes.safetensors", save({"rows": table.rows, "count": table.count}))
        newcomer = method.broadcast(server, self.context.at(done, None))
        write_atomically(folder / "broadcast.safetensors", encode(newcomer, "server").blob)

    def _keep_best(self, best: BestRound) -> None:
        """Copy what the last committed round left, the server's state included."""
        server = self.folder.server_after(best.round, self._prepared.templates.server)
        self.folder.keep_best(best, server, lambda folder: self._write_results(folder, server, best.round))

    def _snapshot(self) -> None:
        if self._next in self._policy.snapshots:
            self.folder.keep_snapshot(self._next, self.server, self.write_results)

    def _round(self, round: int) -> dict[str, Any]:
        clock = _Clock()
        participants = self.participants(round)
        with clock.part("train"):
            exchange = self._exchange(round, participants)
        with clock.part("aggregate"):
            clients, state = self._aggregate(round, exchange)
        with clock.part("evaluate"):
            accuracy, validation = self._accuracy(round, exchange.members)
        record = {
            "round": round + 1,
            "participants": participants,
            "train_loss": _finite(sum(exchange.loss.values())) if exchange.loss else None,
            "cross_entropy": self._cross_entropy(round, exchange.loss),
            "loss_parts": exchange.loss_parts(),
            "accuracy": accuracy,
            "validation": validation,
            "bytes": {"up": exchange.up.as_dict(), "down": exchange.down.as_dict()},
            "samples": exchange.samples,
            "seconds": clock.seconds(),
            "events": [*self.notes, *exchange.events, *self.evaluator.absences()],
            **exchange.masking,
            **self._privacy(participants),
        }
        self.notes = []
        self._tracker.before_commit(record)
        self.folder.commit_round(round, record, state, clients)
        self._spending.close(participants)
        self._scored = accuracy is not None
        return record

    def _aggregate(self, round: int, exchange: Exchange) -> tuple[list[str], Message]:
        """Make the next server state of what came; the clients that are in it, and the state encoded.

        What sites sent was finite, but a state made of it need not be. Among clients of this process that means that
        training diverges. In a deployment any member may be the cause: the old state stays, and the round is as if
        nobody had trained in it.
        """
        clients = list(exchange.tally.clients)
        try:
            server = self._next_server(round, exchange.tally)
            state = encode(server, "server")
        except (ArithmeticError, BadMessage, LookupError, RuntimeError, ValueError) as error:
            if not self._door.scattered:
                self.folder.store.withdraw_all()
                if isinstance(error, NotFinite):
                    raise Diverged(round + 1, "the server's new state was not finite") from None
                raise  # a mistake in the method, which its author wants to see
            log.warning("round %d: the uploads cannot be aggregated (%s)", round + 1, type(error).__name__)
            for client in clients:
                self.folder.store.withdraw(client, round)
                exchange.leave_out(
                    client, Failed("the server's state would not be finite after this round; the old state stays")
                )
            return [], encode(self.server, "server")
        self.server = server
        return clients, state

    def _next_server(self, round: int, tally: Tally | SecureTally) -> Record:
        """The method's next state, from totals that are possible also where noise is on them."""
        context, arrived = self.context, tuple(tally.clients)
        self._arrived[round] = len(arrived)
        at = context.with_noise_of(arrived, replace(context.at(round, None), participants=arrived))
        total = possible_total(context.guard, sensitivity_of(context.method, context.guard, at), tally.total())
        return context.method.aggregate(self.server, total, at)

    def _cross_entropy(self, round: int, loss: dict[str, float]) -> float | None:
        """The part of the loss that every method has, as if it counted in full; None where it does not count at all."""
        method = self.context.method
        share = method.ce_share(self.context.at(round, None))
        return _finite(loss[method.ce_term] / share) if method.ce_term in loss and share else None

    def privacy(self) -> dict[str, Any] | None:
        """What all uploads so far gave away, client by client; None without a guard."""
        if self.context.guard == UNGUARDED:
            return None
        return self._ledger.total(self._spending.rounds())

    def _privacy(self, participants: list[str]) -> dict[str, Any]:
        """The entry of a round's line: what has been given away so far."""
        if self.context.guard == UNGUARDED:
            return {}
        repeated = self._spending.repeated()
        told = {"privacy": self._ledger.after(self._spending.rounds(participants))}
        return {**told, REPEATED: repeated} if repeated else told

    def participants(self, round: int) -> list[str]:
        """Participants of a round, in canonical order; the draw depends on seed and round only."""
        clients = list(self.context.partition.clients)
        wanted = self._policy.participants_of(len(clients))
        if wanted == len(clients):
            return clients
        order = torch.randperm(len(clients), generator=generator(self.context.seed, "participants", round))
        return [clients[index] for index in sorted(order[:wanted].tolist())]

    def _exchange(self, round: int, participants: list[str]) -> Exchange:
        """Send to the participants, let them train, take in what comes back in canonical order."""
        member_of = self._member_of if self._makes_ensemble(round) else None
        exchange = Exchange(self._prepared, self._door, self._tally(participants), self._seen, member_of)
        if round == 0 and self._head_start is not None:
            exchange.up += self._head_start.up
            exchange.down += self._head_start.down
        encoder = BroadcastEncoder(self.broadcast, round)
        messages = {client: encoder.message_to(client) for client in participants}
        if not self.context.method.pools_data:
            for message in messages.values():
                exchange.down += message.size
        groups = self._groups(participants)
        jobs = self._jobs(round, groups, messages)
        ends = {group[-1] for group in groups[:-1]}
        for job, result in self._results(round, participants, jobs):
            for client, failure in exchange.receive(job, result).items():
                self.folder.store.withdraw(client, round)
                exchange.leave_out(client, failure)
            if isinstance(job, Train) and job.client in ends:
                exchange.grouped_tally.end_group()
        if len(exchange.tally.clients) < self._policy.min_clients:
            for client in exchange.tally.clients:
                self.folder.store.withdraw(client, round)
            if not exchange.tally.clients and all(failure.not_finite for failure in exchange.failures):
                raise Diverged(round + 1, f"{_lost(len(participants))} no longer finite")
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
            yield from in_order(self._door.perform(jobs), [job for job, _ in jobs], self.folder.path)

    def _words(self, participants: list[str]) -> UploadWords:
        guard, like = self.context.guard, self._prepared.templates.upload
        return UploadWords(len(participants), self.context.sizes, like, guard.secure_range)

    def _groups(self, participants: list[str]) -> list[list[str]]:
        """Participants whose uploads are added up before they join the others.

        By their number alone: whoever adds, and wherever, then adds in the same order.
        """
        size = math.ceil(len(participants) / _GROUPS)
        needs_all = self.context.guard.secure or self.context.robust is not None or self.context.max_share is not None
        only_sums = not needs_all and adds_up(self._prepared.templates.upload)
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

    def _seen(self, job: Train, blob: bytes) -> None:
        """What is kept of an upload as it came."""
        if self._policy.keep_messages:
            self.folder.keep_message(job.round, job.client, blob)
        if self.context.guard.noisy:
            self._spending.note(job.client, job.round, blob)

    def _member_of(self, job: Train, upload: Record) -> Weights:
        at = self.context.at(job.round, job.client)
        return self.context.method.client_weights(self.server, upload, at)

    def _makes_ensemble(self, round: int) -> bool:
        return self._policy.ensemble and round + 1 == self.context.plan.rounds

    def _tally(self, participants: list[str]) -> Tally | SecureTally:
        """What sums up the uploads of a round."""
        guard = self.context.guard
        if guard.secure and not isinstance(self._engine, MaskingEngine):
            return SecureTally(self._words(participants), len(participants), self._prepared.templates.upload)
        return Tally(self.context.robust, self.context.max_share)

    def _accuracy(self, round: int, members: dict[str, Weights]) -> tuple[dict[str, Any] | None, float | None]:
        """Both views, and the accuracy on validation data; null in rounds that are not evaluated."""
        last = round + 1 == self.context.plan.rounds
        if not last and (round + 1) % self._policy.evaluate_every:
            return None, None
        # What clients would use now is what the next round would send them.
        encoder = BroadcastEncoder(self.broadcast, round + 1)
        newcomer = self.broadcast(round + 1, None)
        weights = self.context.method.global_weights(self.server)
        package = None if weights is None else encode(GlobalModel(weights, newcomer), "server")
        ensemble = [
            Member(client, share, encode(GlobalModel(members[client], newcomer), client))
            for client, share in self._ensemble_shares(round, list(members)).items()
        ]
        # What is predicted for single images does not leave the sites of a deployment.
        # Where a run may stop early, any round may be its last.
        keep = (last or self._policy.stop_when_flat is not None) and not self._engine.scattered
        accuracy = self.evaluator.evaluate(
            round, package, encoder.message_to, ensemble, self._policy.evaluate_local, keep
        )
        if (predictions := self.evaluator.predictions()) is not None:
            self.folder.keep_predictions(predictions.encoded())
        return accuracy, self.evaluator.validate(round, encoder.message_to, self._policy.metric)

    def _ensemble_shares(self, round: int, members: list[str]) -> dict[str, float]:
        """How much each member counts, as the method says; they sum to 1."""
        weights = {client: self.context.method.member_weight(self.context.at(round, client)) for client in members}
        return {client: weight / sum(weights.values()) for client, weight in weights.items()}


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


def _lost(clients: int) -> str:
    return f"the weights of all {clients} clients were" if clients > 1 else "the weights of the only client were"


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None

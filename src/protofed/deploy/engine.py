"""The engine of a deployment: a job goes to the site it is about, and AcceptedRounds knows whose uploads counted."""

import hashlib
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protofed.clients import (
    Absent,
    Failed,
    Job,
    Predict,
    Result,
    Train,
    Trained,
    TrainedGroup,
    TrainGroup,
    decode_result,
    encode_job,
)
from protofed.deploy.known_tensors import TensorPart, is_lacking, leave_out, tensor_parts
from protofed.deploy.masked_round import MaskedRound, UnmaskedRounds
from protofed.deploy.protocol import RunTerms, SiteRequest
from protofed.deploy.supernode import pause_after
from protofed.engines.flower import OutgoingMessage, send_and_receive
from protofed.errors import BadMessage
from protofed.guards import UploadWords
from protofed.records import Message

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from flwr.serverapp import Grid

_LONGEST_PAUSE = 0.5
_SHORTEST_SECONDS = 5.0
"""For a job that has to be sent again in the last moment of a round."""
_NO_MEMBER = "it is no longer a member of the federation"


class AcceptedRounds:
    """Stands in for the clients' states, which are at the sites: whose upload of which round was accepted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._settled: dict[str, int] = {}
        self._answered: dict[str, int] = {}
        self.digests: dict[str, str] = {}
        """SHA-256 of the last upload that has come from each client."""

    def learn(self, rounds: Iterable[Mapping[str, Any]]) -> None:
        """Take over the rounds that are committed."""
        for record in rounds:
            # Who was left out may have been added afterwards; the last event counts.
            last = {event["client"]: event["event"] for event in record["events"]}
            missing = {client for client, event in last.items() if event == "left out"}
            self.commit([client for client in record["participants"] if client not in missing], record["round"] - 1)

    def answered(self, client: str, round: int, upload: bytes | None = None) -> None:
        """Note that a site has trained and its upload has arrived, maybe hidden in a sum."""
        self._answered[client] = round
        if upload is not None:
            self.digests[client] = hashlib.sha256(upload).hexdigest()

    def last(self, client: str) -> int | None:
        """The last round whose training counts for this client."""
        return self._answered.get(client, self._settled.get(client))

    def withdraw(self, client: str, round: int) -> None:
        """Forget an upload that cannot be used after all."""
        self._answered.pop(client, None)

    def commit(self, clients: Iterable[str], round: int) -> None:
        """Make a round permanent."""
        for client in clients:
            self._settled[client] = round
        self._answered.clear()

    def withdraw_all(self) -> None:
        """Forget the round in flight."""
        self._answered.clear()


class SitesEngine:
    """Performs every job at the site it is about, until the deadline of the round."""

    name = "flower"
    workers = 1
    scattered = True
    trains_groups = False

    def __init__(
        self,
        grid: "Grid",
        nodes: dict[str, int],
        accepted: AcceptedRounds,
        timeout: float,
        identities: "Callable[[], Mapping[str, EllipticCurvePublicKey]]",
        min_sites: int = 1,
    ) -> None:
        self.nodes = nodes
        self._identities = identities
        self._min_sites = min_sites
        self._unmasked = UnmaskedRounds(accepted.folder)
        self.terms: RunTerms | None = None
        self._grid = grid
        self._accepted = accepted
        self._timeout = timeout
        self._known: dict[str, frozenset[str]] = {}
        """Hashes of the tensors in the last job that a site has answered."""

    def perform(self, jobs: Sequence[tuple[Job, Message]]) -> Iterator[tuple[Job, Result]]:
        """The results as they come; a site that does not answer in time has failed."""
        members = [(job, message) for job, message in jobs if self._site(job) in self.nodes]
        for job, _ in jobs:
            if self._site(job) not in self.nodes:
                yield job, self._failure(job, _NO_MEMBER)
        deadline = time.monotonic() + self._timeout
        lacking = yield from self._send(members, self._timeout)
        if lacking:  # they were restarted, or have answered another server meanwhile
            yield from self._send(lacking, max(deadline - time.monotonic(), _SHORTEST_SECONDS), whole=True)

    def _send(
        self, jobs: Sequence[tuple[Job, Message]], timeout: float, whole: bool = False
    ) -> Generator[tuple[Job, Result], None, list[tuple[Job, Message]]]:
        """Yields the results as they come; returns jobs whose sites lack tensors that were not sent with them."""
        blobs = {id(message): message.blob for _, message in jobs}
        parts = {key: tensor_parts(blob) for key, blob in blobs.items()}
        messages = [self._address(job, message, parts[id(message)], whole) for job, message in jobs]
        lacking = []
        for position, reply in send_and_receive(self._grid, messages, timeout, _pause):
            job, message = jobs[position]
            self._known.pop(self._site(job), None)
            if not whole and not isinstance(reply, Failed) and is_lacking(reply):
                lacking.append(jobs[position])
                continue
            if not isinstance(reply, Failed):
                self._known[self._site(job)] = frozenset(part.digest for part in parts[id(message)])
            yield job, self._result(job, reply)
        return lacking

    def ask(self, requests: Mapping[str, SiteRequest], timeout: float) -> Iterator[tuple[str, bytes | Failed]]:
        """Send requests other than jobs, by site name; yields the replies as they come."""
        names = [name for name in requests if name in self.nodes]
        messages = [
            OutgoingMessage(self.nodes[name], "query", requests[name].kind, requests[name].to_bytes()) for name in names
        ]
        for position, reply in send_and_receive(self._grid, messages, timeout, _pause):
            yield names[position], reply

    def train_masked(self, jobs: Sequence[tuple[Train, Message]], words: UploadWords) -> TrainedGroup:
        """Train at all sites, and add their uploads up without seeing any of them."""
        assert self.terms is not None, "terms come first"
        by_site = {self._site(job): (job, message) for job, message in jobs}
        attempt = MaskedRound(
            self.terms.run,
            by_site,
            words,
            self._identities(),
            self._ask_stage,
            self._timeout,
            self._unmasked,
            self._min_sites,
        )
        group = attempt.result()
        for (job, _), one in zip(by_site.values(), group.each, strict=True):
            if isinstance(one, Trained):
                self._accepted.answered(job.client, job.round)
        return group

    def must_repeat(self, round: int) -> bool:
        """Whether a round was to be unmasked before, so that it can only be begun again with the very same sites."""
        return self._unmasked.survivors(round) is not None

    def missing_for(self, round: int, online: Collection[str], fewest: int) -> str | None:
        """Who must be connected before a round is worth another try, in words; None where nobody is missing."""
        bound = self._unmasked.survivors(round)
        if bound is not None:
            return ", ".join(sorted(bound - set(online))) or None
        here = len(self.nodes.keys() & set(online))
        return None if here >= fewest else f"{fewest - here} more of {', '.join(sorted(self.nodes))}"

    def _ask_stage(self, bodies: Mapping[str, bytes], timeout: float) -> Iterator[tuple[str, bytes | Failed]]:
        requests = {}
        for site, body in bodies.items():
            if site in self.nodes:
                requests[site] = SiteRequest("mask", self.terms, self._accepted.last(f"{site}-0"), body)
            else:
                yield site, Failed(_NO_MEMBER)
        yield from self.ask(requests, timeout)

    def close(self) -> None:
        """Nothing: the SuperLink outlives the engine."""

    def _address(self, job: Job, message: Message, parts: Sequence[TensorPart], whole: bool) -> OutgoingMessage:
        site, body = self._site(job), encode_job(job, message)
        before = len(body) - len(message.blob)
        placed = [replace(part, start=before + part.start) for part in parts]
        told: tuple[TensorPart, ...] = tuple(placed)
        if not whole:
            body, told = leave_out(body, placed, self._known.get(site, ()))
        request = SiteRequest("job", self.terms, self._accepted.last(f"{site}-0"), body, told)
        message_type = "train" if isinstance(job, Train) else "evaluate"
        return OutgoingMessage(self.nodes[site], message_type, str(job.round + 1), request.to_bytes())

    def _result(self, job: Job, reply: bytes | Failed) -> Result:
        if isinstance(reply, Failed):
            return self._failure(job, reply.reason)
        try:
            result = decode_result(reply, self._site(job))
        except BadMessage as error:
            return self._failure(job, str(error))
        if isinstance(result, Failed):
            return self._failure(job, result.reason, result.not_finite)
        if isinstance(result, Trained) != isinstance(job, Train):
            return self._failure(job, "it answers another question")
        if isinstance(job, Train) and isinstance(result, Trained):
            self._accepted.answered(job.client, job.round, result.blob)
        return result

    @staticmethod
    def _failure(job: Job, reason: str, not_finite: bool = False) -> Failed:
        return Failed(reason, not_finite=not_finite) if isinstance(job, Train) else Absent(reason)

    @staticmethod
    def _site(job: Job) -> str:
        assert not isinstance(job, TrainGroup), "every site has its own clients"
        if isinstance(job, Predict):
            return job.domain
        return job.client.rpartition("-")[0] if job.client is not None else str(job.domain)


def _pause(waited: float) -> float:
    return pause_after(waited, _LONGEST_PAUSE)

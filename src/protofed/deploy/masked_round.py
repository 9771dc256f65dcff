"""Secure sums at the server: the stages of one round, and what must be remembered from one attempt to the next."""

import json
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from protofed.clients import Failed, MaskingCost, Train, Trained, TrainedGroup, encode_job
from protofed.deploy.masked_stages import SiteRefusal, Stage, StageRequest, TrainReport, read_stage_reply
from protofed.errors import BadMessage
from protofed.guards import UploadWords
from protofed.records import Bytes, Message, encode
from protofed.system import write_atomically

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

    from protofed.guards.masking.crypto import Words
    from protofed.guards.masking.messages import SumSession
    from protofed.guards.masking.server_party import ServerParty

Ask = Callable[[Mapping[str, bytes], float], Iterator[tuple[str, bytes | Failed]]]
"""Sends each site a body of a request, and yields the answers as they come."""

_SHORT_STAGE_SECONDS = 120.0
_REMEMBERED = "unmasking.json"


class UnmaskedRounds:
    """For whom a round's sum was asked to be unmasked; sites never do it for others, so neither does the server ask."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / _REMEMBERED
        self._blamed: dict[int, set[str]] = {}

    def survivors(self, round: int) -> set[str] | None:
        """Those of an earlier attempt that came so far."""
        if not self._file.exists():
            return None
        content = json.loads(self._file.read_bytes())
        return set(content["survivors"]) if content["round"] == round else None

    def remember(self, round: int, survivors: Sequence[str]) -> None:
        """Before anybody is asked to unmask."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self._file, json.dumps({"round": round, "survivors": list(survivors)}).encode())

    def blame(self, round: int, site: str) -> None:
        """Leave a site out of further attempts at a round: the others cannot read its shares."""
        self._blamed.setdefault(round, set()).add(site)

    def blamed(self, round: int) -> set[str]:
        """Whom the others have blamed in this round."""
        return self._blamed.get(round, set())


@dataclass
class MaskedRound:
    """One attempt to add up a round's uploads without seeing any of them."""

    run: str
    jobs: Mapping[str, tuple[Train, Message]]
    """By site, in canonical order."""
    words: UploadWords
    identities: "Mapping[str, EllipticCurvePublicKey]"
    ask: Ask
    timeout: float
    remembered: UnmaskedRounds
    min_sites: int
    """A sum of fewer does not count, and must not be unmasked: it could not be made again with more."""
    failures: dict[str, Failed] = field(default_factory=dict)
    _reports: dict[str, TrainReport] = field(default_factory=dict)
    _seconds: dict[str, float] = field(default_factory=dict)
    _up: int = 0
    _down: int = 0

    def result(self) -> TrainedGroup:
        """What the federation takes: the sums, and for each site whether its upload is in them."""
        from protofed.guards.masking.messages import SumSession
        from protofed.guards.masking.server_party import TooFewSites

        round = next(iter(self.jobs.values()))[0].round
        session = SumSession(run=self.run, round=round, attempt=uuid.uuid4().hex)
        try:
            blob, loss, survivors = self._stages(session)
        except TooFewSites as problem:
            nothing = Failed(str(problem))
            return TrainedGroup(b"", tuple(self.failures.get(site, nothing) for site in self.jobs), self._cost())
        size, missing = Bytes(other=self.words.nbytes), Failed("it dropped out of the secure sum")
        each = tuple(
            Trained(b"", size, loss, self._reports[site].samples)
            if site in survivors
            else self.failures.get(site, missing)
            for site in self.jobs
        )
        return TrainedGroup(blob, each, self._cost())

    def _stages(self, session: "SumSession") -> tuple[bytes, dict[str, float], list[str]]:
        from protofed.guards.masking.server_party import ServerParty, TooFewSites

        bound = self.remembered.survivors(session.round)
        invited = self._invited(session.round, bound)
        adverts = self._trained(session, invited)
        names = sorted({name for report in self._reports.values() for name in report.losses})
        scale = float(max((report.samples for report in self._reports.values()), default=0) or 1)
        party = ServerParty(session, self.identities, self.words.size + len(names), self.words.grid.bits)
        for site, advert in adverts.items():
            self._take(site, party.take_advert, advert)
        roster = party.roster(self._acquainted())
        for site, body in self._stage("share", session, dict.fromkeys(party.listed, roster)):
            self._take(site, party.take_bundle, body)
        inboxes = party.inboxes()
        for site, body in self._stage("mask", session, inboxes, losses=tuple(names), scale=scale):
            self._take(site, party.take_masked, body)
        survivors = party.survivor_list()
        if len(party.survivors) < self.min_sites:
            raise TooFewSites(f"{len(party.survivors)} sites have sent numbers, and a round needs {self.min_sites}")
        if bound is not None and set(party.survivors) != bound:
            raise TooFewSites(f"this round can only be unmasked for {', '.join(sorted(bound))}, who must all come back")
        self.remembered.remember(session.round, party.survivors)
        total = self._unmasked(session, party, survivors)
        sums = encode(self.words.sums(total[: self.words.size]), "server").blob
        samples = sum(self._reports[site].samples for site in party.survivors) or 1
        losses = self.words.grid.numbers(total[self.words.size :]) * scale / samples
        return sums, dict(zip(names, losses.tolist(), strict=True)), party.survivors

    def _invited(self, round: int, bound: set[str] | None) -> list[str]:
        for site in self.jobs:
            if site in self.remembered.blamed(round):
                self.failures[site] = Failed("the other sites cannot read its shares")
            elif bound is not None and site not in bound:
                self.failures[site] = Failed("the sum of this round was to be unmasked without it")
        return [site for site in self.jobs if site not in self.failures]

    def _trained(self, session: "SumSession", invited: Sequence[str]) -> dict[str, bytes]:
        """The keys of those who have trained."""
        bodies = {site: encode_job(*self.jobs[site]) for site in invited}
        broadcast = sum(len(body) for body in bodies.values())
        adverts = dict(self._stage("train", session, bodies))
        self._down -= broadcast  # counted as what it is, a broadcast
        return adverts

    def _stage(
        self,
        stage: Stage,
        session: "SumSession",
        bodies: Mapping[str, bytes],
        losses: tuple[str, ...] = (),
        scale: float = 1.0,
    ) -> Iterator[tuple[str, bytes]]:
        """Ask everybody for a stage; yields what is in the answers, and notes who has dropped out."""
        header = StageRequest(stage=stage, session=session, clients=len(self.jobs), losses=losses, scale=scale)
        timeout = self.timeout if stage in ("train", "mask") else min(self.timeout, _SHORT_STAGE_SECONDS)
        begin, blames = time.perf_counter(), Counter[str]()
        self._down += sum(len(body) for body in bodies.values())
        for site, reply in self.ask({site: header.to_bytes(body) for site, body in bodies.items()}, timeout):
            self._seconds[stage] = time.perf_counter() - begin
            if isinstance(reply, Failed):
                self.failures[site] = reply
                continue
            try:
                report, body = read_stage_reply(stage, reply, site)
            except BadMessage as problem:
                self.failures[site] = Failed(str(problem))
                if isinstance(problem, SiteRefusal) and problem.blames in self.jobs:
                    blames[str(problem.blames)] += 1
                continue
            if report is not None:
                self._reports[site] = report
            self._up += len(body) if stage != "mask" else len(body) - self.words.nbytes
            yield site, body
        for site, number in blames.items():
            if 2 * number > len(bodies) - 1:
                self.remembered.blame(session.round, site)

    def _take(self, site: str, step: Callable[[str, bytes], None], content: bytes) -> None:
        """Hand on what a site has sent; one that has sent anything else has dropped out."""
        try:
            step(site, content)
        except BadMessage as problem:
            self.failures[site] = Failed(str(problem))

    def _acquainted(self) -> list[str]:
        """Sites that all know each other's keys: whoever is in the way of most others is left out first."""
        known = {site: set(report.members) for site, report in self._reports.items() if site not in self.failures}
        while True:
            strangers = {
                site: [other for other in known if other not in known[site] or site not in known[other]]
                for site in known
            }
            worst = max(known, key=lambda site: len(strangers[site]), default=None)
            if worst is None or not strangers[worst]:
                return list(known)
            others = ", ".join(strangers[worst])
            self.failures[worst] = Failed(f"it and {others} do not have each other's public keys among their members")
            del known[worst]

    def _unmasked(self, session: "SumSession", party: "ServerParty", survivors: bytes) -> "Words":
        """The sum, as soon as there are enough shares: whoever has sent numbers need not answer any more."""
        from protofed.guards.masking.server_party import TooFewSites

        for site, body in self._stage("unmask", session, dict.fromkeys(party.survivors, survivors)):
            try:
                if party.take_reveal(site, body):
                    return party.total()
            except (BadMessage, TooFewSites):  # a wrong share: others may do without it
                continue
        return party.total()

    def _cost(self) -> MaskingCost:
        return MaskingCost(self._up, self._down, dict(self._seconds))

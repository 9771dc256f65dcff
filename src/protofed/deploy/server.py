"""The server: waits for the sites, agrees with them on the run, trains with them, and has them keep the final model."""

import json
import logging
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from protofed.clients import Failed, refusal_in, unpack_answer
from protofed.deploy.census import Census, Hello
from protofed.deploy.changes import SumChanges, record_for_site
from protofed.deploy.engine import AcceptedRounds, SitesEngine
from protofed.deploy.keys import ServerKeys
from protofed.deploy.link import SuperLink
from protofed.deploy.protocol import SITES, RunTerms, SiteRequest
from protofed.deploy.requests import OpenRequests
from protofed.errors import BadMessage, UserError
from protofed.federation import Diverged, Federation, RunFolder, TooFewClients
from protofed.guards import parse_guard
from protofed.guards.masking import FEWEST
from protofed.metrics import ACCURACY
from protofed.records import encode
from protofed.runs.assembly import Assembly, assemble, resolved
from protofed.runs.extend import refuse_changes
from protofed.runs.opened import Run
from protofed.runs.options import Options, make_options
from protofed.runs.run import carry_out, write_description
from protofed.system import one_thread
from protofed.text import printable

if TYPE_CHECKING:
    from flwr.serverapp import Grid

log = logging.getLogger("protofed")

_HELLO_SECONDS = 60.0
_PAUSE = 1.0
_TRIES = 10
"""How often a round is begun again before the run is left to a later resume."""
_HELLOS = 3
"""How often a late site is asked what it holds; each time it is silent holds the others up."""
_MEMBERS = "sites.json"


@dataclass(frozen=True)
class WaitLimits:
    """How long the server waits, and for how many."""

    min_sites: int | None = None
    """Fewest sites to begin with and to close a round; without it all begin, and one closes a round."""
    round_timeout: float = 600.0
    wait: float = 600.0
    stay: float | None = None
    """Seconds for which late sites and requests to forget one are waited for after the last round; None: not at all."""


def serve(
    keys: ServerKeys,
    address: str,
    out: Path,
    user_options: Mapping[str, Any],
    limits: WaitLimits,
    *,
    resume: bool = False,
    callbacks: Sequence[Any] = (),
) -> Run:
    """Run a federation over sites; the folder is that of any run, without the sites' models."""
    if resume:
        Run(out).refuse_damaged()
        stored = Run(out).options
        refuse_changes(stored, user_options)
        user_options = {**stored, **user_options}
    options = make_options({**user_options, "data": SITES, "engine": "flower", "protocol": "one-per-domain"})
    if options.ensemble:
        raise UserError("--ensemble needs all test images in one place; omit it in a deployment")
    if options.metric != ACCURACY:
        raise UserError(
            f"--metric {options.metric} needs predictions for single images, which stay at the sites; each site "
            "finds all metrics of its own test images in its report.json"
        )
    if options.keep_messages and parse_guard(options.guard).secure:
        raise UserError("--keep-messages: with secure=on no single upload reaches the server; use only one of them")
    accepted = AcceptedRounds(out / "clients")
    folder = RunFolder(out, accepted)
    if not resume:
        folder.refuse_if_taken()
    elif Run(out).complete and limits.stay is None:
        log.warning("the run in %s is already complete", out)
        return Run(out)
    else:
        accepted.learn(folder.rounds())
    link = SuperLink(keys, address)
    link.start()
    try:
        with link.run() as grid, one_thread():
            return _Server(link, grid, folder, accepted, options, limits).run(resume, list(callbacks))
    finally:
        folder.release()
        link.end()


class _Server:
    """One run over the sites, from the first hello to the last finish."""

    def __init__(
        self,
        link: SuperLink,
        grid: "Grid",
        folder: RunFolder,
        accepted: AcceptedRounds,
        options: Options,
        limits: WaitLimits,
    ) -> None:
        self._link, self._options, self._limits = link, options, limits
        self._folder, self._accepted = folder, accepted
        self._engine = SitesEngine(
            grid, link.admit_members(), accepted, limits.round_timeout, link.identities, limits.min_sites or 1
        )
        self._identity = uuid.uuid4().hex
        self._refused_sites: set[str] = set()
        self._bad_hellos: dict[str, int] = {}
        """How often a site did not say in time what it holds, or said nonsense."""
        self._forgotten: set[str] = set()
        self._requests = OpenRequests(folder.path)
        self._federation: Federation | None = None

    def run(self, resume: bool, callbacks: list[Any]) -> Run:
        census = self._census(resume)
        assembly = self._agree(census)
        if not Run(self._folder.path).complete:
            self._begin(list(census.sites))
        if resume:
            self._folder.lock()
        else:
            self._folder.create()
        self._remember(census)
        result = carry_out(
            assembly,
            self._folder,
            resume,
            callbacks,
            self._engine,
            rounds=self._rounds,
            min_clients=self._limits.min_sites or 1,
        )
        if self._limits.stay is not None and result.summary["status"] != "diverged":
            self._stay(self._limits.stay)
        return result

    @property
    def _terms(self) -> RunTerms:
        assert self._engine.terms is not None, "terms come first"
        return self._engine.terms

    # Before the first round

    def _census(self, resume: bool) -> Census:
        """Who takes part and holds how much: as the sites say now, or as they said when the run began."""
        if not resume:
            members = list(self._engine.nodes)
            if not members:
                raise UserError("nobody can take part: there are no public keys of sites; see protofed deploy keys")
            self._refuse_too_few_members()
            hellos = self._alike(dict(sorted(self._hellos(members).items())))
            shapes = [hello.image_shape for hello in hellos.values()]
            return self._settled(Census.of(hellos, self._fixed_shape(shapes)))
        stored = json.loads((self._folder.path / _MEMBERS).read_text())
        self._identity = stored["run"]
        self._accepted.digests.update(stored.get("uploads", {}))
        self._learn_forgotten()
        self._engine.nodes = self._members()
        census = Census.read(stored["census"], _MEMBERS)
        if stored.get("coming") is not None and not self._counted() <= census.sites.keys():
            census = Census.read(stored["coming"], _MEMBERS)
        if not Run(self._folder.path).complete:
            self._hellos([name for name in census.sites if name not in self._forgotten])
        return census

    def _alike(self, hellos: dict[str, Hello]) -> dict[str, Hello]:
        """Without those that cannot take part with the others, where --min-sites lets the run begin without them."""
        different = Census.differing(hellos)
        if len(hellos) - len(different) < (self._limits.min_sites or len(hellos)):
            return hellos  # what is wrong is for the operator to put right
        for name, reason in different.items():
            log.warning("%s is turned away: %s", name, reason)
            self._refused_sites.add(name)
        return {name: hello for name, hello in hellos.items() if name not in different}

    def _refuse_too_few_members(self) -> None:
        """More sites than there are members would never come."""
        members, wanted = self._engine.nodes, self._limits.min_sites or 1
        if wanted > len(members):
            named = ", ".join(members) or "nobody"
            raise UserError(
                f"--min-sites {wanted} is more than the number of members, {named}; admit others, or lower it"
            )

    def _hellos(self, members: Sequence[str]) -> dict[str, Hello]:
        """What the members say of themselves, once enough of them are connected."""
        enough = min(self._limits.min_sites or len(members), len(members))
        deadline = time.monotonic() + self._limits.wait
        hellos: dict[str, Hello] = {}
        said_who_is_missing = False
        while len(hellos) < enough:
            missing = [name for name in members if name not in hellos]
            if time.monotonic() > deadline:
                raise UserError(
                    f"{len(hellos)} of {enough} sites have connected in time; missing: {', '.join(missing)}"
                )
            hellos |= self._ask_hello(missing)
            if not said_who_is_missing and len(hellos) < enough:
                log.warning("waiting for %s", ", ".join(name for name in members if name not in hellos))
                said_who_is_missing = True
            if len(hellos) < enough:
                time.sleep(_PAUSE)
        return hellos

    def _ask_hello(self, names: Sequence[str]) -> dict[str, Hello]:
        """What those of them that are connected say of themselves; of the others, and of nonsense, it is told here."""
        online = self._online()
        hellos: dict[str, Hello] = {}
        for name, reply in self._engine.ask({n: SiteRequest("hello") for n in names if n in online}, _HELLO_SECONDS):
            problem = reply.reason if isinstance(reply, Failed) else refusal_in(reply, name)
            if problem is None and not isinstance(reply, Failed):
                try:
                    hellos[name] = Hello.read(unpack_answer(reply, name)[0].get("hello"), name)
                    continue
                except BadMessage as error:
                    problem = str(error)
            self._bad_hellos[name] = self._bad_hellos.get(name, 0) + 1
            log.warning("%s: %s", name, printable(str(problem)))
        return hellos

    def _settled(self, census: Census) -> Census:
        """Name the network that fits the images, so that every site takes the same, and the shape that it wants."""
        self._options = resolved(self._options, census.image_shape)
        side = self._options.image_size
        return census if side is None else replace(census, image_shape=(census.image_shape[0], side, side))

    def _fixed_shape(self, shapes: Sequence[tuple[int, int, int]]) -> tuple[int, int, int] | None:
        """The shape of images where the run's options fix it, or a pretrained network, which has a size of its own."""
        channels = self._options.settings_for("data").get("channels")
        options = resolved(self._options, min(shapes, key=lambda shape: min(shape[1:])))
        side = options.image_size
        if side is None:
            return None
        return int(channels or max(shape[0] for shape in shapes)), side, side

    def _agree(self, census: Census) -> Assembly:
        """Assemble the run for these sites, and send its terms from now on."""
        dataset = census.dataset(self._options.settings_for("data").get("normalise"))
        assembly = assemble(self._options, self._folder.clients, dataset)
        self._engine.terms = RunTerms.of(self._identity, self._options, census)
        return assembly

    def _begin(self, sites: Sequence[str]) -> None:
        """Every site checks the terms, and may refuse with a reason; a silent one gets them with its first job."""
        request = SiteRequest("begin", self._engine.terms)
        refusals = []
        for name, reply in self._engine.ask(dict.fromkeys(sites, request), self._limits.round_timeout):
            problem = None if isinstance(reply, Failed) else refusal_in(reply, name)
            if isinstance(reply, Failed):
                log.warning("%s has not answered yet: %s", name, printable(reply.reason))
            elif problem is not None:
                refusals.append(f"{name}: {problem}")
        if len(sites) - len(refusals) < (self._limits.min_sites or len(sites)):
            raise UserError(f"the run does not start; {'; '.join(refusals)}")
        for refusal in refusals:
            log.warning("%s", refusal)

    def _remember(self, census: Census, coming: Census | None = None) -> None:
        """Who takes part; `coming`: with a site that is being added, so that a kill leaves one or the other."""
        content: dict[str, Any] = {"run": self._identity, "census": census.as_dict()}
        if coming is not None:
            content["coming"] = coming.as_dict()
        self._folder.write_json(_MEMBERS, {**content, "uploads": self._accepted.digests})

    def _learn_forgotten(self) -> None:
        """Those whom the rounds so far name."""
        events = [event for line in self._folder.rounds() for event in line["events"]]
        self._forgotten |= {_site(event["client"]) for event in events if event["event"] == "forgotten"}

    def _members(self) -> dict[str, int]:
        """The nodes of those who may take part; who was forgotten is shut out."""
        return {name: node for name, node in self._link.admit_members().items() if name not in self._forgotten}

    # Round by round

    def _rounds(self, federation: Federation) -> Iterator[dict[str, Any]]:
        """The rounds, each after a check of the members; one that too few took part in is begun again."""
        tries, self._federation = 0, federation
        self._learn_forgotten()  # a server that was killed may have got no further than to commit it
        while federation.goes_on:
            self._update_members(federation)
            try:
                record = next(federation.rounds())
            except Diverged:
                self._finish_run(federation)
                raise
            except TooFewClients as problem:
                tries += 1
                reason = str(problem).splitlines()[0]
                if tries == _TRIES:
                    raise UserError(
                        f"{reason}; tried {tries} times; --resume continues when the sites are back"
                    ) from None
                log.warning("%s; trying again", reason)
                time.sleep(_PAUSE * tries)
                self._wait_for_enough(federation.rounds_done)
                continue
            tries = 0
            self._remember(self._terms.census)
            yield record
            self._answer_requests(federation)
        self._add_late(federation)
        if self._limits.stay is None:
            self._finish_run(federation)

    def _wait_for_enough(self, round: int) -> None:
        """Until so many are connected that a round may come about: without them, trying again is in vain."""
        secure = parse_guard(self._options.guard).secure
        fewest = max(self._limits.min_sites or 1, FEWEST if secure else 1)
        deadline, said = time.monotonic() + self._limits.wait, False
        while (missing := self._engine.missing_for(round, self._online(), fewest)) and time.monotonic() < deadline:
            if not said:
                log.warning("waiting for %s", missing)
                said = True
            time.sleep(_PAUSE)

    def _online(self) -> set[str]:
        return {node.name for node in self._link.nodes() if node.online}

    def _update_members(self, federation: Federation) -> None:
        """Shut out sites whose key was revoked, and let in those that come late."""
        self._engine.nodes = self._members()
        self._refuse_too_few_members()
        census = self._terms.census
        late = [name for name in self._engine.nodes if name not in census.sites and name not in self._refused_sites]
        if not late or self._engine.must_repeat(federation.rounds_done):
            return
        hellos = self._ask_hello(late)
        for name in late:
            if self._bad_hellos.get(name, 0) >= _HELLOS:
                self._turn_away(federation, name, f"asked {_HELLOS} times, it has not said what it holds")
        for name, hello in hellos.items():
            before = self._terms
            try:
                larger = census.with_site(name, hello)
                assembly = self._agree(larger)
                federation.admit(assembly.prepared)
            except (UserError, BadMessage) as problem:
                self._engine.terms = before
                fixed = "the method's clients are fixed from the start"
                self._turn_away(federation, name, str(problem) if isinstance(problem, UserError) else fixed)
                continue
            census = larger
            self._remember(census)
            write_description(assembly, federation, self._folder)
            federation.notes.append({"client": f"{name}-0", "event": "joined", "reason": "it arrived late"})

    def _turn_away(self, federation: Federation, name: str, reason: str) -> None:
        self._refused_sites.add(name)
        federation.notes.append({"client": f"{name}-0", "event": "turned away", "reason": printable(reason)})
        log.warning("%s is turned away: %s", name, printable(reason))

    # After the exchange

    def _stay(self, seconds: float) -> None:
        """Wait for late sites and for requests, and in the end have the sites keep what they would use then."""
        federation = self._federation
        assert federation is not None, "it was made for the rounds"
        log.warning("the run is complete; for %g s sites can still join or be forgotten", seconds)
        deadline = time.monotonic() + seconds
        while True:
            self._answer_requests(federation)
            self._add_late(federation)
            if time.monotonic() >= deadline:
                break
            time.sleep(_PAUSE)
        self._finish_run(federation)

    def _answer_requests(self, federation: Federation) -> None:
        """Forget those whom the operator names, or say why not."""
        for client in self._requests.clients():
            try:
                changes = SumChanges(federation, self._accepted, self._options.method)
                before = self._engine.nodes
                record = changes.forget(client, self._requests.state_of(client), self._shut_out)
            except UserError as problem:
                log.warning("%s", problem)
                self._requests.refuse(client, str(problem))
                continue
            log.warning("%s is forgotten: its share is removed from the result, and it no longer takes part", client)
            self._requests.answer(client, record)
            self._tell_forgotten(_site(client), record, before)

    def _shut_out(self, client: str) -> None:
        self._forgotten.add(_site(client))
        self._engine.nodes = {name: node for name, node in self._engine.nodes.items() if name not in self._forgotten}

    def _tell_forgotten(self, name: str, record: Mapping[str, Any], nodes: dict[str, int]) -> None:
        """The last thing that a site hears: its part is out."""
        members, self._engine.nodes = self._engine.nodes, nodes
        request = SiteRequest("forgotten", self._terms, None, record_for_site(record, self._identity))
        for _, reply in self._engine.ask({name: request}, self._limits.round_timeout):
            problem = reply.reason if isinstance(reply, Failed) else refusal_in(reply, name)
            if problem is not None:
                log.warning("%s could not be told that it is forgotten: %s", name, printable(problem))
        self._engine.nodes = members

    def _counted(self) -> set[str]:
        """The sites that have a part in the result."""
        return {_site(client) for client in self._folder.committed_clients()} if self._folder.rounds() else set()

    def _add_late(self, federation: Federation) -> None:
        """Add the part of every member that is here now and has none in the result, where the result is a sum."""
        if not SumChanges(federation, self._accepted, self._options.method).adds:
            return
        self._engine.nodes = self._members()
        others = self._counted() | self._refused_sites
        if self._limits.stay is None:
            others |= self._terms.census.sites.keys()  # who was left out of the exchange holds nobody up again
        late = [name for name in self._engine.nodes if name not in others]
        hellos = self._ask_hello(late) if late else {}
        self._refused_sites |= {name for name in late if self._bad_hellos.get(name, 0) >= _HELLOS}
        for name, hello in hellos.items():
            census, before = self._terms.census, self._terms
            try:
                larger = census if name in census.sites else census.with_site(name, hello)
                assembly = self._agree(larger)
                self._remember(census, coming=larger)
                SumChanges(federation, self._accepted, self._options.method).add(f"{name}-0", assembly.prepared)
            except (UserError, BadMessage) as problem:
                self._engine.terms = before
                self._remember(census)
                self._bad_hellos[name] = self._bad_hellos.get(name, 0) + 1
                log.warning("%s is not added: %s", name, printable(str(problem)))
                continue
            self._remember(larger)
            write_description(assembly, federation, self._folder)
            log.warning("%s arrived late, and its share was added to the result", name)

    def _finish_run(self, federation: Federation) -> None:
        """Send every site what it would use now, for it to keep its final model; those away have time to come back."""
        round = federation.rounds_done
        requests = {}
        for client in federation.context.partition.clients:
            body = encode(federation.broadcast(round, client), "server").blob
            requests[_site(client)] = SiteRequest("finish", self._engine.terms, self._accepted.last(client), body)
        deadline = time.monotonic() + self._limits.round_timeout
        while absent := self._send_finish(requests, max(deadline - time.monotonic(), _PAUSE)):
            requests = {name: requests[name] for name in absent}
            if time.monotonic() > deadline:
                for name, reason in absent.items():
                    log.warning("%s has not stored its final model: %s", name, reason)
                break
            time.sleep(_PAUSE)

    def _send_finish(self, requests: Mapping[str, SiteRequest], seconds: float) -> dict[str, str]:
        """The sites that have not answered, and why; a refusal is an answer."""
        absent = {}
        for name, reply in self._engine.ask(requests, seconds):
            if isinstance(reply, Failed):
                absent[name] = printable(reply.reason)
            elif (refusal := refusal_in(reply, name)) is not None:
                log.warning("%s has not stored its final model: %s", name, refusal)
        return absent


def _site(client: str) -> str:
    """The site of a client."""
    return client.rpartition("-")[0]

"""A site: it answers the server's requests with its own code, on its own images, within its own policy.

Its folder of state holds everything it remembers:

    sent.jsonl            every message that left: when, run, round, kind, bytes, hash
    ledger.jsonl          what it has spent of its budget, and runs/RUN/answers/: see ledger.py
    runs/RUN/clients/     the client's model and memory
    runs/RUN/             model.safetensors and report.json, once the run is over; forgotten.json, once its part is out
"""

import hashlib
import json
import logging
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

from safetensors.torch import save

from protofed.clients import (
    ClientSide,
    ClientStore,
    Evaluate,
    Failed,
    Job,
    Project,
    Result,
    Score,
    Train,
    decode_job,
    encode_result,
    pack,
    refusal_in,
)
from protofed.data import Dataset, Images, ReadOptions, load
from protofed.deploy.census import Hello
from protofed.deploy.keys import SiteKeys
from protofed.deploy.known_tensors import KeptTensors, lacking
from protofed.deploy.ledger import SiteLedger
from protofed.deploy.masked_site import MaskedUploads, site_identity
from protofed.deploy.masked_stages import StageRequest
from protofed.deploy.policy import Policy, Refused
from protofed.deploy.protocol import SITES, RunTerms, SiteRequest, fingerprint
from protofed.errors import BadMessage, NotFinite, UserError
from protofed.guards.masking import FEWEST
from protofed.inference.changed import FORGOTTEN
from protofed.records import Bytes, Message
from protofed.runs.assembly import assemble
from protofed.runs.metrics import own_metrics
from protofed.system import make_private, one_thread, write_atomically
from protofed.text import size

log = logging.getLogger("protofed")

_OUR_ERRORS = (BadMessage.__name__, NotFinite.__name__, UserError.__name__)
"""Errors whose texts name fields and options, never data."""


@dataclass(frozen=True)
class SiteData:
    """Where a site's images are and how they are read."""

    spec: str
    labels: str | None = None
    classes: str | None = None
    """All classes of the federation, where the site lacks some."""
    reading: ReadOptions | None = None

    def read(self, name: str, shape: tuple[int, int, int] | None = None) -> Dataset:
        """The images as one domain with the name of the site, in their own shape or the one asked for."""
        channels, size = (None, None) if shape is None else (shape[0], shape[1:])
        dataset = load(self.spec, labels=self.labels, channels=channels, image_size=size, reading=self.reading)
        if len(dataset.domains) != 1:
            raise UserError(f"{self.spec} holds the domains {', '.join(dataset.domains)}; a site has only its own")
        (domain,) = dataset.domains.values()
        classes = self._class_names(dataset.classes)
        place = {own: classes.index(own) for own in dataset.classes}
        places = [place[own] for own in dataset.classes]
        # The server counts training and test images only.
        kept, warnings = domain.validation, dataset.warnings
        if kept is not None:
            warnings += (f"{len(kept)} validation images are not used in a deployment; move them to train",)
        mine = replace(domain, name=name, validation=None).mapped(lambda images, _: _relabelled(images, places))
        return replace(dataset, classes=classes, domains={name: mine}, warnings=warnings)

    def _class_names(self, own: Sequence[str]) -> tuple[str, ...]:
        if self.classes is None:
            return tuple(own)
        named = tuple(part.strip() for part in self.classes.split(",") if part.strip())
        strange = [name for name in own if name not in named]
        if strange:
            raise UserError(
                f"{self.spec} has images of class {strange[0]}, which is not among --classes {self.classes}"
            )
        return named


def _relabelled(images: Images, places: list[int]) -> Images:
    return Images(images.x, images.y.new_tensor(places)[images.y])


def _without_data(reason: str, trace: str) -> Failed:
    """A failure that may be reported and logged: the text of an unexpected error may quote data."""
    kind, _, _ = reason.partition(":")
    where = [line.strip() for line in trace.splitlines() if line.startswith('  File "')]
    log.error("%s in %s", kind, "; ".join(where))
    text = reason if kind in _OUR_ERRORS else f"{kind}; its own log says where"
    return Failed(text, not_finite=kind == NotFinite.__name__)


class Site:
    """Answers one request after the other."""

    def __init__(
        self,
        name: str,
        data: SiteData,
        state: Path,
        policy: Policy,
        *,
        weights: str | None = None,
        plugins: Sequence[str] = (),
        device: str = "cpu",
        keys: SiteKeys | None = None,
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.name = name
        self._keys = keys
        self.finished = False
        """Whether a run was brought to its end."""
        self._data = data
        self._state = state
        self._policy = policy
        self._own = {"weights": weights, "plugin": list(plugins), "device": device, "data": SITES}
        self._run: _SiteRun | None = None
        self._tensors = KeptTensors()
        self._tell = tell
        make_private(state)
        self._ledger = SiteLedger(state, policy)

    @property
    def client(self) -> str:
        """The id of its only client."""
        return f"{self.name}-0"

    @cached_property
    def dataset(self) -> Dataset:
        """Its images in their own shape."""
        return self._data.read(self.name)

    def answer(self, envelope: bytes) -> bytes:
        """The reply to a message; errors are replies, too, and every reply is logged."""
        request: SiteRequest | None = None
        try:
            request = SiteRequest.from_bytes(envelope)
            body = self._tensors.complete(request.body, request.tensors)
            if body is None:
                kind, round, reply = "lacking", None, lacking()
            else:
                kind, round, reply = self._reply(replace(request, body=body, tensors=()))
            self._policy.check_size(len(reply))
        except (BadMessage, Refused, UserError) as problem:
            kind, round, reply = "refusal", None, encode_result(Failed(str(problem)))
        except Exception as error:
            failure = _without_data(type(error).__name__, traceback.format_exc())
            kind, round, reply = "failure", None, encode_result(failure)
        self._note(request, kind, round, reply)
        self._show(kind, round, reply)
        return reply

    def _reply(self, request: SiteRequest) -> tuple[str, int | None, bytes]:
        if request.kind == "hello":
            return "hello", None, pack({"hello": asdict(Hello.of(self.dataset))})
        assert request.terms is not None
        run = self._run_with(request.terms)
        if request.kind == "begin":
            return "ready", None, pack({"ready": version("protofed")})
        if request.kind == "finish":
            run.finish(request, self._state)
            self.finished = True
            return "done", None, pack({"done": run.terms.run})
        if request.kind == "forgotten":
            run.keep_record(request)
            self.finished = True
            return "forgotten", None, pack({"done": run.terms.run})
        if request.kind == "mask":
            return run.mask(request)
        job, message = decode_job(request.body, "server")
        if isinstance(job, Train) and run.secure:
            raise Refused("with secure=on no single upload leaves, only masked ones")
        return (
            type(job).__name__.lower(),
            job.round + 1,
            run.answer(job, message, request.accepted, self._policy.check_size),
        )

    def _run_with(self, terms: RunTerms) -> "_SiteRun":
        """The run with these terms: the present one, or a new one where they have changed."""
        if self._run is None or self._run.terms != terms:
            if terms.protofed != version("protofed"):
                raise Refused(
                    f"it runs protofed {version('protofed')}, the server {terms.protofed}; install the same version"
                )
            options = terms.options_here(**self._own)
            if ".py:" in options.method:
                raise Refused(f"{options.method} is a file on the server; sites run only what is installed there")
            guard = terms.options.get("guard")
            self._policy.admit(options.method, options.training_plan().rounds, None if guard is None else str(guard))
            self._run = _SiteRun(
                self.name,
                self.client,
                terms,
                self._data,
                self.dataset,
                self._own,
                self._state,
                self._ledger,
                self._keys,
                self._policy.secure_sites or FEWEST,
            )
        return self._run

    def _show(self, kind: str, round: int | None, reply: bytes) -> None:
        """One line for the console: what left, and what is spent."""
        where = "" if round is None else f"round {round}: "
        if kind == "refusal":
            self._tell(f"{where}refused: {refusal_in(reply, self.name)}")
        elif kind == "train":
            self._tell(f"{where}an upload of {size(len(reply))} leaves; {self._ledger.budget().in_words(self._policy)}")
        elif kind == "forgotten":
            self._tell(
                f"its share is removed from the result, and it no longer takes part; {FORGOTTEN} says what was removed"
            )
        elif kind in ("evaluate", "project"):
            self._tell(f"{where}a score leaves, {size(len(reply))}")
        else:
            self._tell(f"{kind}, {size(len(reply))}")

    def _note(self, request: SiteRequest | None, kind: str, round: int | None, reply: bytes) -> None:
        line = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "run": request.terms.run if request is not None and request.terms is not None else None,
            "round": round,
            "kind": kind,
            "bytes": len(reply),
            "sha256": hashlib.sha256(reply).hexdigest(),
        }
        with (self._state / "sent.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")


class _SiteRun:
    """One run at a site."""

    def __init__(
        self,
        name: str,
        client: str,
        terms: RunTerms,
        data: SiteData,
        dataset: Dataset,
        own: dict[str, Any],
        state: Path,
        ledger: SiteLedger,
        keys: SiteKeys | None,
        fewest: int,
    ) -> None:
        self.terms = terms
        self._client = client
        self._domain = name
        census = terms.census
        if Hello.of(dataset) != census.sites.get(name):
            raise Refused("its images differ from those it announced; they must not change during a run")
        options = terms.options_here(**own)
        if fingerprint(options) != terms.weights:
            raise Refused(f"it needs the same --weights as the server (sha256 {terms.weights}), not {options.weights}")
        if dataset.image_shape != census.image_shape:
            dataset = data.read(name, census.image_shape)
        self._folder = state / "runs" / terms.run
        self._store = ClientStore(self._folder / "clients")
        self._store.folder.mkdir(parents=True, exist_ok=True)
        with one_thread():
            stand_in = census.dataset(options.settings_for("data").get("normalise"), dataset.domains[name])
            assembly = assemble(options, self._store.folder, stand_in)
            self._side = ClientSide(assembly.prepared)
        context = assembly.context
        costs = assembly.prepared.privacy_ledger()

        def epsilon_of(rounds: Sequence[int]) -> float | None:
            return costs.spent_by(client, tuple(rounds)) if context.guard.promises else None

        self._ledger = ledger.run(terms.run, self._folder / "answers", epsilon_of, context.guard.delta)
        self._ledger.hold_to(
            {"guard": context.guard.model_dump(), "method": str(context.method), "plan": str(context.plan)}
        )
        self.secure = context.guard.secure
        if self.secure:
            site_identity(keys)
        self._masked = MaskedUploads(assembly.prepared, client, keys, self._folder, fewest)

    def answer(self, job: Job, message: Message, accepted: int | None, check_size: Callable[[int], None]) -> bytes:
        """The answer to a job. It is sealed before it leaves, and the same one is given when it is asked again."""
        failed: list[Failed] = []

        def make() -> bytes | None:
            result = self.perform(job, message, accepted)
            if isinstance(result, Failed):
                failed.append(result)
                return None
            reply = encode_result(result)
            check_size(len(reply))
            if isinstance(job, Train):
                self._store.keep_proposal(self._client, job.round, self._ledger.state_of(job.round))
            return reply

        if isinstance(job, Train):
            sealed = self._ledger.upload(job.round, make)
            if sealed is not None:
                self._store.propose_again(self._client, job.round, self._ledger.state_of(job.round))
        else:
            question = f"{job}{accepted}".encode() + message.blob
            sealed = self._ledger.score(type(job).__name__.lower(), job.round, question, make)
        return encode_result(failed[0]) if sealed is None else sealed

    def perform(self, job: Job, message: Message, accepted: int | None) -> Result:
        """Do a job of this site's client, from the state after the last round that the server accepted."""
        is_own = isinstance(job, Train | Project) and job.client == self._client
        is_own |= isinstance(job, Evaluate) and (job.client == self._client or job.domain == self._domain)
        if not is_own:
            raise Refused(f"{type(job).__name__.lower()} is not done here for others")
        if isinstance(job, Evaluate) and job.probabilities:
            raise Refused("predictions for single images stay here; only scores are sent")
        self._settle(job.round, accepted)
        with one_thread():
            result = self._side.perform(job, message)
        return _without_data(result.reason, result.trace) if isinstance(result, Failed) else result

    def mask(self, request: SiteRequest) -> tuple[str, int, bytes]:
        """A stage of a secure sum."""
        stage, body = StageRequest.read(request.body)
        if not self.secure or stage.session.run != self.terms.run:
            raise Refused("this run has no such secure sum")
        if stage.stage == "train":
            job, message = decode_job(body, "server")
            if not isinstance(job, Train) or job.round != stage.session.round:
                raise Refused("a secure sum starts with the training of its round")
            # What a round may cost is settled before it is trained; it costs that once, however often it is begun.
            self._ledger.upload(job.round, lambda: f"masked upload of round {job.round + 1}".encode())
            proposed = self._store.is_proposed(self._client, job.round)

            def training() -> Result:
                return self.perform(job, message, request.accepted)

            reply = self._masked.train(stage, job, message, proposed, training, self.terms.as_dict())
        else:
            reply = self._masked.go_on(stage, body)
        return f"masked {stage.stage}", stage.session.round + 1, reply

    def finish(self, request: SiteRequest, state: Path) -> None:
        """Keep the final model, and report how it does on the site's own test images."""
        round = len(self.terms.options_here(data=SITES).training_plan().epochs)
        self._settle(round, request.accepted)
        job = Evaluate("personal", round, self._client, self._domain)
        message = Message(request.body, Bytes(other=len(request.body)))
        with one_thread():
            weights, probabilities, right = self._side.examine(job, message)
        predicted = probabilities.argmax(1)
        classes = self.terms.census.classes
        per_class = {
            name: asdict(Score(int(((predicted == right) & (right == k)).sum()), int((right == k).sum())))
            for k, name in enumerate(classes)
        }
        lines = [json.loads(line) for line in (state / "sent.jsonl").read_text().splitlines()]
        sent = [line for line in lines if line["run"] == self.terms.run]
        report = {
            "run": self.terms.run,
            "method": self.terms.options["method"],
            "rounds": round,
            "accuracy": int((predicted == right).sum()) / max(len(right), 1),
            "per_class": per_class,
            "metrics": own_metrics(right.cpu().numpy(), probabilities.cpu().numpy(), classes),
            "sent": {"messages": len(sent), "bytes": sum(line["bytes"] for line in sent)},
            "spent": self._ledger.spent(),
        }
        write_atomically(self._folder / "model.safetensors", save(weights))
        write_atomically(self._folder / "report.json", json.dumps(report, indent=2).encode() + b"\n")

    def keep_record(self, request: SiteRequest) -> None:
        """What the server says to have taken out of the result, beside the site's own model."""
        try:
            record = json.loads(request.body)
        except ValueError:
            raise BadMessage("server: its record of what was removed cannot be read") from None
        write_atomically(self._folder / FORGOTTEN, json.dumps(record, indent=2).encode() + b"\n")

    def _settle(self, round: int, accepted: int | None) -> None:
        """Go back to, or on to, the state after the last round that the server accepted.

        A proposal is kept as such until a later round begins, because the server commits a round after its evaluation.
        """
        if accepted is not None and accepted < round:
            self._store.commit([self._client], accepted)
        if accepted != round:
            self._store.withdraw_all()

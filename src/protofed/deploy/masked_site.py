"""Secure sums at a site: it trains, keeps its upload to itself, and lets out masked numbers only.

What it keeps in the run's folder, so that a restart or a server that begins a round again gains nothing:

    masked.json     the round, what was trained from, and for whom the sum of this round was unmasked
    masked.words    the upload of that round on the grid
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protofed.clients import Failed, Prepared, Result, Train, Trained, encode_result, pack
from protofed.deploy.keys import SiteKeys, public_key
from protofed.deploy.masked_stages import StageRequest, TrainReport, stage_reply
from protofed.deploy.policy import Refused
from protofed.errors import UserError
from protofed.guards import UploadWords
from protofed.guards.masking.messages import SumSession, Survivors
from protofed.guards.masking.site_party import SiteIdentity, SiteParty, UnreadableShares
from protofed.records import Message, decode
from protofed.system import write_atomically

Training = Callable[[], Result]


def site_identity(keys: SiteKeys | None) -> SiteIdentity:
    """Who a site is and whom it knows; refused where nobody has told it the others' keys."""
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    members = {} if keys is None else {path.stem: public_key(path) for path in sorted(keys.members.glob("*.pub"))}
    if keys is None or not members:
        raise Refused(
            "secure=on needs the public keys of all sites in the folder members of its keys; see protofed deploy keys"
        )
    private = load_ssh_private_key(keys.private.read_bytes(), None)
    if not isinstance(private, EllipticCurvePrivateKey):
        raise UserError(f"{keys.private} is not a site's key")
    if keys.name not in members or members[keys.name] != private.public_key():
        raise Refused(f"the folder members of its keys lacks its own public key, {keys.name}.pub")
    return SiteIdentity(keys.name, private, members)


@dataclass(frozen=True)
class _KeptUpload:
    """What a site remembers of the last round that it trained for a secure sum."""

    round: int
    source: str
    """A hash of everything that the upload was made from."""
    samples: int
    loss: dict[str, float]
    survivors: tuple[str, ...] | None = None
    """For whom the site has helped to unmask the sum."""


class MaskedUploads:
    """The secure sums of one run at a site."""

    def __init__(self, prepared: Prepared, client: str, keys: SiteKeys | None, folder: Path, fewest: int) -> None:
        self._prepared = prepared
        self._client = client
        self._keys = keys
        self._fewest = fewest
        self._file, self._words_file = folder / "masked.json", folder / "masked.words"
        self._party: SiteParty | None = None

    def train(
        self, request: StageRequest, job: Train, message: Message, proposed: bool, training: Training, terms: Any
    ) -> bytes:
        """Train, unless that was done already, keep the upload, and advertise keys for its sum."""
        source = hashlib.sha256(json.dumps([terms, request.clients]).encode() + message.blob).hexdigest()
        self._refuse_other_round(job.round, source)
        kept = self._kept()
        known = kept is not None and (kept.round, kept.source) == (job.round, source)
        if not known or not proposed:
            result = training()
            if not isinstance(result, Trained):
                return encode_result(result)
            if not known:
                self._keep(job.round, source, result, request.clients)
        kept = self._kept()
        assert kept is not None
        identity = site_identity(self._keys)
        self._party = SiteParty(identity, request.session, self._fewest)
        report = TrainReport(
            samples=kept.samples, losses=tuple(sorted(kept.loss)), members=tuple(sorted(identity.members))
        )
        return stage_reply("train", self._party.advertise(), report)

    def go_on(self, request: StageRequest, body: bytes) -> bytes:
        """A later stage of the sum that the last training has begun."""
        party = self._party_of(request.session)
        if request.stage == "share":
            return stage_reply("share", party.share(body))
        if request.stage == "mask":
            try:
                return stage_reply("mask", party.mask(body, self._words(request)))
            except UnreadableShares as problem:
                return pack({"result": "failed", **asdict(Failed(str(problem))), "blames": problem.sender})
        self._bind(Survivors.read(body, "server").names)
        return stage_reply("unmask", party.unmask(body))

    def _party_of(self, session: SumSession) -> SiteParty:
        if self._party is None or self._party.session != session:
            raise Refused("it does not know this secure sum: another was started since, or it was restarted")
        return self._party

    def _refuse_other_round(self, round: int, source: str) -> None:
        """The difference of two sums of one round would show the upload of whoever is in one of them only."""
        kept = self._kept()
        if kept is None or kept.survivors is None:
            return
        if round < kept.round or (round == kept.round and source != kept.source):
            raise Refused(f"it has already helped to unmask round {kept.round + 1}, and trains nothing else for it")

    def _bind(self, survivors: tuple[str, ...]) -> None:
        """Remember for whom a round is unmasked before it is: for others it never will be."""
        kept = self._kept()
        assert kept is not None
        if kept.survivors is not None and set(kept.survivors) != set(survivors):
            raise Refused(f"it has already helped to unmask round {kept.round + 1} for another list of survivors")
        write_atomically(self._file, json.dumps(asdict(replace(kept, survivors=survivors))).encode())

    def _keep(self, round: int, source: str, result: Trained, clients: int) -> None:
        upload = decode(result.blob, self._prepared.templates.upload, self._client)
        words = self._layout(clients).of(upload, self._client)
        write_atomically(self._words_file, words.tobytes())
        kept = _KeptUpload(round, source, result.samples, result.loss)
        write_atomically(self._file, json.dumps(asdict(kept)).encode())

    def _kept(self) -> _KeptUpload | None:
        if not self._file.exists():
            return None
        content = json.loads(self._file.read_bytes())
        survivors = content.pop("survivors")
        return _KeptUpload(**content, survivors=None if survivors is None else tuple(survivors))

    def _words(self, request: StageRequest) -> NDArray[Any]:
        """The upload, and the losses that are to be added up with it; one out of range is cut off there."""
        kept = self._kept()
        assert kept is not None
        grid = self._layout(request.clients).grid
        losses = np.array([kept.loss.get(name, 0.0) * kept.samples / request.scale for name in request.losses])
        cut = np.nan_to_num(losses, nan=0.0, posinf=grid.largest, neginf=-grid.largest)
        extra = grid.words(np.clip(cut, -grid.largest, grid.largest), self._client)
        upload = np.frombuffer(self._words_file.read_bytes(), dtype=grid.word)
        return np.concatenate([upload, extra])

    def _layout(self, clients: int) -> UploadWords:
        context = self._prepared.context
        return UploadWords(clients, context.sizes, self._prepared.templates.upload, context.guard.secure_range)

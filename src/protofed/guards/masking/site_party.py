"""A site's side of a secure sum. It trusts nobody but the keys that it was given beforehand."""

import hashlib
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from protofed.errors import BadMessage
from protofed.guards.masking import FEWEST, crypto, threshold
from protofed.guards.masking.crypto import Words
from protofed.guards.masking.messages import (
    KeyAdvert,
    Reveal,
    Roster,
    ShareBundle,
    ShareInbox,
    SumSession,
    Survivors,
)

_STAGES = ("advertise", "share", "mask", "unmask")
_SERVER = "server"


@dataclass(frozen=True)
class SiteIdentity:
    """Who a site is, and whom it knows."""

    name: str
    private: EllipticCurvePrivateKey
    members: Mapping[str, EllipticCurvePublicKey]
    """The public keys of all sites, which it was given by another way than through the server."""


class UnreadableShares(BadMessage):
    """A site's shares do not open at another one: it, or the server, has not kept to the protocol."""

    def __init__(self, sender: str) -> None:
        super().__init__(f"{_SERVER}: the shares of {sender} do not open; was it given another list of members?")
        self.sender = sender


class SiteParty:
    """One sum at one site: each stage is gone through once, and the same request again gets the same answer."""

    def __init__(self, identity: SiteIdentity, session: SumSession, fewest: int = FEWEST) -> None:
        self.session = session
        self._fewest = fewest
        self._identity = identity
        self._cipher, self._mask_key = X25519PrivateKey.generate(), X25519PrivateKey.generate()
        self._seed = secrets.token_bytes(crypto.KEY_BYTES)
        self._done: dict[str, tuple[bytes, bytes]] = {}
        self._roster: dict[str, KeyAdvert] = {}
        self._digest = b""
        self._shares: dict[str, bytes] = {}
        """Of each site whose masks are in the sum: this site's share of its seed, and of its mask key."""

    @property
    def roster(self) -> list[str]:
        """Everybody who agreed on masks."""
        return list(self._roster)

    def advertise(self) -> bytes:
        """The public keys, signed."""
        return self._once("advertise", b"", self._advert)

    def share(self, roster: bytes) -> bytes:
        """The shares of this site's secrets for those on the server's list, once the list is found right."""
        return self._once("share", roster, lambda: self._bundle(Roster.read(roster, _SERVER)))

    def mask(self, inbox: bytes, numbers: Words) -> bytes:
        """The masked numbers, unsigned words, once the others' shares are here."""
        return self._once("mask", inbox, lambda: self._masked(ShareInbox.read(inbox, _SERVER), numbers))

    def unmask(self, survivors: bytes) -> bytes:
        """Shares of one secret of each site: of its seed if its numbers have come, else of its mask key."""
        return self._once("unmask", survivors, lambda: self._reveal(Survivors.read(survivors, _SERVER)))

    def _once(self, stage: str, request: bytes, answer: Callable[[], bytes]) -> bytes:
        digest = hashlib.sha256(request).digest()
        if stage in self._done:
            before, reply = self._done[stage]
            if before != digest:
                raise BadMessage(f"{_SERVER}: stage {stage} of this sum was requested before with different content")
            return reply
        if len(self._done) != _STAGES.index(stage):
            raise BadMessage(f"{_SERVER}: stage {stage} of a sum comes after {_STAGES[_STAGES.index(stage) - 1]}")
        reply = answer()
        self._done[stage] = (digest, reply)
        return reply

    def _advert(self) -> bytes:
        name = self._identity.name
        keys = crypto.public_part(self._cipher), crypto.public_part(self._mask_key)
        promise = crypto.commitment(self.session.label("seed", name), self._seed)
        advert = KeyAdvert(name=name, cipher_key=keys[0], mask_key=keys[1], seed_hash=promise, signature=b"")
        signed = crypto.signature(self._identity.private, advert.signed_text(self.session))
        return advert.model_copy(update={"signature": signed}).to_bytes()

    def _bundle(self, roster: Roster) -> bytes:
        self._refuse_other_sum(roster.session)
        listed = {advert.name: advert for advert in roster.adverts}
        self._refuse_wrong_roster(listed, len(roster.adverts))
        self._digest = roster.digest()
        secrets_of_mine = (self._seed, self._mask_key.private_bytes_raw())
        needed, number = threshold(len(listed)), len(listed)
        seeds, keys = (crypto.split_secret(secret, needed, number) for secret in secrets_of_mine)
        sealed = {}
        for name, seed, key in zip(listed, seeds, keys, strict=True):
            if name == self._identity.name:
                self._shares[name] = seed + key
            else:
                sealed[name] = crypto.sealed(
                    self._cipher_key(listed[name], sends=True), seed + key, self._context(self._identity.name, name)
                )
        self._roster = listed
        return ShareBundle(sealed=sealed).to_bytes()

    def _refuse_other_sum(self, session: SumSession) -> None:
        if session != self.session:
            raise BadMessage(f"{_SERVER}: the message belongs to another sum")

    def _refuse_wrong_roster(self, listed: Mapping[str, KeyAdvert], entries: int) -> None:
        """A server that could add sites of its own making, or leave out all but one, would learn that one's numbers."""
        if len(listed) != entries:
            raise BadMessage(f"{_SERVER}: the list of members names a site twice")
        if list(listed) != sorted(listed):
            raise BadMessage(f"{_SERVER}: the list of members is not in order")
        if len(listed) < self._fewest:
            raise BadMessage(
                f"{_SERVER}: a secure sum of {len(listed)} sites hides too little; it needs {self._fewest}"
            )
        mine = listed.get(self._identity.name)
        if mine is None or mine.to_bytes() != self._done["advertise"][1]:
            raise BadMessage(f"{_SERVER}: the list of members lacks this site's keys")
        for name, advert in listed.items():
            key = self._identity.members.get(name)
            if key is None:
                raise BadMessage(
                    f"{_SERVER}: the list of members contains {name}, whose public key this site does not have"
                )
            if not crypto.is_signed(key, advert.signature, advert.signed_text(self.session)):
                raise BadMessage(f"{_SERVER}: the list of members contains keys of {name} that {name} has not signed")

    def _cipher_key(self, other: KeyAdvert, sends: bool) -> bytes:
        own, theirs = self._identity.name, other.name
        direction = (own, theirs) if sends else (theirs, own)
        return crypto.agreed_key(self._cipher, other.cipher_key, self.session.label("share", *direction))

    def _context(self, sender: str, receiver: str) -> bytes:
        """Bound to the list of members: shares do not open at a site that was shown another one."""
        return self.session.label("share", sender, receiver) + self._digest

    def _masked(self, inbox: ShareInbox, numbers: Words) -> bytes:
        self._refuse_other_sum(inbox.session)
        own = self._identity.name
        if strange := sorted(inbox.sealed.keys() - self._roster.keys() | inbox.sealed.keys() & {own}):
            raise BadMessage(
                f"{_SERVER}: it sent shares of {strange[0]}, which is not among the other sites of the list"
            )
        needed = threshold(len(self._roster))
        if len(inbox.sealed) + 1 < needed:
            raise BadMessage(
                f"{_SERVER}: {len(inbox.sealed) + 1} of {len(self._roster)} sites are left, but {needed} are needed"
            )
        for name, content in sorted(inbox.sealed.items()):
            opened = crypto.unsealed(
                self._cipher_key(self._roster[name], sends=False), content, self._context(name, own)
            )
            if opened is None or len(opened) != 2 * crypto.SHARE_BYTES:
                raise UnreadableShares(name)
            self._shares[name] = opened
        masked = numbers + crypto.keystream(self._seed, numbers, self.session.label("own mask", own))
        for name in self._shares:
            if name != own:
                add = np.add if own < name else np.subtract
                add(masked, pair_mask(self.session, self._mask_key, own, self._roster[name], masked), out=masked)
        return masked.tobytes()

    def _reveal(self, survivors: Survivors) -> bytes:
        self._refuse_other_sum(survivors.session)
        left = set(survivors.names)
        if len(left) != len(survivors.names) or not left <= self._shares.keys():
            raise BadMessage(f"{_SERVER}: the list of survivors is not a subset of the sites that agreed on masks")
        if self._identity.name not in left:
            raise BadMessage(f"{_SERVER}: this site has sent its numbers, but is not on the list of survivors")
        needed = threshold(len(self._roster))
        if len(left) < needed:
            raise BadMessage(f"{_SERVER}: a sum of {len(left)} sites is not unmasked; at least {needed} are needed")
        size = crypto.SHARE_BYTES
        seeds = {name: share[:size] for name, share in self._shares.items() if name in left}
        keys = {name: share[size:] for name, share in self._shares.items() if name not in left}
        return Reveal(seeds=seeds, mask_keys=keys).to_bytes()


def pair_mask(session: SumSession, key: X25519PrivateKey, own: str, other: KeyAdvert, like: Words) -> Words:
    """The mask that two sites have in common: the one whose name comes first adds it, the other subtracts it."""
    pair = sorted((own, other.name))
    agreed = crypto.agreed_key(key, other.mask_key, session.label("pair", *pair))
    return crypto.keystream(agreed, like, session.label("pair mask", *pair))

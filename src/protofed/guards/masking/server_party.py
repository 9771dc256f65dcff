"""The server's side of a secure sum: it relays, adds up what is masked, and takes the masks off the sum."""

from collections.abc import Callable, Iterable, Mapping

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from protofed.errors import BadMessage
from protofed.guards.masking import FEWEST, crypto, threshold
from protofed.guards.masking.crypto import WORDS, Words
from protofed.guards.masking.messages import (
    KeyAdvert,
    Reveal,
    Roster,
    ShareBundle,
    ShareInbox,
    SumSession,
    Survivors,
)
from protofed.guards.masking.site_party import pair_mask


class TooFewSites(Exception):
    """A sum that cannot be finished, because too few sites are left."""


class ServerParty:
    """One sum. What a site sends is checked as it comes; whoever sends nothing, or nothing right, has dropped out."""

    def __init__(
        self, session: SumSession, identities: Mapping[str, EllipticCurvePublicKey], size: int, bits: int = 32
    ) -> None:
        self.session = session
        self._identities = identities
        self._adverts: dict[str, KeyAdvert] = {}
        self._roster: dict[str, KeyAdvert] = {}
        self._bundles: dict[str, ShareBundle] = {}
        self._sum: Words = np.zeros(size, dtype=WORDS[bits])
        self._survivors: list[str] = []
        self._reveals: dict[str, Reveal] = {}

    @property
    def listed(self) -> list[str]:
        """Who agrees on masks, in order."""
        return list(self._roster)

    @property
    def survivors(self) -> list[str]:
        """Whose numbers are in the sum, in order."""
        return sorted(self._survivors)

    def take_advert(self, name: str, content: bytes) -> None:
        """A site's keys; wrong ones would make all other sites refuse the list."""
        advert = KeyAdvert.read(content, name)
        if advert.name != name or not crypto.is_signed(
            self._identities[name], advert.signature, advert.signed_text(self.session)
        ):
            raise BadMessage(f"{name}: its keys are not signed with its identity")
        for key in (advert.cipher_key, advert.mask_key):
            crypto.agreed_key(X25519PrivateKey.generate(), key, b"tried")
        self._adverts[name] = advert

    def roster(self, names: Iterable[str]) -> bytes:
        """The list for everybody, of those among `names` who have sent keys."""
        self._roster = {name: self._adverts[name] for name in sorted(names) if name in self._adverts}
        if len(self._roster) < FEWEST:
            raise TooFewSites(f"a secure sum needs at least {FEWEST} sites, and {len(self._roster)} have sent keys")
        return Roster(session=self.session, adverts=tuple(self._roster.values())).to_bytes()

    def take_bundle(self, name: str, content: bytes) -> None:
        """A site's shares for the others."""
        bundle = ShareBundle.read(content, name)
        if bundle.sealed.keys() != self._roster.keys() - {name}:
            raise BadMessage(f"{name}: its shares do not cover all other sites of the list")
        self._bundles[name] = bundle

    def inboxes(self) -> dict[str, bytes]:
        """For each site that has sent its own the shares of the others."""
        self._refuse_too_few(len(self._bundles), "have shared their secrets")
        return {name: self._inbox(name).to_bytes() for name in self._bundles}

    def take_masked(self, name: str, content: bytes) -> None:
        """A site's masked numbers; they are added up, and not kept."""
        if len(content) != self._sum.nbytes:
            raise BadMessage(f"{name}: {len(content)} bytes of masked numbers, not {self._sum.nbytes}")
        self._sum += np.frombuffer(content, dtype=self._sum.dtype)
        self._survivors.append(name)

    def survivor_list(self) -> bytes:
        """Whose numbers are in the sum, for everybody among them."""
        self._refuse_too_few(len(self._survivors), "have sent numbers")
        return Survivors(session=self.session, names=tuple(self.survivors)).to_bytes()

    def take_reveal(self, name: str, content: bytes) -> bool:
        """A site's shares of what is needed to unmask; whether there are enough now."""
        reveal = Reveal.read(content, name)
        left = set(self._survivors)
        if reveal.seeds.keys() != left or reveal.mask_keys.keys() != self._bundles.keys() - left:
            raise BadMessage(f"{name}: its shares are not the requested ones")
        place = list(self._roster).index(name) + 1
        shares = (*reveal.seeds.values(), *reveal.mask_keys.values())
        if any(int.from_bytes(share[:4], "little") != place for share in shares):
            raise BadMessage(f"{name}: its shares belong to another site")
        self._reveals[name] = reveal
        return len(self._reveals) >= threshold(len(self._roster))

    def total(self) -> Words:
        """The sum of the survivors' numbers."""
        self._refuse_too_few(len(self._reveals), "have helped to unmask")
        total = self._sum.copy()
        for name in self._survivors:
            seed = self._seed_of(name)
            total -= crypto.keystream(seed, total, self.session.label("own mask", name))
        for gone in self._bundles.keys() - set(self._survivors):
            key = self._mask_key_of(gone)
            for name in self._survivors:
                mask = pair_mask(self.session, key, gone, self._roster[name], total)
                (np.subtract if name < gone else np.add)(total, mask, out=total)
        return total

    def _inbox(self, name: str) -> ShareInbox:
        sealed = {sender: bundle.sealed[name] for sender, bundle in self._bundles.items() if sender != name}
        return ShareInbox(session=self.session, sealed=sealed)

    def _seed_of(self, name: str) -> bytes:
        label, promise = self.session.label("seed", name), self._roster[name].seed_hash
        shares = [reveal.seeds[name] for reveal in self._reveals.values()]
        return self._joined(name, shares, lambda seed: crypto.commitment(label, seed) == promise)

    def _mask_key_of(self, name: str) -> X25519PrivateKey:
        shares = [reveal.mask_keys[name] for reveal in self._reveals.values()]
        promised = self._roster[name].mask_key

        def is_right(secret: bytes) -> bool:
            return crypto.public_part(X25519PrivateKey.from_private_bytes(secret)) == promised

        return X25519PrivateKey.from_private_bytes(self._joined(name, shares, is_right))

    def _joined(self, name: str, shares: list[bytes], is_right: Callable[[bytes], bool]) -> bytes:
        secret = crypto.joined_secret(shares, threshold(len(self._roster)), is_right)
        if secret is None:
            raise TooFewSites(f"too few correct shares of a secret of {name} have arrived")
        return secret

    def _refuse_too_few(self, number: int, what: str) -> None:
        needed = threshold(len(self._roster))
        if number < needed:
            raise TooFewSites(f"{number} of {len(self._roster)} sites {what}, and a secure sum needs {needed}")

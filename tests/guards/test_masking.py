"""Secure sums without a network: any drop-outs above the threshold give the exact sum, and lies are refused."""

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("flwr")

from cryptography.hazmat.primitives.asymmetric import ec

from protofed.errors import BadMessage
from protofed.guards.masking import threshold
from protofed.guards.masking.messages import KeyAdvert, Reveal, Roster, ShareBundle, ShareInbox, SumSession, Survivors
from protofed.guards.masking.server_party import ServerParty, TooFewSites
from protofed.guards.masking.site_party import SiteIdentity, SiteParty, UnreadableShares

SESSION = SumSession(run="a" * 32, round=3, attempt="b" * 32)
SIZE = 40
NEVER = 4


@cache
def private_keys(sites: int) -> dict[str, ec.EllipticCurvePrivateKey]:
    return {f"s{number}": ec.generate_private_key(ec.SECP384R1()) for number in range(sites)}


def identities(sites: int) -> dict[str, SiteIdentity]:
    keys = private_keys(sites)
    members = {name: key.public_key() for name, key in keys.items()}
    return {name: SiteIdentity(name, key, members) for name, key in keys.items()}


def numbers_of(name: str) -> np.ndarray:
    return np.random.default_rng(int(name[1:])).integers(0, 2**32, SIZE, dtype=np.uint32)


class Sum:
    """A server and its sites, stage by stage."""

    def __init__(self, sites: int = 5, session: SumSession = SESSION) -> None:
        known = identities(sites)
        self.sites = {name: SiteParty(identity, session) for name, identity in known.items()}
        self.server = ServerParty(session, known["s0"].members, SIZE)
        self.carried: list[bytes] = []

    def advertise(self, names: Any = None) -> bytes:
        for name in self.sites if names is None else names:
            self.server.take_advert(name, self._sent(self.sites[name].advertise()))
        return self.server.roster(self.sites)

    def share(self, roster: bytes, names: Any = None) -> dict[str, bytes]:
        for name in self.sites if names is None else names:
            self.server.take_bundle(name, self._sent(self.sites[name].share(roster)))
        return self.server.inboxes()

    def mask(self, inboxes: dict[str, bytes], names: Any = None) -> bytes:
        for name in inboxes if names is None else names:
            self.server.take_masked(name, self._sent(self.sites[name].mask(inboxes[name], numbers_of(name))))
        return self.server.survivor_list()

    def unmask(self, survivors: bytes, names: Any = None) -> np.ndarray:
        for name in self.server.survivors if names is None else names:
            self.server.take_reveal(name, self._sent(self.sites[name].unmask(survivors)))
        return self.server.total()

    def _sent(self, content: bytes) -> bytes:
        self.carried.append(content)
        return content


def run_with(drops: tuple[int, ...]) -> np.ndarray:
    """The sum where site number i drops out at stage drops[i]."""
    together = Sum(len(drops))
    at = [[f"s{i}" for i, drop in enumerate(drops) if drop > stage] for stage in range(4)]
    inboxes = together.share(together.advertise(at[0]), at[1])
    return together.unmask(together.mask(inboxes, at[2]), at[3])


def expected_with(drops: tuple[int, ...]) -> np.ndarray | None:
    """Worked out by hand: those who drop out before their numbers were sent are missing, later ones are not."""
    agreed = sum(drop > 0 for drop in drops)
    needed = -(-2 * agreed // 3)
    if agreed < 3 or any(sum(drop > stage for drop in drops) < needed for stage in (1, 2, 3)):
        return None
    total = np.zeros(SIZE, dtype=np.uint32)
    for number, drop in enumerate(drops):
        if drop > 2:
            total += numbers_of(f"s{number}")
    return total


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from([0, 1, 2, 3, NEVER, NEVER, NEVER]), min_size=3, max_size=8).map(tuple))
def test_any_drop_outs_give_the_exact_sum_of_the_others_or_none(drops: tuple[int, ...]) -> None:
    expected = expected_with(drops)
    if expected is None:
        with pytest.raises(TooFewSites):
            run_with(drops)
    else:
        assert np.array_equal(run_with(drops), expected)


@pytest.mark.parametrize("stage", range(5))
def test_one_of_five_drops_out_at_each_stage(stage: int) -> None:
    drops = (NEVER, NEVER, stage, NEVER, NEVER)
    expected = expected_with(drops)
    assert expected is not None
    assert np.array_equal(run_with(drops), expected)


def test_two_lists_of_survivors_never_both_get_enough_shares() -> None:
    for sites in range(3, 200):
        assert 2 * threshold(sites) > sites
        assert threshold(sites) <= sites


def test_what_travels_looks_like_noise_and_holds_nobodys_numbers() -> None:
    together = Sum()
    roster = together.advertise()
    together.unmask(together.mask(together.share(roster)))
    for name in together.sites:
        assert not any(numbers_of(name)[:4].tobytes() in content for content in together.carried)
    zeros = Sum(3)
    inboxes = zeros.share(zeros.advertise())
    masked = [
        np.frombuffer(zeros.sites[name].mask(inboxes[name], np.zeros(4000, np.uint32)), "<u4") for name in zeros.sites
    ]
    for one in masked:
        assert 0.45 < one.mean() / 2**32 < 0.55
        assert len(np.unique(one)) > 3990
    assert (sum(masked[1:], masked[0].copy()) != 0).mean() > 0.99  # own masks are still on the sum


# A server that lies


def test_a_list_with_an_unknown_member_is_refused() -> None:
    together = Sum(4)
    stranger = SiteIdentity("s9", ec.generate_private_key(ec.SECP384R1()), {})
    advert = KeyAdvert.read(SiteParty(stranger, SESSION).advertise(), "s9")
    roster = Roster.read(together.advertise(), "server")
    larger = roster.model_copy(update={"adverts": (*roster.adverts, advert)})
    with pytest.raises(BadMessage, match="s9, whose public key this site does not have"):
        together.sites["s0"].share(larger.to_bytes())


def test_keys_in_anothers_name_are_refused() -> None:
    """The server in the middle: it has keys of its own, and nobody's signature under them."""
    together = Sum(4)
    roster = Roster.read(together.advertise(), "server")
    own = private_keys(4)["s0"]
    fake = KeyAdvert.read(SiteParty(SiteIdentity("s2", own, {}), SESSION).advertise(), "s2")
    adverts = tuple(fake if advert.name == "s2" else advert for advert in roster.adverts)
    with pytest.raises(BadMessage, match="keys of s2 that s2 has not signed"):
        together.sites["s0"].share(roster.model_copy(update={"adverts": adverts}).to_bytes())
    with pytest.raises(BadMessage, match="s2: its keys are not signed"):
        together.server.take_advert("s2", fake.to_bytes())


def test_signed_keys_of_another_sum_are_refused() -> None:
    earlier = Sum(4, SESSION.model_copy(update={"attempt": "c" * 32}))
    stale = Roster.read(earlier.advertise(), "server").adverts[1]
    together = Sum(4)
    roster = Roster.read(together.advertise(), "server")
    adverts = (roster.adverts[0], stale, *roster.adverts[2:])
    with pytest.raises(BadMessage, match="keys of s1 that s1 has not signed"):
        together.sites["s0"].share(roster.model_copy(update={"adverts": adverts}).to_bytes())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda adverts: adverts[:2], "2 sites hides too little"),
        (lambda adverts: adverts[1:], "lacks this site's keys"),
        (lambda adverts: (*adverts, adverts[-1]), "names a site twice"),
        (lambda adverts: adverts[::-1], "not in order"),
    ],
)
def test_a_wrong_list_is_refused(change: Callable[[Any], Any], reason: str) -> None:
    together = Sum(4)
    roster = Roster.read(together.advertise(), "server")
    with pytest.raises(BadMessage, match=reason):
        together.sites["s0"].share(roster.model_copy(update={"adverts": change(roster.adverts)}).to_bytes())


def test_two_lists_for_two_sites_are_refused() -> None:
    """s0 is told of four sites, the others of all five: their shares do not open."""
    together = Sum(5)
    roster = together.advertise()
    full = Roster.read(roster, "server")
    together.sites["s0"].share(full.model_copy(update={"adverts": full.adverts[:4]}).to_bytes())
    bundles = {name: together.sites[name].share(roster) for name in ("s1", "s2", "s3")}
    sealed = {name: ShareBundle.read(content, name).sealed["s0"] for name, content in bundles.items()}
    with pytest.raises(UnreadableShares, match="s1 do not open"):
        together.sites["s0"].mask(ShareInbox(session=SESSION, sealed=sealed).to_bytes(), numbers_of("s0"))


def test_both_secrets_of_one_site_are_refused() -> None:
    together = Sum(5)
    survivors = together.mask(together.share(together.advertise()))
    site = together.sites["s0"]
    first = site.unmask(survivors)
    without = Survivors(session=SESSION, names=("s0", "s1", "s2", "s3")).to_bytes()
    with pytest.raises(BadMessage, match="unmask of this sum was requested before with different content"):
        site.unmask(without)
    assert site.unmask(survivors) == first  # a repeat is no second answer
    assert Reveal.read(first, "s0").mask_keys == {}


@pytest.mark.parametrize(
    ("names", "reason"),
    [
        (("s0", "s1", "s2"), "a sum of 3 sites is not unmasked"),
        (("s1", "s2", "s3", "s4"), "not on the list of survivors"),
        (("s0", "s1", "s2", "s3", "s9"), "not a subset"),
        (("s0", "s1", "s2", "s3", "s3"), "not a subset"),
    ],
)
def test_a_wrong_list_of_survivors_is_refused(names: tuple[str, ...], reason: str) -> None:
    together = Sum(5)
    together.mask(together.share(together.advertise()))
    with pytest.raises(BadMessage, match=reason):
        together.sites["s0"].unmask(Survivors(session=SESSION, names=names).to_bytes())


def test_too_few_shares_before_masking_are_refused() -> None:
    together = Sum(5)
    inbox = ShareInbox.read(together.share(together.advertise())["s0"], "server")
    few = dict(list(inbox.sealed.items())[:2])
    with pytest.raises(BadMessage, match="3 of 5 sites are left, but 4 are needed"):
        together.sites["s0"].mask(inbox.model_copy(update={"sealed": few}).to_bytes(), numbers_of("s0"))


def test_a_stage_out_of_turn_or_of_another_sum_is_refused() -> None:
    together, other = Sum(4), Sum(4, SESSION.model_copy(update={"round": 4}))
    with pytest.raises(BadMessage, match="share of a sum comes after advertise"):
        together.sites["s0"].share(b"")
    together.advertise()
    with pytest.raises(BadMessage, match="belongs to another sum"):
        together.sites["s0"].share(other.advertise())


# A site that lies


def test_wrong_shares_of_one_site_are_found_out() -> None:
    together = Sum(5)
    survivors = together.mask(together.share(together.advertise()), ["s0", "s1", "s2", "s3"])
    for name in ("s0", "s1", "s2", "s3"):
        reply = Reveal.read(together.sites[name].unmask(survivors), name)
        if name == "s1":
            wrong = {other: share[:4] + bytes(48) for other, share in reply.seeds.items()}
            reply = reply.model_copy(update={"seeds": wrong})
        together.server.take_reveal(name, reply.to_bytes())
    with pytest.raises(TooFewSites, match="too few correct shares"):
        together.server.total()
    full = Sum(5)
    survivors = full.mask(full.share(full.advertise()))
    for name in full.sites:
        reply = Reveal.read(full.sites[name].unmask(survivors), name)
        if name == "s1":
            wrong = {other: share[:4] + bytes(48) for other, share in reply.seeds.items()}
            reply = reply.model_copy(update={"seeds": wrong})
        full.server.take_reveal(name, reply.to_bytes())
    assert np.array_equal(full.server.total(), expected_with((NEVER,) * 5))


def test_a_key_that_agrees_with_everybody_on_the_same_is_refused() -> None:
    together = Sum(3)
    advert = KeyAdvert.read(together.sites["s0"].advertise(), "s0").model_copy(update={"mask_key": bytes(32)})
    signed = private_keys(3)["s0"].sign(advert.signed_text(SESSION), ec.ECDSA(_sha384()))
    with pytest.raises(BadMessage, match="is not valid"):
        together.server.take_advert("s0", advert.model_copy(update={"signature": signed}).to_bytes())


def _sha384() -> Any:
    from cryptography.hazmat.primitives import hashes

    return hashes.SHA384()


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_damaged_messages_are_refused_by_both_sides(data: Any) -> None:
    """Nothing but BadMessage, wherever a byte is changed, cut off or added."""
    roster, inbox, survivors, bundle, reveal = _sound_messages()
    content = bytearray(data.draw(st.sampled_from([roster, inbox, survivors, bundle, reveal])))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place : place + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=3))
    for kind in (Roster, ShareInbox, Survivors, ShareBundle, Reveal, KeyAdvert):
        with suppress(BadMessage):
            kind.read(bytes(content), "s1")


@cache
def _sound_messages() -> tuple[bytes, ...]:
    together = Sum(3)
    roster = together.advertise()
    bundle = together.sites["s0"].share(roster)
    inboxes = together.share(roster)
    survivors = together.mask(inboxes)
    return roster, inboxes["s0"], survivors, bundle, together.sites["s0"].unmask(survivors)

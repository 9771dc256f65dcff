"""Secure sums in a deployment: what the server gets, who may drop out when, and what sites refuse."""

import json
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from local_sites import OPTIONS, Answer, Federation
from safetensors.torch import load_file

import protofed
from protofed.clients import pack, unpack
from protofed.deploy.masked_stages import StageRequest
from protofed.deploy.policy import Policy
from protofed.deploy.protocol import SiteRequest
from protofed.deploy.server import WaitLimits
from protofed.errors import UserError
from protofed.guards.masking.messages import Roster, Survivors
from protofed.testing import results_of, toy_data

pytest.importorskip("flwr")

NAMES = ("a", "b", "c", "d", "e")
SECURE = "secure=on"


@pytest.fixture
def five(federation: Federation, tmp_path: Path) -> Federation:
    federation.data = toy_data(tmp_path / "five", NAMES)
    for name in NAMES:
        federation.add(name)
    return federation


def stage_in(envelope: bytes) -> StageRequest | None:
    """Which stage of a secure sum a request asks for, if any."""
    request = SiteRequest.from_bytes(envelope)
    return StageRequest.read(request.body)[0] if request.kind == "mask" else None


def changed(envelope: bytes, change: Callable[[bytes], bytes]) -> bytes:
    """The same request with another message of the sum in it."""
    request = SiteRequest.from_bytes(envelope)
    header, body = StageRequest.read(request.body)
    return SiteRequest(request.kind, request.terms, request.accepted, header.to_bytes(change(body))).to_bytes()


def in_one_process(federation: Federation, method: str, out: str, **options: Any) -> protofed.Run:
    given = {**OPTIONS, "engine": "loop", **options}
    return protofed.run(method, federation.data, out=federation.folder / out, **given)


def final_model(run: protofed.Run) -> dict[str, Any]:
    return load_file(run.path / "model.safetensors")


@pytest.mark.parametrize("method", ["fedproc", "fed3r"])
def test_equal_to_a_run_in_one_process_and_to_the_plain_one_within_the_grid(five: Federation, method: str) -> None:
    more = {"guard": "secure=on,secure_range=512"} if method == "fed3r" else {"guard": SECURE}
    deployed = five.run(method, **more)
    alone = in_one_process(five, method, "alone", **more)
    mine, theirs = results_of(deployed.path), results_of(alone.path)
    for line, wanted in zip(mine.pop("rounds.jsonl"), theirs.pop("rounds.jsonl"), strict=True):
        assert line["accuracy"] == wanted["accuracy"]
        assert line["events"] == []
        if wanted["train_loss"] is not None:
            assert line["train_loss"] == pytest.approx(wanted["train_loss"], abs=1e-5)
    compared = [name for name in theirs if name.endswith(".safetensors") and not name.startswith("clients/")]
    assert "model.safetensors" in compared or method == "fed3r"
    assert [name for name in compared if mine[name] != theirs[name]] == []
    plain = final_model(in_one_process(five, method, "plain"))
    for name, tensor in final_model(deployed).items():
        # 32 x 5 / 2^30 a round, by the size of the largest client over the mean one's; float32 takes the rest.
        assert tensor.sub(plain[name]).abs().max() < 1e-4 * max(1.0, float(plain[name].abs().max()))


def test_the_line_of_a_round_tells_what_masking_cost(five: Federation) -> None:
    run = five.run("fedavg", guard=SECURE)
    plain = in_one_process(five, "fedavg", "plain")
    for line, wanted in zip(run.rounds, plain.rounds, strict=True):
        assert set(line["secure"]["seconds"]) == {"train", "share", "mask", "unmask"}
        assert 0 < line["secure"]["up"] < 50_000
        assert 0 < line["secure"]["down"] < 100_000
        masked = line["bytes"]["up"]["total"] - line["secure"]["up"]
        # A word for each weight, and one for each tensor's weight in the average.
        assert masked == pytest.approx(wanted["bytes"]["up"]["weights"], rel=0.02)
        assert line["bytes"]["down"]["weights"] == wanted["bytes"]["down"]["weights"]


def test_no_single_upload_reaches_the_server(five: Federation) -> None:
    five.run("fedavg", guard=SECURE)
    carried = b"".join(five.grid.carried)
    for state, words in uploads(five):
        assert not any(values in carried for values in state)
        assert words not in carried
    five.grid.carried.clear()
    five.run("fedavg", "plainly", rounds=1)  # the search finds what is there
    carried = b"".join(five.grid.carried)
    assert any(values in carried for state, _ in uploads(five) for values in state)


def uploads(federation: Federation) -> list[tuple[list[bytes], bytes]]:
    """Of every site the tensors that it has trained last, and its upload on the grid."""
    found = []
    for name in NAMES:
        for folder in (federation.folder / "state" / name / "runs").iterdir():
            (state,) = (folder / "clients").glob("*.safetensors")
            tensors = [tensor.numpy().tobytes()[:64] for tensor in load_file(state).values() if tensor.numel() > 30]
            words = folder / "masked.words"
            found.append((tensors, words.read_bytes()[:64] if words.exists() else b"none"))
    return found


@pytest.mark.parametrize(("stage", "counts"), [("train", 4), ("share", 4), ("mask", 4), ("unmask", 5)])
def test_a_site_that_drops_out_at_each_stage(five: Federation, stage: str, counts: int) -> None:
    """The others' sum stands; whoever has sent its numbers is in it, even if it never answers again."""

    def dies(envelope: bytes, answer: Answer) -> bytes | None:
        asked = stage_in(envelope)
        return None if asked is not None and asked.stage == stage and asked.session.round == 1 else answer(envelope)

    five.between("c", dies)
    deployed = five.run("fedavg", guard=SECURE)
    left_out = [event["client"] for event in deployed.rounds[1]["events"] if event["event"] == "left out"]
    assert left_out == (["c-0"] if counts == 4 else [])
    plugin = five.folder / "fails.py"
    plugin.write_text(FAILS)
    method = "fedavg" if counts == 5 else "fails"
    alone = in_one_process(five, method, "alone", guard=SECURE, plugin=[str(plugin)])
    assert results_of(deployed.path)["model.safetensors"] == results_of(alone.path)["model.safetensors"]


FAILS = '''
from protofed import register
from protofed.methods.fedavg import FedAvg


@register("fails")
class Fails(FedAvg):
    """FedAvg in which one client fails in the second round."""

    paper = "for a test"

    def upload(self, net, data, at):
        assert not (at.round == 1 and at.client == "c-0")
        return super().upload(net, data, at)
'''


def test_too_few_left_to_unmask_is_made_up_for_by_the_same_sites(five: Federation) -> None:
    """Two of five vanish before they unmask. Next time all five are asked for the same sum, and it comes out right."""
    attempts: dict[str, set[str]] = {}

    def vanishes(envelope: bytes, answer: Answer) -> bytes | None:
        asked = stage_in(envelope)
        if asked is not None and asked.session.round == 0:
            attempts.setdefault(asked.session.attempt, set()).add(asked.stage)
            if asked.stage == "unmask" and len(attempts) == 1:
                return None
        return answer(envelope)

    five.between("b", vanishes)
    five.between("d", vanishes)
    deployed = five.run("fedavg", guard=SECURE, limits=WaitLimits(round_timeout=0.5, wait=1.0, min_sites=4))
    assert len(attempts) == 2
    assert all(line["events"] == [] for line in deployed.rounds)
    alone = in_one_process(five, "fedavg", "alone", guard=SECURE)
    assert results_of(deployed.path)["model.safetensors"] == results_of(alone.path)["model.safetensors"]


def test_a_round_is_begun_again_when_those_are_back_whom_it_needs(
    five: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of five are restarted before they unmask. The second try is the last, so it must not come too early."""
    monkeypatch.setattr("protofed.deploy.server._PAUSE", 0.05)
    monkeypatch.setattr("protofed.deploy.server._TRIES", 2)
    gone = {"b", "d"}

    def comes_back(name: str) -> None:
        five.online.add(name)

    def killed(name: str, envelope: bytes, answer: Answer) -> bytes | None:
        asked = stage_in(envelope)
        if asked is not None and asked.stage == "unmask" and name in gone:
            gone.discard(name)
            five.online.discard(name)
            threading.Timer(1.0, comes_back, [name]).start()
        if name not in five.online:
            raise ConnectionError
        return answer(envelope)

    for name in sorted(gone):
        five.between(name, partial(killed, name))
    run = five.run("fedavg", guard=SECURE, limits=WaitLimits(round_timeout=5.0, wait=60.0, min_sites=4))
    assert all(line["events"] == [] for line in run.rounds)


def test_a_sum_of_too_few_is_not_unmasked_so_that_more_can_come(five: Federation) -> None:
    attempts = set()

    def vanishes(envelope: bytes, answer: Answer) -> bytes | None:
        asked = stage_in(envelope)
        if asked is not None and asked.session.round == 0:
            attempts.add(asked.session.attempt)
            if asked.stage == "mask" and len(attempts) == 1:
                return None
        return answer(envelope)

    five.between("b", vanishes)
    limits = WaitLimits(round_timeout=0.5, wait=1.0, min_sites=5)
    run = five.run("fedavg", guard=SECURE, rounds=1, limits=limits)
    assert len(attempts) == 2
    assert run.rounds[0]["events"] == []


def test_a_late_member_waits_until_a_repeated_round_is_done(five: Federation) -> None:
    """Who joins changes the grid, and the others would not train another upload for a round that was unmasked."""
    five.data = toy_data(five.folder / "late", ("f",))
    attempts = set()

    def vanishes(envelope: bytes, answer: Answer) -> bytes | None:
        asked = stage_in(envelope)
        if asked is not None and asked.session.round == 0:
            attempts.add(asked.session.attempt)
            if asked.stage == "unmask" and len(attempts) == 1:
                if "f" not in five.sites:
                    five.add("f")
                return None
        return answer(envelope)

    five.between("b", vanishes)
    five.between("d", vanishes)
    run = five.run("fedavg", guard=SECURE, limits=WaitLimits(round_timeout=0.5, wait=1.0, min_sites=4))
    assert len(attempts) == 2
    assert [len(line["participants"]) for line in run.rounds] == [5, 6]
    assert [event["event"] for line in run.rounds for event in line["events"]] == ["joined"]


def test_a_round_is_never_unmasked_for_others(five: Federation) -> None:
    """A server that begins a round again with other survivors wants the difference of two sums: one upload."""
    requests: dict[str, bytes] = {}

    def watches(envelope: bytes, answer: Answer) -> bytes | None:
        asked = stage_in(envelope)
        if asked is not None:
            requests[asked.stage] = envelope
        return answer(envelope)

    five.between("a", watches)
    five.run("fedavg", guard=SECURE, rounds=1)
    other = changed(requests["unmask"], lambda body: _without("e", body))
    assert "for another list of survivors" in refusal_of(five.sites["a"].answer(other))
    header, body = unpack(SiteRequest.from_bytes(requests["train"]).body, "server")
    header["session"]["attempt"] = "f" * 32
    again = SiteRequest.from_bytes(requests["train"])
    fresh = SiteRequest(again.kind, again.terms, again.accepted, pack(header, body)).to_bytes()
    restarted = five.site("a")
    assert unpack(restarted.answer(fresh), "a")[0]["masked"] == "train"  # the same round, from the same broadcast
    header["clients"] = 4
    fewer = SiteRequest(again.kind, again.terms, again.accepted, pack(header, body)).to_bytes()
    assert "trains nothing else for it" in refusal_of(restarted.answer(fewer))


def _without(name: str, survivors: bytes) -> bytes:
    content = Survivors.read(survivors, "test")
    return content.model_copy(update={"names": tuple(each for each in content.names if each != name)}).to_bytes()


def refusal_of(reply: bytes) -> str:
    header, _ = unpack(reply, "site")
    assert header["result"] == "failed"
    return str(header["reason"])


def test_a_server_that_lies_about_the_members_is_refused(five: Federation, monkeypatch) -> None:
    """It leaves all but two out, so that one's numbers could be told from the sum."""
    monkeypatch.setattr("protofed.deploy.server._TRIES", 1)

    def lies(envelope: bytes, answer: Answer) -> bytes | None:
        asked = stage_in(envelope)
        if asked is None or asked.stage != "share":
            return answer(envelope)
        return answer(changed(envelope, _cut_to_two))

    for name in NAMES:
        five.between(name, lies)
    with pytest.raises(UserError, match="hides too little"):
        five.run("fedavg", guard=SECURE, limits=WaitLimits(round_timeout=0.3, wait=1.0))
    assert not any(json.loads(line)["kind"] == "masked mask" for line in sent_lines(five))


def _cut_to_two(roster: bytes) -> bytes:
    content = Roster.read(roster, "test")
    return content.model_copy(update={"adverts": content.adverts[:2]}).to_bytes()


def sent_lines(federation: Federation) -> list[str]:
    files = (federation.folder / "state").glob("*/sent.jsonl")
    return [line for file in files for line in file.read_text().splitlines()]


def test_a_site_that_was_not_given_the_others_keys_refuses(five: Federation) -> None:
    for path in (five.folder / "keys/sites/b/members").glob("*.pub"):
        path.unlink()
    with pytest.raises(UserError, match="b: secure=on needs the public keys of all sites"):
        five.run("fedavg", guard=SECURE)


def test_a_site_whom_others_do_not_know_is_left_out(five: Federation) -> None:
    """As one that came late, and whose key was not passed on to everybody."""
    for name in ("a", "b"):
        (five.folder / f"keys/sites/{name}/members/e.pub").unlink()
    run = five.run("fedavg", guard=SECURE, rounds=1)
    (event,) = run.rounds[0]["events"]
    assert event["client"] == "e-0"
    assert "a, b do not have each other's public keys" in event["reason"]


def test_a_single_upload_does_not_leave_whatever_the_server_asks(five: Federation) -> None:
    def asks_plainly(envelope: bytes, answer: Answer) -> bytes | None:
        asked = stage_in(envelope)
        if asked is not None and asked.stage == "train":
            request = SiteRequest.from_bytes(envelope)
            _, body = StageRequest.read(request.body)
            envelope = SiteRequest("job", request.terms, request.accepted, body).to_bytes()
        return answer(envelope)

    five.between("a", asks_plainly)
    run = five.run("fedavg", guard=SECURE, rounds=1)
    assert "no single upload leaves" in run.rounds[0]["events"][0]["reason"]


def test_shares_that_nobody_can_read_leave_their_sender_out(five: Federation) -> None:
    def garbles(envelope: bytes, answer: Answer) -> bytes | None:
        asked, reply = stage_in(envelope), answer(envelope)
        if asked is not None and asked.stage == "share":
            assert reply is not None
            header, body = unpack(reply, "d")
            content = json.loads(body)
            sealed = dict.fromkeys(content["sealed"], "00" * 120)
            return pack(header, json.dumps({"sealed": sealed}).encode())
        return reply

    five.between("d", garbles)
    run = five.run("fedavg", guard=SECURE, rounds=1)
    (event,) = run.rounds[0]["events"]
    assert event == {"client": "d-0", "event": "left out", "reason": "the other sites cannot read its shares"}


def test_a_policy_asks_for_it(five: Federation) -> None:
    five.sites["a"] = five.site("a", Policy(guard=SECURE))
    with pytest.raises(UserError, match="a: its policy requires the guard secure=on; the run has none"):
        five.run("fedavg")
    five.run("fedavg", "masked", guard=SECURE, rounds=1)


def test_a_policy_asks_for_more_sites_to_hide_among(five: Federation) -> None:
    five.sites["a"] = five.site("a", Policy(guard=SECURE, secure_sites=5))
    five.between("e", lambda envelope, answer: None if stage_in(envelope) is not None else answer(envelope))
    run = five.run("fedavg", guard=SECURE, rounds=1)
    reasons = {event["client"]: event["reason"] for event in run.rounds[0]["events"]}
    assert reasons["a-0"] == "server: a secure sum of 4 sites hides too little; it needs 5"
    assert reasons.keys() == {"a-0", "e-0"}


@pytest.mark.parametrize(
    ("method", "options", "reason"),
    [
        ("i2pfl", {}, "needs .* of every client separately"),
        ("fedavg", {"robust": "median"}, "which secure aggregation hides"),
        ("fedavg", {"guard": "secure=on,quantise=8"}, "already quantises"),
    ],
)
def test_what_cannot_be_masked_is_refused(five: Federation, method: str, options: Any, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        five.run(method, **{"guard": SECURE, **options})

"""A site's own account: one answer to a round, however often it is asked, and none beyond its budget."""

import json
from typing import Any

import pytest
from local_sites import Federation

from protofed.clients import Train, decode_result, encode_job, unpack
from protofed.deploy import ledger as ledger_module
from protofed.deploy.policy import Policy
from protofed.deploy.protocol import SiteRequest
from protofed.deploy.server import WaitLimits
from protofed.deploy.site import Site
from protofed.errors import UserError
from protofed.records import Bytes, Message

NOISE = "clip=1,noise=2,source=system"


class Recorder:
    """Keeps what the server has asked a site."""

    def __init__(self, federation: Federation, name: str) -> None:
        self.asked: list[bytes] = []

        def keep(envelope: bytes, site: Any) -> bytes | None:
            self.asked.append(envelope)
            return site(envelope)

        federation.between(name, keep)

    def training(self, round: int) -> bytes:
        return next(envelope for envelope in self.asked if job_of(envelope) == ("train", round))


def job_of(envelope: bytes) -> tuple[str, int] | None:
    request = SiteRequest.from_bytes(envelope)
    if request.kind != "job":
        return None
    header = unpack(request.body, "server")[0]
    return header["job"], header["round"]


def recorded(federation: Federation, policy: Policy | None = None, **options: Any) -> Recorder:
    """What a server asks site b in a run that site takes no part in itself, so that nothing is spent yet."""
    for name in ("a", "b", "c"):
        federation.add(name, policy=policy if name == "b" else None)
    recorder = Recorder(federation, "b")
    federation.run("fedavg", guard=NOISE, **options)
    return recorder


def fresh(federation: Federation, name: str, policy: Policy | None = None) -> Site:
    """Site b as it would be had it never been asked."""
    federation.folder.joinpath("state", name).rename(federation.folder / "earlier")
    return federation.site(name, policy)


def lines(federation: Federation) -> list[dict[str, Any]]:
    path = federation.folder / "state" / "b" / "ledger.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_sixty_repeats_give_sixty_equal_answers(federation: Federation) -> None:
    """Else the mean of them would be the upload without its noise, while the run says that it is private."""
    envelope = recorded(federation, rounds=1).training(0)
    site = fresh(federation, "b")
    answers = {site.answer(envelope) for _ in range(60)}
    assert len(answers) == 1
    assert decode_result(answers.pop(), "b")
    assert [line["kind"] for line in lines(federation)] == ["train"]
    assert len((federation.folder / "state" / "b" / "sent.jsonl").read_text().splitlines()) == 60


def test_noise_differs_where_the_site_has_no_memory(federation: Federation) -> None:
    """Which shows that the equality above is the ledger's work, not that of a seed."""
    envelope = recorded(federation, rounds=1).training(0)
    first = fresh(federation, "b").answer(envelope)
    (federation.folder / "state" / "b").rename(federation.folder / "lost")
    assert federation.site("b").answer(envelope) != first


def test_another_broadcast_gets_the_same_answer(federation: Federation) -> None:
    """A server may not choose what a round is asked about after it has seen an answer."""
    recorder = recorded(federation, rounds=2)
    site = fresh(federation, "b")
    first = site.answer(recorder.training(0))
    request = SiteRequest.from_bytes(recorder.training(0))
    other = unpack(SiteRequest.from_bytes(recorder.training(1)).body, "server")[1]
    size = unpack(request.body, "server")[0]["size"]
    changed = encode_job(Train(0, "b-0"), Message(other, Bytes(**size)))
    envelope = SiteRequest("job", request.terms, None, changed).to_bytes()
    assert site.answer(envelope) == first


@pytest.mark.parametrize("moment", ["before it is sealed", "after it is sealed", "after it is entered"])
def test_a_site_killed_at_any_moment_never_answers_twice(
    federation: Federation, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        """As kill -9 would end the site."""

    envelope = recorded(federation, rounds=1).training(0)
    site = fresh(federation, "b")
    written: list[bytes] = []
    seal, append = ledger_module.RunLedger._seal, ledger_module.SiteLedger.append

    def dying_seal(self: Any, name: str, answer: bytes) -> None:
        if name.startswith("train"):
            if moment == "before it is sealed":
                raise Killed
            written.append(answer)
        seal(self, name, answer)

    def dying_append(self: Any, line: dict[str, Any]) -> None:
        if moment == "after it is sealed":
            raise Killed
        append(self, line)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(ledger_module.RunLedger, "_seal", dying_seal)
        patch.setattr(ledger_module.SiteLedger, "append", dying_append)
        with pytest.raises(Killed):
            site.answer(envelope)
    restarted = federation.site("b")
    answers = {restarted.answer(envelope) for _ in range(3)} | {federation.site("b").answer(envelope)}
    assert len(answers) == 1
    if written:
        assert answers == set(written)
    assert [line["kind"] for line in lines(federation)] == ["train"]


def test_a_round_that_is_over_is_not_answered_again(federation: Federation) -> None:
    recorder = recorded(federation, rounds=2)
    site = fresh(federation, "b")
    for round in (0, 1):
        assert b'"trained"' in site.answer(recorder.training(round))
    assert b"it is already at round 2, and no longer answers round 1" in site.answer(recorder.training(0))
    (answers,) = (federation.folder / "state" / "b" / "runs").glob("*/answers")
    assert sorted(path.name for path in answers.iterdir()) == ["state-1", "terms", "train-1"]


def test_a_lost_answer_is_not_made_again(federation: Federation) -> None:
    envelope = recorded(federation, rounds=1).training(0)
    site = fresh(federation, "b")
    site.answer(envelope)
    next((federation.folder / "state" / "b" / "runs").glob("*/answers/train-0")).unlink()
    assert b"already answered round 1, and the answer is no longer kept" in site.answer(envelope)


@pytest.mark.parametrize("limit", ["total_rounds", "epsilon"])
def test_beyond_its_budget_a_site_refuses(federation: Federation, limit: str) -> None:
    """Whatever the server says, and also after a restart."""
    recorder = recorded(federation, rounds=2)
    after_one, after_two = (line["epsilon"] for line in lines(federation) if line["kind"] == "train")
    budget = (after_one + after_two) / 2
    policy = Policy(total_rounds=1) if limit == "total_rounds" else Policy(epsilon=budget)
    reason = b"allows 1 rounds in total" if limit == "total_rounds" else b"of which %.3g is spent" % after_one
    site = fresh(federation, "b", policy)
    assert b'"trained"' in site.answer(recorder.training(0))
    assert reason in site.answer(recorder.training(1))
    assert reason in federation.site("b", policy).answer(recorder.training(1))
    assert len(lines(federation)) == 1


def test_runs_share_one_budget(federation: Federation) -> None:
    for name in ("a", "b", "c"):
        federation.add(name)
    for out in ("first", "second"):
        federation.run("fedavg", out, guard=NOISE, rounds=1)
    spent = [line["epsilon"] for line in lines(federation) if line["kind"] == "train"]
    policy = Policy(epsilon=sum(spent) * 1.01)
    site = federation.site("b", policy)
    budget = site._ledger.budget()
    assert budget.epsilon == pytest.approx(sum(spent))
    assert budget.delta == pytest.approx(2e-5)
    federation.sites["b"] = site
    run = federation.run("fedavg", "third", guard=NOISE, rounds=1)
    assert "its budget is epsilon" in run.rounds[0]["events"][0]["reason"]


def test_what_a_run_costs_is_what_the_server_says(federation: Federation) -> None:
    for name in ("a", "b", "c"):
        federation.add(name)
    run = federation.run("fedavg", guard=NOISE, rounds=3)
    (report,) = (federation.folder / "state" / "b").glob("runs/*/report.json")
    spent = json.loads(report.read_text())["spent"]
    assert spent["rounds"] == 3
    assert spent["epsilon"] == pytest.approx(run.summary["privacy"]["clients"]["b-0"])


@pytest.mark.parametrize(
    ("guard", "reason"),
    [(None, "the run guarantees none"), ("clip=1,noise=2", "the server can compute noise from the seed")],
)
def test_a_budget_needs_noise_that_the_server_does_not_know(
    federation: Federation, guard: str | None, reason: str
) -> None:
    federation.add("a")
    federation.add("b", policy=Policy(epsilon=8))
    with pytest.raises(UserError, match=reason):
        federation.run("fedavg", guard=guard)


def test_the_options_of_a_run_may_not_change(federation: Federation) -> None:
    """Less noise in its second half would cost more than the ledger, which knows one guard, says."""
    recorder = recorded(federation, rounds=2)
    site = fresh(federation, "b")
    site.answer(recorder.training(0))
    changed = recorder.training(1).replace(b"noise=2", b"noise=1")
    assert b"differ from those it started with" in federation.site("b").answer(changed)


def test_scores_are_counted_too(federation: Federation) -> None:
    """Every different model that is scored tells something of the test images."""
    recorder = recorded(federation, rounds=2)
    policy = Policy(evaluations=1)
    site = fresh(federation, "b", policy)
    first, second = (e for e in recorder.asked if (job_of(e) or ("", 0))[0] == "evaluate")
    site.answer(recorder.training(0))
    assert site.answer(first) == site.answer(first)
    request, other = SiteRequest.from_bytes(first), SiteRequest.from_bytes(second)
    body = other.body.replace(b'"round": 1', b'"round": 0')
    assert b"allows 1 evaluations per round" in site.answer(SiteRequest("job", request.terms, 0, body).to_bytes())


def test_the_console_says_what_leaves_and_what_is_spent(federation: Federation) -> None:
    said: list[str] = []
    federation.add("a")
    federation.add("b", tell=said.append)
    federation.run("fedavg", guard="clip=1,noise=2", rounds=2)
    uploads = [line for line in said if "an upload of" in line]
    assert [line.partition(":")[0] for line in uploads] == ["round 1", "round 2"]
    assert "epsilon" in uploads[0]
    assert "2 rounds in all" in uploads[1]


def test_a_retried_round_sends_the_same_upload(federation: Federation) -> None:
    """So that a retry costs nothing, and the server's account, which counts different uploads, is the site's."""
    for name in ("a", "b", "c"):
        federation.add(name)
    silent = 2

    def sometimes(envelope: bytes, site: Any) -> bytes | None:
        nonlocal silent
        if job_of(envelope) == ("train", 0) and silent:
            silent -= 1
            raise ConnectionError
        return site(envelope)

    federation.between("c", sometimes)
    run = federation.run("fedavg", guard=NOISE, limits=WaitLimits(min_sites=3, round_timeout=5.0, wait=5.0))
    once = federation.run("fedavg", "once", guard=NOISE)
    assert "repeated_uploads" not in run.rounds[0]
    assert run.summary["privacy"] == once.summary["privacy"]

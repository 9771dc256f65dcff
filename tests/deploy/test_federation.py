"""The federation over sites: the results of a run in one process, also when sites fail, hang, lie or come late."""

import hashlib
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from local_sites import OPTIONS, Federation
from safetensors.torch import load_file

import protofed
from protofed.clients import Evaluate, Failed, Trained, decode_job, decode_result, encode_job, encode_result, unpack
from protofed.data import load
from protofed.deploy import server
from protofed.deploy.policy import Policy
from protofed.deploy.protocol import SiteRequest
from protofed.deploy.server import WaitLimits
from protofed.errors import UserError
from protofed.inference.addition import AdditionResult
from protofed.inference.forget import forget
from protofed.inference.join import join
from protofed.method import knob
from protofed.methods.i2pfl import I2PFL
from protofed.records import Bytes, Weights, encode
from protofed.registry import register
from protofed.report import write_report
from protofed.testing import results_of, toy_data


def reference(three: Federation, method: str, out: str = "reference", **options: Any) -> dict[str, Any]:
    """What a run in one process leaves behind."""
    run = protofed.run(method, three.data, out=three.folder / out, engine="loop", **{**OPTIONS, **options})
    return results_of(run.path)


def equal(three: Federation, run: protofed.Run, expected: dict[str, Any]) -> None:
    """The server's files, the rounds, and the clients' states at the sites."""
    results = {name: value for name, value in results_of(run.path).items() if not name.startswith("clients/")}
    results |= {f"clients/{name}": state for name, state in three.states().items()}
    assert results["rounds.jsonl"] == expected["rounds.jsonl"]
    assert sorted(results) == sorted(expected)
    assert [name for name in expected if results[name] != expected[name]] == []


def job_in(envelope: bytes) -> tuple[str, int] | None:
    """What a message asks to be done, and in which round."""
    request = SiteRequest.from_bytes(envelope)
    if request.kind != "job":
        return None
    header = unpack(request.body, "server")[0]
    return header["job"], header["round"]


def is_training(envelope: bytes, round: int) -> bool:
    return job_in(envelope) == ("train", round)


@pytest.mark.parametrize("method", ["i2pfl", "fedavg", "conffedproto", "scaffold", "copa", "fedmp"])
def test_equals_a_run_in_one_process(method: str, three: Federation) -> None:
    equal(three, three.run(method), reference(three, method))


def test_equals_with_participation_validation_and_memory(three: Federation) -> None:
    options: dict[str, Any] = {
        "rounds": 3,
        "participation": 0.6,
        "optimizer": "adam",
        "set": {"model.hidden": 16, "persist_optimizer": "on", "data.validation": 0.2},
        "evaluate_local": True,
    }
    equal(three, three.run("i2pfl", **options), reference(three, "i2pfl", **options))


def test_a_site_keeps_its_model_and_a_report(three: Federation) -> None:
    run = three.run("conffedproto", model="cnn", set={})
    (report_file,) = (three.folder / "state" / "a").glob("runs/*/report.json")
    report = json.loads(report_file.read_text())
    assert report["accuracy"] == run.rounds[-1]["accuracy"]["personal"]["a-0"]
    assert sum(each["total"] for each in report["per_class"].values()) == 12
    assert report["metrics"]["accuracy"]["value"] == pytest.approx(report["accuracy"])
    assert report["metrics"]["images"] == 12
    model = report_file.with_name("model.safetensors")
    assert model.stat().st_size > 0
    assert not (run.path / "clients").exists() or not list((run.path / "clients").iterdir())


def test_what_is_predicted_for_single_images_stays_at_the_sites(
    three: Federation, caplog: pytest.LogCaptureFixture
) -> None:
    run = three.run("fedavg")
    assert run.predictions() is None
    assert "metrics" not in run.summary
    assert "stay at the sites" in caplog.text
    with pytest.raises(UserError, match=r"report\.json"):
        server.serve(None, "", three.folder / "by area", {"metric": "auc"}, WaitLimits())


def test_a_site_does_not_tell_what_it_predicts(three: Federation) -> None:
    """Whatever the server asks."""
    answers = []

    def asks_for_more(envelope: bytes, site: Any) -> bytes | None:
        request = SiteRequest.from_bytes(envelope)
        if request.kind == "job":
            job, message = decode_job(request.body, "server")
            if isinstance(job, Evaluate):
                curious = encode_job(replace(job, probabilities=True), message)
                answers.append(decode_result(site(replace(request, body=curious).to_bytes()), "a"))
        return site(envelope)

    three.between("a", asks_for_more)
    three.run("fedavg")
    assert answers
    assert all(isinstance(answer, Failed) and "stay here" in answer.reason for answer in answers)


def test_a_site_that_is_away_at_the_end_has_time_to_come_back(
    three: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_PAUSE", 0.05)
    away = 2

    def comes_back(envelope: bytes, site: Any) -> bytes | None:
        nonlocal away
        if SiteRequest.from_bytes(envelope).kind == "finish" and away:
            away -= 1
            raise ConnectionError
        return site(envelope)

    three.between("b", comes_back)
    three.run("i2pfl", limits=WaitLimits(round_timeout=5.0, wait=1.0))
    assert away == 0
    assert all(list((three.folder / "state" / name).glob("runs/*/model.safetensors")) for name in ("a", "b", "c"))


def test_the_server_does_not_train(three: Federation) -> None:
    """Not even to say how long it will take: that is up to the sites' machines."""

    class Watches:
        estimates = 0

        def run_estimate(self, run: Any, seconds: float) -> None:
            self.estimates += 1

    watches = Watches()
    three.run("i2pfl", callbacks=[watches])
    assert watches.estimates == 0


# Faults. A client that is left out of a round in one process is the reference for a site that gave no answer.


class Breaks(I2PFL):
    """I2PFL whose client b fails in one round."""

    paper = "for tests"
    since: int = knob("the round", default=1)

    def loss(self, net: Any, x: Any, y: Any, at: Any) -> Any:
        if at.client == "b-0" and at.round == self.since:
            raise ValueError("no luck")
        return super().loss(net, x, y, at)


def without_reasons(record: dict[str, Any]) -> dict[str, Any]:
    events = [(event["client"], event["event"]) for event in record["events"]]
    return {**{key: value for key, value in record.items() if key not in ("seconds", "bytes")}, "events": events}


def as_if_left_out(three: Federation, run: protofed.Run, round: int = 1) -> None:
    register("breaks")(Breaks)
    expected = protofed.run(
        "breaks", three.data, out=three.folder / "left-out", engine="loop",
        **{**OPTIONS, "rounds": 3, "set": {**OPTIONS["set"], "since": round}},
    )  # fmt: skip
    assert [without_reasons(line) for line in run.rounds] == [without_reasons(line) for line in expected.rounds]
    assert (run.path / "model.safetensors").read_bytes() == (expected.path / "model.safetensors").read_bytes()
    for name, state in three.states().items():
        assert state == (expected.path / "clients" / name).read_bytes()


def test_a_site_that_hangs_is_left_out_and_back_next_round(three: Federation) -> None:
    three.between("b", lambda envelope, site: None if is_training(envelope, 1) else site(envelope))
    run = three.run("i2pfl", rounds=3)
    assert run.rounds[1]["events"] == [
        {"client": "b-0", "event": "left out", "reason": "it did not answer within 0.3 s"}
    ]
    as_if_left_out(three, run)


def test_a_site_that_answers_late_is_as_if_it_had_not(three: Federation) -> None:
    """It has trained and remembers, but nobody has seen its upload: it goes back."""

    def late(envelope: bytes, site: Any) -> bytes | None:
        answer = site(envelope)
        return None if is_training(envelope, 1) else answer

    three.between("b", late)
    as_if_left_out(three, three.run("i2pfl", rounds=3))


def test_a_site_that_dies_while_it_answers_holds_nobody_up(three: Federation) -> None:
    """Flower would wait for the rest of its answer for hours."""

    def dies(envelope: bytes, site: Any) -> bytes | None:
        stuck = three.grid.stuck
        (stuck.add if is_training(envelope, 1) else stuck.discard)(three.node("b"))
        return site(envelope)

    three.between("b", dies)
    run = three.run("i2pfl", rounds=3, limits=WaitLimits(round_timeout=2.0, wait=1.0))
    assert run.rounds[1]["events"][0]["reason"] == "it did not answer within 2 s"
    as_if_left_out(three, run)


def test_a_site_that_is_killed_and_restarted_has_its_memory(three: Federation) -> None:
    def dies(envelope: bytes, _site: Any) -> bytes | None:
        three.sites["b"] = three.site("b")  # nothing of the old process is left
        return None if is_training(envelope, 1) else three.sites["b"].answer(envelope)

    three.between("b", dies)
    as_if_left_out(three, three.run("i2pfl", rounds=3))


def changed(envelope: bytes, change: Any) -> bytes:
    result = decode_result(envelope, "b")
    assert isinstance(result, Trained)
    return change(result)


def nan(result: Trained) -> bytes:
    damaged = bytearray(result.blob)
    damaged[-4:] = np.array([np.nan], dtype="<f4").tobytes()
    return encode_result(Trained(bytes(damaged), result.size, result.loss, result.samples))


def another_model(result: Trained) -> bytes:
    message = encode(Weights({"strange": torch.zeros(3)}, {}), "b")
    return encode_result(Trained(message.blob, message.size, result.loss, result.samples))


@pytest.mark.parametrize(
    ("garbage", "reason"),
    [
        (nan, "checksum|not finite"),
        (another_model, "missing"),
        (lambda result: encode_result(Trained(result.blob[:-9], result.size, {}, 3)), "announced"),
        (lambda _: b"hello?", "cannot be read"),
        (lambda _: b"\xff" * 9, "cannot be read"),
        (lambda result: encode_result(Trained(result.blob, Bytes(), {}, 3)), "announced"),
    ],
)
def test_garbage_is_refused_and_the_site_left_out(garbage: Any, reason: str, three: Federation) -> None:
    def lies(envelope: bytes, site: Any) -> bytes:
        answer = site(envelope)
        return changed(answer, garbage) if is_training(envelope, 1) else answer

    three.between("b", lies)
    run = three.run("i2pfl", rounds=3)
    (event,) = run.rounds[1]["events"]
    assert event["client"] == "b-0"
    assert re.search(reason, event["reason"])
    as_if_left_out(three, run)


def test_a_site_that_cannot_be_evaluated_leaves_a_gap(three: Federation) -> None:
    three.between(
        "b", lambda envelope, site: None if (job_in(envelope) or "")[0:1] == ("evaluate",) else site(envelope)
    )
    run = three.run("fedavg")
    view = run.rounds[0]["accuracy"]["global"]
    assert view["b"] is None
    assert view["average"] == pytest.approx((view["a"] + view["c"]) / 2)
    assert [event["event"] for event in run.rounds[0]["events"]] == ["not evaluated"]
    assert run.complete


def test_too_few_sites_begin_the_round_again(three: Federation) -> None:
    silent = 2

    def sometimes(envelope: bytes, site: Any) -> bytes | None:
        nonlocal silent
        if is_training(envelope, 0) and silent:
            silent -= 1
            return None
        return site(envelope)

    three.between("b", sometimes)
    run = three.run("i2pfl", limits=WaitLimits(min_sites=3, round_timeout=0.2, wait=1.0))
    equal(three, run, reference(three, "i2pfl"))


def test_a_run_ends_where_too_few_members_are_left_and_goes_on_with_fewer(three: Federation) -> None:
    class Revokes:
        def round_end(self, run: Any, record: Any) -> None:
            if "c" in three.members:
                three.members.remove("c")

    limits = WaitLimits(min_sites=3, round_timeout=0.3, wait=1.0)
    with pytest.raises(UserError, match="--min-sites 3 is more than the number of members, a, b; admit others"):
        three.run("i2pfl", limits=limits, callbacks=[Revokes()])
    run = three.run("i2pfl", resume=True, limits=WaitLimits(min_sites=2, round_timeout=0.3, wait=1.0))
    assert [(event["client"], event["event"]) for event in run.rounds[1]["events"]] == [
        ("c-0", "left out"),
        ("c", "not evaluated"),
    ]
    assert run.complete


def test_a_late_site_joins(three: Federation) -> None:
    three.online.discard("c")
    del three.members[2]

    class Arrives:
        def round_end(self, run: Any, record: Any) -> None:
            if record["round"] == 1:
                three.members.append("c")
                three.online.add("c")

    run = three.run("i2pfl", rounds=3, callbacks=[Arrives()])
    assert [line["participants"] for line in run.rounds] == [
        ["a-0", "b-0"],
        ["a-0", "b-0", "c-0"],
        ["a-0", "b-0", "c-0"],
    ]
    assert run.rounds[1]["events"][0]["event"] == "joined"
    assert set(run.rounds[2]["accuracy"]["global"]) >= {"a", "b", "c"}
    assert list(run.config["partition"]["clients"]) == ["a-0", "b-0", "c-0"]
    page = write_report(run.path).read_text()
    assert "c-0" in page


def test_a_run_that_does_not_list_its_late_site_can_be_reported(three: Federation) -> None:
    """Written before late sites were listed."""
    run = three.run("i2pfl")
    config = run.config
    del config["partition"]["clients"]["c-0"]
    (run.path / "run.json").write_text(json.dumps(config))
    assert "c-0" in write_report(run.path).read_text()


def test_a_late_site_is_turned_away_where_the_clients_are_fixed(three: Federation) -> None:
    del three.members[2]

    class Arrives:
        def round_end(self, run: Any, record: Any) -> None:
            if "c" not in three.members:
                three.members.append("c")

    run = three.run("copa", rounds=3, callbacks=[Arrives()])
    assert run.rounds[1]["events"] == [
        {"client": "c-0", "event": "turned away", "reason": "the method's clients are fixed from the start"}
    ]
    assert run.complete


class Killed(BaseException):
    """As a kill would end the server."""


@pytest.mark.parametrize("ask", ["train", "evaluate"])
def test_the_server_is_killed_and_resumed(ask: str, three: Federation) -> None:
    """In the middle of the second round: while training, and after all sites know that their uploads were accepted."""

    def fatal(envelope: bytes, site: Any) -> bytes | None:
        answer = site(envelope)
        if job_in(envelope) == (ask, 1):
            raise Killed
        return answer

    options: dict[str, Any] = {"rounds": 3, "set": {**OPTIONS["set"], "persist_optimizer": "on"}}
    three.between("c", fatal)
    with pytest.raises(Killed):
        three.run("i2pfl", **options)
    three.between("c", lambda envelope, site: site(envelope))
    run = three.run("i2pfl", resume=True, **options)
    equal(three, run, reference(three, "i2pfl", **options))


# Before the first round


def test_sites_without_a_class_in_common_are_refused(federation: Federation) -> None:
    federation.add("a")
    federation.add("b", labels="0-1=low,2-3=high")
    with pytest.raises(UserError, match=r"has the classes .* no other site has any of them"):
        federation.run("i2pfl")
    assert not (federation.folder / "run").exists()


def test_classes_are_joined_by_name(federation: Federation) -> None:
    federation.add("a", labels="2=class2,1=class1,0=class0")
    federation.add("b")
    run = federation.run("i2pfl")
    assert run.config["data"]["classes"] == ["class2", "class1", "class0", "class3"]
    held = {name: entry["per_class"] for name, entry in run.config["partition"]["clients"].items()}
    domain = federation.sites["b"].dataset.domains["b"]
    assert held["b-0"] == domain.train.y.bincount(minlength=4)[[2, 1, 0, 3]].tolist()
    assert held["a-0"][3] == 0


def test_spellings_that_look_alike_are_refused(federation: Federation) -> None:
    federation.add("a", labels="0-1=Normal,2-3=sick")
    federation.add("b", labels="0-1=normal,2-3=sick")
    with pytest.raises(UserError, match=r"look like one class.*--labels at the sites"):
        federation.run("i2pfl")


def test_versions_must_be_the_same(three: Federation) -> None:
    three.between("b", lambda envelope, site: site(envelope).replace(b'"protofed": "0', b'"protofed": "9'))
    with pytest.raises(UserError, match=r"b runs protofed 9.*install the same"):
        three.run("i2pfl")


def test_a_site_looks_at_the_servers_version_too(three: Federation) -> None:
    """Also where a run is resumed, after the server was brought up to date and the sites were not."""
    newer = b'"weights": null, "protofed": "9'
    three.between("b", lambda envelope, site: site(envelope.replace(newer[:-1] + b"0", newer)))
    with pytest.raises(UserError, match=r"b: it runs protofed 0.*the server 9.*install the same"):
        three.run("i2pfl")


def test_shapes_are_brought_to_one_as_in_a_run_in_one_process(three: Federation) -> None:
    larger_images_for(three, "b")
    run = three.run("i2pfl")
    assert run.config["data"]["image_shape"] == [1, 10, 10]
    equal(three, run, reference(three, "i2pfl"))


def test_grey_sites_need_no_more_than_an_image_size(three: Federation) -> None:
    larger_images_for(three, "b")
    assert three.run("i2pfl", image_size=8, rounds=1).config["data"]["image_shape"] == [1, 8, 8]


def test_shapes_may_differ_where_the_run_fixes_one(three: Federation) -> None:
    larger_images_for(three, "b")
    options: dict[str, Any] = {"image_size": 8, "set": {**OPTIONS["set"], "data.channels": 1}}
    equal(three, three.run("i2pfl", **options), reference(three, "i2pfl", **options))


def larger_images_for(three: Federation, name: str) -> None:
    file = Path(toy_data(three.folder / "larger", (name,), size=10)) / f"{name}.npz"
    for place in (Path(three.data), three.folder / "own" / name):
        shutil.copy(file, place)
    three.sites[name] = three.site(name)


def test_a_site_that_does_not_come_is_named(three: Federation) -> None:
    three.online.discard("b")
    with pytest.raises(UserError, match="missing: b"):
        three.run("i2pfl")


def test_more_sites_than_there_are_cannot_be_asked_for(three: Federation) -> None:
    with pytest.raises(UserError, match="--min-sites 4 is more than the number of members, a, b, c"):
        three.run("i2pfl", limits=WaitLimits(min_sites=4))
    assert not (three.folder / "run").exists()


def test_fewer_sites_may_begin(three: Federation) -> None:
    three.online.discard("b")
    run = three.run("i2pfl", limits=WaitLimits(min_sites=2, round_timeout=0.3, wait=1.0))
    assert run.rounds[0]["participants"] == ["a-0", "c-0"]


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        (Policy(methods=("fedavg",)), "its policy allows fedavg, not i2pfl"),
        (Policy(rounds=1), "its policy allows 1 rounds, not 2"),
        (Policy(guard="clip=1.0"), "its policy requires the guard clip=1.0; the run has none"),
    ],
)
def test_a_policy_refuses_a_run(policy: Policy, reason: str, federation: Federation) -> None:
    federation.add("a")
    federation.add("b", policy=policy)
    with pytest.raises(UserError, match=f"the run does not start; b: {reason}"):
        federation.run("i2pfl")


def test_a_policy_lets_no_large_message_out(federation: Federation) -> None:
    federation.add("a")
    federation.add("b", policy=Policy(message_bytes=1000))
    run = federation.run("i2pfl")
    assert "allows messages of at most 1000 bytes" in run.rounds[0]["events"][0]["reason"]
    sent = [json.loads(line) for line in (federation.folder / "state/b/sent.jsonl").read_text().splitlines()]
    assert max(line["bytes"] for line in sent) <= 1000


def test_a_file_of_the_servers_is_not_run(three: Federation, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("from protofed.methods.fedavg import FedAvg\nclass Mine(FedAvg):\n    'Mine.'\n")
    with pytest.raises(UserError, match="sites run only what is installed"):
        three.run(f"{tmp_path / 'mine.py'}:Mine")


def test_images_must_not_change_during_a_run(three: Federation) -> None:
    class Changes:
        def round_end(self, run: Any, record: Any) -> None:
            (three.folder / "own/b/b.npz").write_bytes((Path(three.data) / "a.npz").read_bytes())
            shorter = {k: v[:-1] if k.endswith("train") else v for k, v in np.load(Path(three.data) / "b.npz").items()}
            np.savez(three.folder / "own/b/b.npz", **shorter)
            three.sites["b"] = three.site("b")

    run = three.run("i2pfl", callbacks=[Changes()])
    assert "differ from those it announced" in run.rounds[1]["events"][0]["reason"]


# What leaves a site


def test_every_message_is_listed(three: Federation) -> None:
    three.run("i2pfl")
    lines = [json.loads(line) for line in (three.folder / "state/a/sent.jsonl").read_text().splitlines()]
    assert [line["kind"] for line in lines] == ["hello", "ready", "train", "evaluate", "train", "evaluate", "done"]
    assert [line["round"] for line in lines] == [None, None, 1, 1, 2, 2, None]
    carried = {hashlib.sha256(reply).hexdigest(): len(reply) for reply in three.grid.carried}
    assert all(carried[line["sha256"]] == line["bytes"] for line in lines)


@pytest.mark.parametrize("method", ["i2pfl", "fedavg", "conffedproto", "fedmp"])
def test_no_image_leaves_a_site(method: str, three: Federation) -> None:
    """Neither the pixels of an image, nor what the network sees of them, nor a part of either, is in what is sent."""
    three.run(method)
    together = b"\x00".join(three.grid.carried)
    for name in ("a", "b", "c"):
        dataset = load(str(three.folder / "own" / name))
        images = dataset.domains[name].train.x
        seen = dataset.normalise(images)
        for picture in (*images, *seen, *seen.double()):
            raw = picture.contiguous().numpy().tobytes()
            assert raw not in together
            rows = picture.reshape(-1, picture.shape[-1])
            assert not any(row.numpy().tobytes() in together for row in rows if len(row.unique()) > 4)


def test_the_search_for_images_would_find_one(three: Federation) -> None:
    dataset = load(str(three.folder / "own" / "a"))
    raw = dataset.normalise(dataset.domains["a"].train.x)[0].numpy().tobytes()
    assert raw in b"some header" + raw


def test_errors_are_told_and_logged_without_their_text(
    three: Federation, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The text of an unexpected error may quote what it stumbled over."""
    monkeypatch.setattr(server, "_TRIES", 1)

    class Leaky(I2PFL):
        """Its errors quote images."""

        paper = "for tests"

        def upload(self, net: Any, data: Any, at: Any) -> Any:
            if len(data.y) > 2:
                raise ValueError(f"bad image {next(iter(data.batches()))[0][0].flatten().tolist()}")
            return super().upload(net, data, at)

    register("leaky")(Leaky)
    with pytest.raises(
        UserError, match=r"every client failed in round 1.*ValueError.*tried 1 times; --resume continues"
    ):
        three.run("leaky", rounds=1)
    assert any(b"ValueError" in reply for reply in three.grid.carried)
    assert not any(b"bad image" in reply for reply in three.grid.carried)
    assert "upload" in caplog.text
    assert "bad image" not in caplog.text


def test_a_run_that_no_site_survives_ends_with_the_rounds_before(three: Federation) -> None:
    class Exploding(I2PFL):
        """In its second round every loss is infinite."""

        paper = "for tests"

        def loss(self, net: Any, x: Any, y: Any, at: Any) -> Any:
            terms, notes = super().loss(net, x, y, at)
            return {name: value * (float("inf") if at.round else 1) for name, value in terms.items()}, notes

    register("exploding")(Exploding)
    summary = three.run("exploding", rounds=4).summary
    assert (summary["status"], summary["rounds"]) == ("diverged", 1)
    assert "diverged in round 2: the weights of all 3 clients" in summary["warnings"][0]["text"]
    # The server knows how many test images of each class the sites have, so it can tell chance.
    assert set(summary["chance"]["global"]) >= {"a", "b", "c", "average"}


def test_a_site_leaves_after_the_end_by_handing_over_what_it_sent(three: Federation) -> None:
    """The server does not have it: the site's own state is subtracted, and what is left is a run without the site."""
    run = three.run("protoridge", dtype="float64")
    out = three.folder / "without-b"
    with pytest.raises(UserError, match="--state"):
        forget(run.path, "b-0", out=out)
    (state,) = (three.folder / "state" / "b").glob("runs/*/clients/b-0.safetensors")
    forget(run.path, "b-0", out=out, state=state)
    protofed.run(
        "protoridge",
        three.data,
        out=three.folder / "two",
        engine="loop",
        **{**OPTIONS, "dtype": "float64", "clients": "a=1,b=0,c=1"},
    )
    left, two = (load_file(three.folder / name / "model.safetensors") for name in ("without-b", "two"))
    for name, tensor in two.items():
        torch.testing.assert_close(left[name], tensor, atol=1e-9, rtol=0)


@pytest.mark.parametrize("method", ["fedncm", "fedcof", "protoridge"])
def test_a_newcomer_is_added_to_the_folder_of_a_deployment(method: str, federation: Federation) -> None:
    """After the end, where nobody of the deployment is there any more."""
    for name in ("a", "b"):
        federation.add(name)
    run = federation.run(method, dtype="float64")
    out = federation.folder / "with-c"
    result = join(run.path, federation.data, domains="c", out=out)
    assert isinstance(result, AdditionResult)
    assert result.sites == ("a-0", "b-0", "c-0")
    reference(federation, method, "three", dtype="float64")
    joined, expected = (load_file(federation.folder / name / "model.safetensors") for name in ("with-c", "three"))
    for name, tensor in expected.items():
        torch.testing.assert_close(joined[name], tensor, atol=1e-9, rtol=0)
    # And out again; its state is in the folder, others' are at their sites.
    forget(out, "c-0", out=federation.folder / "without-c")
    again, before = (load_file(federation.folder / name / "model.safetensors") for name in ("without-c", "run"))
    for name, tensor in before.items():
        torch.testing.assert_close(again[name], tensor, atol=1e-9, rtol=0)
    with pytest.raises(UserError, match="--state"):
        forget(out, "b-0", out=federation.folder / "without-b")

"""Sites that come and go while the server of a closed-form method is at work: the result is that of those who stay."""

import json
import random
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from local_sites import OPTIONS, Federation
from safetensors.torch import load_file

import protofed
from protofed.clients import unpack
from protofed.deploy.changes import SumChanges
from protofed.deploy.protocol import SiteRequest
from protofed.deploy.requests import OpenRequests, ask_to_forget
from protofed.deploy.server import WaitLimits
from protofed.errors import UserError
from protofed.federation import RunFolder
from protofed.testing import toy_data

EXACT = {"dtype": "float64"}
METHODS: list[tuple[str, dict[str, Any]]] = [
    ("fedncm", {}),
    ("fed3r", {}),
    ("fedcgs", {}),
    ("fedcof", {"parts": 2}),
    ("protoridge", {}),
    ("protoridge", {"balance": "domain"}),
    ("protoridge", {"gram": "sketch", "balance": "site"}),
]


def difference(one: Path, other: Path) -> float:
    left, right = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max()) for name in left)


class AfterRound:
    """Does something when the exchange is committed."""

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work

    def round_end(self, _run: Any, _record: Any) -> None:
        self._work()


def put_request(run: Path, client: str, state: Path | None = None) -> None:
    """As `protofed forget` writes it."""
    (run / "requests").mkdir(exist_ok=True)
    (run / "requests" / f"{client}.json").write_text(json.dumps({"forget": client}))
    if state is not None:
        (run / "requests" / f"{client}.safetensors").write_bytes(state.read_bytes())


def answer_to(run: Path, client: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run / "requests" / f"{client}.answer.json").read_text())
    return content


def reference(federation: Federation, method: str, sites: str, **options: Any) -> Path:
    """A run in one process with these sites from the start."""
    everybody = sorted(path.stem for path in Path(federation.data).glob("*.npz"))
    clients = ",".join(f"{name}={int(name in sites)}" for name in everybody)
    given = {**OPTIONS, **EXACT, **options, "clients": clients, "engine": "loop"}
    return protofed.run(method, federation.data, out=federation.folder / f"reference-{sites}", **given).path


@pytest.mark.parametrize(("method", "settings"), METHODS)
def test_a_site_is_forgotten_while_the_server_is_at_work(
    method: str, settings: dict[str, Any], three: Federation
) -> None:
    options = {"set": {**OPTIONS["set"], **settings}}
    path = three.folder / "run"
    run = three.run(method, callbacks=[AfterRound(lambda: put_request(path, "b-0"))], **EXACT, **options)
    assert difference(run.path, reference(three, method, "ac", **options)) < 1e-9
    record = answer_to(path, "b-0")
    assert record["left"] == ["a-0", "c-0"]
    assert record["model_sha256"]["before"] != record["model_sha256"]["after"]
    assert record["cannot_be_removed"]
    (written,) = json.loads((path / "forgotten.json").read_text())["forgotten"]
    assert {**record, "accuracy": None} == {**written, "accuracy": None}
    (line,) = run.rounds
    assert line["participants"] == ["a-0", "c-0"]
    assert [(event["client"], event["event"]) for event in line["events"]] == [("b-0", "forgotten")]
    assert run.summary["accuracy"]["global"]["b"] is None
    # The site is told, and gets no final model.
    (told,) = (three.folder / "state" / "b" / "runs").glob("*/forgotten.json")
    assert json.loads(told.read_text())["model_sha256"] == record["model_sha256"]
    assert not (told.parent / "model.safetensors").exists()
    assert three.sites["b"].finished


@pytest.mark.parametrize(("method", "settings"), METHODS)
def test_a_site_that_comes_after_the_exchange_is_added(
    method: str, settings: dict[str, Any], federation: Federation
) -> None:
    for name in ("a", "b"):
        federation.add(name)
    options = {"set": {**OPTIONS["set"], **settings}}

    def come() -> None:
        federation.add("c")

    run = federation.run(method, callbacks=[AfterRound(come)], **EXACT, **options)
    assert difference(run.path, reference(federation, method, "abc", **options)) < 1e-9
    (line,) = run.rounds
    assert line["participants"] == ["a-0", "b-0", "c-0"]
    assert list(run.config["partition"]["clients"]) == ["a-0", "b-0", "c-0"]
    (record,) = json.loads((run.path / "joined.json").read_text())["joined"]
    assert record["sites"] == ["a-0", "b-0", "c-0"]
    (model,) = (federation.folder / "state" / "c" / "runs").glob("*/model.safetensors")
    assert load_file(model).keys() >= load_file(run.path / "model.safetensors").keys()


@pytest.mark.parametrize("seed", range(4))
def test_any_order_ends_in_the_same_head(seed: int, tmp_path: Path) -> None:
    """Of six sites two begin; the others come and two go, in any order, while the server stays."""
    pytest.importorskip("flwr")
    names = ("a", "b", "c", "d", "e", "f")
    federation = Federation(tmp_path, toy_data(tmp_path / "data", names))
    for name in names[:2]:
        federation.add(name)
    rng = random.Random(seed)
    steps: list[tuple[str, str]] = [("come", name) for name in names[2:]]
    rng.shuffle(steps)
    # Who goes must have come.
    for name in ("b", "d"):
        come = steps.index(("come", name)) + 1 if ("come", name) in steps else 0
        steps.insert(rng.randint(come, len(steps)), ("go", name))
    path = tmp_path / "run"

    def play() -> None:
        for step, name in steps:
            if step == "come":
                federation.add(name)
                wait_for(lambda name=name: f"{name}-0" in RunFolder(path).committed_clients())
            else:
                put_request(path, f"{name}-0")
                wait_for(lambda name=name: (path / "requests" / f"{name}-0.answer.json").exists())

    limits = WaitLimits(round_timeout=5.0, wait=5.0, stay=600.0)
    player = threading.Thread(target=lambda: (play(), done.set()))
    done = threading.Event()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("protofed.deploy.server._PAUSE", 0.01)
        patch.setattr("protofed.deploy.server.time.monotonic", _clock_that_ends(done))
        run = federation.run("protoridge", limits=limits, callbacks=[AfterRound(player.start)], **EXACT)
    player.join()
    assert difference(run.path, reference(federation, "protoridge", "acef")) < 1e-9
    assert sorted(run.rounds[-1]["participants"]) == ["a-0", "c-0", "e-0", "f-0"]


def wait_for(happened: Callable[[], bool]) -> None:
    pause = threading.Event()
    while not happened():
        pause.wait(0.01)


def _clock_that_ends(done: threading.Event) -> Callable[[], float]:
    """The stay is over once everybody has come and gone."""
    real = time.monotonic
    return lambda: real() + (1e6 if done.is_set() else 0.0)


@pytest.mark.parametrize(
    ("method", "options", "reason"),
    [
        ("fedavg", {}, "fedavg cannot forget b-0: its state is not a sum over clients.*otherwise train again"),
        ("fedncm", {"set": {**OPTIONS["set"], "finetune": 1}}, "followed by rounds"),
        ("protoridge", {"robust": "median"}, "is not a sum"),
        ("fedncm", {"guard": "quantise=8"}, "rounded it"),
        ("protoridge", {"guard": "secure=on"}, "no single upload leaves a site.*--state"),
    ],
)
def test_what_cannot_be_subtracted_is_refused_and_the_run_goes_on(
    method: str, options: dict[str, Any], reason: str, three: Federation
) -> None:
    path = three.folder / "run"
    run = three.run(method, callbacks=[AfterRound(lambda: put_request(path, "b-0"))], **options)
    assert re.search(reason, answer_to(path, "b-0")["refused"])
    assert run.rounds[-1]["participants"] == ["a-0", "b-0", "c-0"]
    assert not (path / "forgotten.json").exists()
    assert not OpenRequests(path).clients()
    assert list((three.folder / "state" / "b" / "runs").glob("*/model.safetensors"))


def test_a_site_behind_a_secure_sum_may_hand_over_its_state(three: Federation) -> None:
    path = three.folder / "run"

    def hand_over() -> None:
        (state,) = (three.folder / "state" / "b").glob("runs/*/answers/../clients/b-0.*")
        put_request(path, "b-0", state)

    options = {"guard": "secure=on"}
    run = three.run("fedncm", callbacks=[AfterRound(hand_over)], **EXACT, **options)
    assert run.rounds[-1]["participants"] == ["a-0", "c-0"]
    # A secure sum is on a grid, which the state is not.
    assert difference(run.path, reference(three, "fedncm", "ac")) < 1e-4


def test_who_is_unknown_or_last_or_lies_is_refused(three: Federation) -> None:
    path = three.folder / "run"

    def ask() -> None:
        for client in ("nobody-0", "a-0", "b-0", "c-0"):
            put_request(path, client)

    run = three.run("fedncm", callbacks=[AfterRound(ask)], **EXACT)
    assert "nobody-0" in answer_to(path, "nobody-0")["refused"]
    assert "without c-0 nobody is left" in answer_to(path, "c-0")["refused"]
    assert run.rounds[-1]["participants"] == ["c-0"]
    assert "refused" not in answer_to(path, "a-0")


def test_other_bytes_than_were_sent_are_not_subtracted(three: Federation) -> None:
    path = three.folder / "run"

    def ask() -> None:
        state = json.loads((path / "sites.json").read_text())
        assert set(state["uploads"]) == {"a-0", "b-0", "c-0"}
        (sealed,) = (three.folder / "state" / "b").glob("runs/*/answers/train-0")
        (other,) = (three.folder / "state" / "a").glob("runs/*/answers/train-0")
        sealed.write_bytes(other.read_bytes())
        put_request(path, "b-0")

    run = three.run("fedncm", callbacks=[AfterRound(ask)], **EXACT)
    assert "differs from what it sent" in answer_to(path, "b-0")["refused"]
    assert run.rounds[-1]["participants"] == ["a-0", "b-0", "c-0"]


def test_a_complete_run_is_opened_again_for_those_who_come_and_go(federation: Federation) -> None:
    for name in ("a", "b"):
        federation.add(name)
    federation.run("protoridge", **EXACT)
    federation.add("c")
    put_request(federation.folder / "run", "a-0")
    run = federation.run("protoridge", resume=True, limits=WaitLimits(round_timeout=0.3, wait=1.0, stay=0.0), **EXACT)
    assert difference(run.path, reference(federation, "protoridge", "bc")) < 1e-9
    assert run.summary["accuracy_final"] == run.rounds[-1]["accuracy"]
    # Once more: who was forgotten stays out.
    again = federation.run("protoridge", resume=True, limits=WaitLimits(round_timeout=0.3, wait=1.0, stay=0.0), **EXACT)
    assert again.rounds[-1]["participants"] == ["b-0", "c-0"]


@pytest.mark.parametrize("stage", ["before the commit", "after the commit", "before the last step"])
def test_a_server_killed_while_it_forgets_has_done_so_or_not(
    stage: str, three: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def killed(*_: Any) -> None:
        raise Killed

    path = three.folder / "run"
    with monkeypatch.context() as patch:
        if stage == "before the commit":
            patch.setattr(RunFolder, "revise_round", killed)
        elif stage == "after the commit":
            patch.setattr(RunFolder, "_finish_revision", killed)
        else:
            patch.setattr(SumChanges, "_write", killed)
        with pytest.raises(Killed):
            three.run("protoridge", callbacks=[AfterRound(lambda: put_request(path, "b-0"))], **EXACT)
    run = three.run("protoridge", resume=True, limits=WaitLimits(round_timeout=0.3, wait=1.0, stay=0.0), **EXACT)
    # The request is still there: what is done already is refused, what is not is done now.
    refused = "has sent nothing" in answer_to(path, "b-0").get("refused", "")
    assert refused == (stage != "before the commit")
    assert run.rounds[-1]["participants"] == ["a-0", "c-0"]
    assert difference(run.path, reference(three, "protoridge", "ac")) < 1e-9


def test_without_a_server_at_work_a_folder_for_the_result_is_needed(three: Federation) -> None:
    run = three.run("fedncm")
    with pytest.raises(UserError, match=r"no server of this user on this machine is running.*give --out"):
        ask_to_forget(run.path, "b-0")
    assert not (run.path / "requests").exists()


def test_who_was_left_out_of_the_exchange_is_added_when_it_is_back(three: Federation) -> None:
    away = True

    def hesitate(envelope: bytes, answer: Callable[[bytes], bytes]) -> bytes | None:
        return None if away and asks_to_train(envelope) else answer(envelope)

    def come_back() -> None:
        nonlocal away
        away = False

    three.between("b", hesitate)
    limits = WaitLimits(min_sites=2, round_timeout=0.5, wait=1.0, stay=0.0)
    run = three.run("fedncm", limits=limits, callbacks=[AfterRound(come_back)], **EXACT)
    assert [event["event"] for event in run.rounds[-1]["events"]] == ["left out", "joined"]
    assert difference(run.path, reference(three, "fedncm", "abc")) < 1e-9


def test_garbage_of_who_comes_late_is_not_added(federation: Federation) -> None:
    for name in ("a", "b"):
        federation.add(name)

    def come() -> None:
        federation.add("c")
        federation.between("c", lambda envelope, answer: b"x" if asks_to_train(envelope) else answer(envelope))

    run = federation.run("protoridge", callbacks=[AfterRound(come)], **EXACT)
    assert run.rounds[-1]["participants"] == ["a-0", "b-0"]
    assert list(run.config["partition"]["clients"]) == ["a-0", "b-0"]
    assert difference(run.path, reference(federation, "protoridge", "ab")) < 1e-9


def asks_to_train(envelope: bytes) -> bool:
    request = SiteRequest.from_bytes(envelope)
    return request.kind == "job" and unpack(request.body, "server")[0]["job"] == "train"

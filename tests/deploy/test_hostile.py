"""One member of three sends whatever it likes: it is left out with a short reason, and nobody else notices.

The hostile answers of a kind go through one run, another one in each round. The reference is a run in which the member
does not answer at all.
"""

import math
import random
import struct
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from local_sites import Federation
from safetensors.numpy import load, save

from protofed.clients import encode_result, pack, unpack
from protofed.clients.wire import decode_result
from protofed.deploy.census import Hello
from protofed.deploy.protocol import SiteRequest
from protofed.deploy.server import WaitLimits
from protofed.engines.flower import prepare_flower
from protofed.errors import BadMessage
from protofed.records import KINDS, ClassTable, Mean, Weights, decode, encode, map_tensors
from protofed.records.codec import _checksum
from protofed.records.quantise import GRID
from protofed.runs import Run
from protofed.runs.assembly import assemble
from protofed.runs.options import make_options
from protofed.testing import toy_data

Lie = Callable[[bytes], bytes]
"""What is sent instead of an honest answer."""

LONGEST_REASON = 300
METHOD = "fedproto_avg"


def with_header(**changes: Any) -> Lie:
    """Other entries in the header; ... takes one out."""

    def lie(answer: bytes) -> bytes:
        header, body = unpack(answer, "b")
        header = {key: value for key, value in {**header, **changes}.items() if value is not ...}
        return pack(header, body)

    return lie


def with_body(change: Callable[[bytes], bytes]) -> Lie:
    """Other bytes for the record, whose size is told right."""

    def lie(answer: bytes) -> bytes:
        header, body = unpack(answer, "b")
        changed = change(body)
        size = {**dict.fromkeys(KINDS, 0), "other": len(changed)}
        return pack({**header, "size": size} if "size" in header else header, changed)

    return lie


def with_upload(change: Callable[[Any], Any]) -> Lie:
    """Another record, encoded as an honest client would."""

    def lie(answer: bytes) -> bytes:
        header, body = unpack(answer, "b")
        message = encode(change(decode(body, with_upload.template, "b")), "b")  # type: ignore[attr-defined]
        size = {**dict.fromkeys(KINDS, 0), "other": len(message.blob)}
        return pack({**header, "size": size}, message.blob)

    return lie


def of_size(name: str, value: Any) -> Lie:
    def lie(answer: bytes) -> bytes:
        header, body = unpack(answer, "b")
        return pack({**header, "size": {**header["size"], name: value}}, body)

    return lie


def scaled(factor: float) -> Callable[[Any], Any]:
    return lambda upload: replace(
        upload, weights=Mean(map_tensors(upload.weights.value, lambda t: t * 0 + factor), upload.weights.weight)
    )


def weighing(weight: Any) -> Callable[[Any], Any]:
    return lambda upload: replace(upload, weights=Mean(upload.weights.value, weight))


def counting(count: float) -> Callable[[Any], Any]:
    def change(upload: Any) -> Any:
        table = upload.P.value
        return replace(upload, P=Mean(ClassTable(table.rows, table.held * count), upload.P.weight))

    return change


def unchecked(name: str, value: float) -> Callable[[bytes], bytes]:
    """Raw bytes of the record with one value written over, checksum and all."""

    def change(body: bytes) -> bytes:
        place = body.find(struct.pack("<f", 0.0), len(body) // 2) if name else len(body) - 4
        return body[:place] + struct.pack("<f", value) + body[place + 4 :]

    return change


def constant(content: bytes) -> Lie:
    return lambda _: content


ESCAPES = "\x1b]0;owned\x07\x1b[2J\x1b[31mred\u202eevil\r\n\x00 end"
ANY: dict[str, Lie] = {
    "nothing": constant(b""),
    "one byte": constant(b"\0"),
    "a length alone": constant(struct.pack("<I", 0)),
    "a length beyond the end": constant(struct.pack("<I", 2**32 - 1) + b"{}"),
    "noise": constant(random.Random(0).randbytes(5000)),
    "a list": constant(struct.pack("<I", 2) + b"[]"),
    "deep nesting": constant(struct.pack("<I", 200_000) + b"[" * 200_000),
    "a header of 2 MB": constant(pack({"result": "failed", "reason": "x" * 2_000_000})),
    "no kind": with_header(result=...),
    "an unknown kind": with_header(result="system"),
    "a kind that is a list": with_header(result=["trained"]),
    "failed without a reason": constant(pack({"result": "failed"})),
    "failed with a list": constant(pack({"result": "failed", "reason": ["x"]})),
    "a reason of 900 kB": constant(pack({"result": "failed", "reason": "x" * 900_000})),
    "a reason with terminal codes": constant(pack({"result": "failed", "reason": ESCAPES})),
    "a trace of 900 kB": constant(pack({"result": "failed", "reason": "x", "trace": "y" * 900_000})),
    "hello as the answer": constant(pack({"hello": {}})),
    "a field with terminal codes": with_header(**{ESCAPES: 1}),
    "projected as the answer": constant(
        pack({"result": "projected", "before": {"correct": 1, "total": 2}, "after": {"correct": 1, "total": 2}})
    ),
    "probabilities as the answer": constant(pack({"result": "predicted", "dtype": "float32", "shape": [1]}, b"1234")),
}
TRAINED: dict[str, Lie] = {
    **ANY,
    "score as the answer": constant(
        encode_result(decode_result(pack({"result": "score", "correct": 1, "total": 2}), "b"))
    ),
    "size as texts": with_header(size=dict.fromkeys(KINDS, "1")),
    "size as a text": with_header(size="many"),
    "size of one kind a text": of_size("weights", "12"),
    "a negative size": of_size("weights", -5),
    "a size of 10**400": of_size("weights", 10**400),
    "a size of half a byte": of_size("weights", 0.5),
    "a size that is true": of_size("weights", True),
    "samples=-240": with_header(samples=-240),
    "samples=10**400": with_header(samples=10**400),
    "samples=1e12": with_header(samples=10**12),
    "samples as a text": with_header(samples="240"),
    "samples=NaN": with_header(samples=math.nan),
    "samples=Infinity": with_header(samples=math.inf),
    "no samples": with_header(samples=...),
    "20,000 names of losses": with_header(loss={f"loss-{number}": 1.0 for number in range(20_000)}),
    "a loss with a name of 10 kB": with_header(loss={"x" * 10_000: 1.0}),
    "a loss named by terminal codes": with_header(loss={ESCAPES: 1.0}),
    "a loss of 1e300": with_header(loss={"ce": 1e300}),
    "a loss of 10**400": with_header(loss={"ce": 10**400}),
    "a loss that is a list": with_header(loss={"ce": [1.0]}),
    "losses that are a list": with_header(loss=[1.0]),
    "an empty upload": with_body(lambda _: b""),
    "an upload cut off": with_body(lambda body: body[:-7]),
    "an upload with more": with_body(lambda body: body + b"more"),
    "an upload of noise": with_body(lambda body: random.Random(1).randbytes(len(body))),
    "an upload of 30 MB": with_body(lambda _: bytes(30_000_000)),
    "an upload with a flipped bit": with_body(lambda body: body[:-3] + bytes([body[-3] ^ 64]) + body[-2:]),
    "a value that is no number": with_body(unchecked("", math.nan)),
    "another record": with_body(lambda _: encode(Weights({"strange": torch.zeros(3)}, {}), "b").blob),
    "values of 1e30": with_upload(scaled(1e30)),
    "values of -3e38": with_upload(scaled(-3e38)),
    "a weight of 1e12": with_upload(weighing(1e12)),
    "a weight of 1e308": with_upload(weighing(1e308)),
    "one sample more than it has": with_upload(lambda upload: weighing(float(upload.weights.weight) + 1)(upload)),
    "class counts of 1e11": with_upload(counting(1e11)),
    "class counts of 1e38": with_upload(counting(1e38)),
    "weights of classes of 1e9": with_upload(lambda upload: replace(upload, P=Mean(upload.P.value, 1e9))),
}
SCORED: dict[str, Lie] = {
    **ANY,
    "trained as the answer": constant(
        pack({"result": "trained", "loss": {}, "samples": 1, "size": dict.fromkeys(KINDS, 0)})
    ),
    "more correct than there are": with_header(correct=13, total=12),
    "another number of samples": with_header(correct=5, total=5),
    "10**400 samples": with_header(correct=10**400, total=10**400),
    "a negative score": with_header(correct=-1),
    "a score as texts": with_header(correct="1"),
    "parts of others": with_header(parts=[{"correct": 1, "total": 1}] * 3),
    "parts of parts": with_header(parts=[{"correct": 1, "total": 1, "parts": [{"correct": 1, "total": 1}]}]),
    "a million parts": with_header(parts=[{}] * 200_000),
}


def federation_in(folder: Path) -> Federation:
    prepare_flower()
    federation = Federation(folder, toy_data(folder / "data", ("a", "b", "c")))
    for name in ("a", "b", "c"):
        federation.add(name)
    return federation


def job_in(envelope: bytes) -> tuple[str, int] | None:
    request = SiteRequest.from_bytes(envelope)
    if request.kind != "job":
        return None
    header = unpack(request.body, "server")[0]
    return header["job"], header["round"]


def lying_run(folder: Path, asked: str, lies: dict[str, Lie] | None, rounds: int, **options: Any) -> Run:
    """A run in whose round k member b answers with the k-th lie when it is asked that; None: it is away then."""
    federation = federation_in(folder)
    told = list((lies or {}).values())

    def answer(envelope: bytes, site: Any) -> bytes | None:
        job, honest = job_in(envelope), site(envelope)
        if job is None or job[0] != asked:
            return honest
        if lies is None:
            raise ConnectionError
        return told[job[1]](honest)

    federation.between("b", answer)
    assembly = assemble(
        make_options({"method": METHOD, "data": federation.data, "model": "mlp", "set": {"model.hidden": 16}}),
        folder / "unused",
    )
    with_upload.template = assembly.prepared.templates.upload  # type: ignore[attr-defined]
    limits = WaitLimits(round_timeout=60.0, wait=5.0)
    return federation.run(METHOD, rounds=rounds, limits=limits, **options)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    pytest.importorskip("flwr")
    return lying_run(tmp_path_factory.mktemp("lies"), "train", TRAINED, len(TRAINED), evaluate_every=1000)


@pytest.fixture(scope="module")
def scored(tmp_path_factory: pytest.TempPathFactory) -> Run:
    pytest.importorskip("flwr")
    return lying_run(tmp_path_factory.mktemp("lies"), "evaluate", SCORED, len(SCORED))


def shown(event: dict[str, str]) -> None:
    """A reason that may be printed."""
    assert event["reason"]
    assert event["reason"].isprintable()
    assert len(event["reason"]) <= LONGEST_REASON


@pytest.mark.parametrize("lie", TRAINED)
def test_whoever_lies_when_it_trains_is_left_out_of_the_round(lie: str, trained: Run) -> None:
    (event,) = trained.rounds[list(TRAINED).index(lie)]["events"]
    assert (event["client"], event["event"]) == ("b-0", "left out")
    shown(event)


def test_the_others_train_as_if_it_were_not_there(trained: Run, tmp_path: Path) -> None:
    silent = lying_run(tmp_path, "train", None, len(TRAINED), evaluate_every=1000)
    assert (trained.path / "model.safetensors").read_bytes() == (silent.path / "model.safetensors").read_bytes()
    told, expected = ([line["train_loss"] for line in run.rounds] for run in (trained, silent))
    assert told == expected
    assert (trained.path / "rounds.jsonl").stat().st_size < 1.5 * (silent.path / "rounds.jsonl").stat().st_size


@pytest.mark.parametrize("lie", SCORED)
def test_whoever_lies_about_its_score_has_none(lie: str, scored: Run) -> None:
    line = scored.rounds[list(SCORED).index(lie)]
    assert {(event["client"].removesuffix("-0"), event["event"]) for event in line["events"]} == {
        ("b", "not evaluated")
    }
    for event in line["events"]:
        shown(event)
    view = line["accuracy"]["global"]
    assert view["b"] is None
    assert view["average"] == pytest.approx((view["a"] + view["c"]) / 2)


# Quantised uploads

GRIDS = [[0, 1, 0, 1e30], [0, 1, 1e30, 1e30], [0, 1, -1, 4], [0, 1, 0.5], [0], [1e30, 1e30, 16], [0, 1, *[1] * 70], []]


def regridded(grid: list[float]) -> Lie:
    """Another grid for the first quantised tensor, with a checksum that is right."""

    def change(body: bytes) -> bytes:
        arrays = load(body)
        name = min(name for name in arrays if name.endswith(GRID))
        arrays[name] = np.array(grid, dtype=arrays[name].dtype)
        return save(arrays, {"check": _checksum(arrays)})

    return with_body(change)


def test_a_grid_that_is_none_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("flwr")
    lies = {str(grid): regridded(grid) for grid in GRIDS}
    run = lying_run(tmp_path, "train", lies, len(lies), evaluate_every=1000, guard="quantise=8")
    for line in run.rounds:
        (event,) = line["events"]
        assert (event["client"], event["event"]) == ("b-0", "left out")
        shown(event)


# Before a member takes part

HELLO: dict[str, Any] = {
    "protofed": version("protofed"),
    "classes": ["x", "y"],
    "image_shape": [1, 8, 8],
    "train": [3, 4],
    "test": [1, 0],
}
HELLOS: dict[str, Any] = {
    "nothing": None,
    "a list": [],
    "empty": {},
    "empty classes": {**HELLO, "classes": [], "train": [], "test": []},
    "class counts of 1e11": {**HELLO, "train": [10**11, 1]},
    "class counts that add up to too many": {**HELLO, "train": [9_000_000, 9_000_000]},
    "class counts of 10**400": {**HELLO, "test": [10**400, 1]},
    "negative counts": {**HELLO, "test": [-1, 5]},
    "counts as texts": {**HELLO, "train": ["3", "4"]},
    "counts of half an image": {**HELLO, "train": [0.5, 4]},
    "fewer counts than classes": {**HELLO, "train": [3]},
    "no images": {**HELLO, "train": [0, 0]},
    "100,000 classes": {**HELLO, "classes": [str(k) for k in range(100_000)]},
    "a class with a long name": {**HELLO, "classes": ["x" * 1000, "y"]},
    "a class named by terminal codes": {**HELLO, "classes": [ESCAPES, "y"]},
    "two classes of one name": {**HELLO, "classes": ["x", "x"]},
    "images without a side": {**HELLO, "image_shape": [1, 0, 8]},
    "images of 1e9 x 1e9": {**HELLO, "image_shape": [1, 10**9, 10**9]},
    "two sides": {**HELLO, "image_shape": [8, 8]},
    "a version that is a number": {**HELLO, "protofed": 1},
    "more": {**HELLO, "more": 1},
}


def test_an_honest_hello_is_read() -> None:
    assert Hello.read(HELLO, "b").train == (3, 4)


@pytest.mark.parametrize("hello", HELLOS)
def test_a_hello_that_is_none_is_refused(hello: str) -> None:
    with pytest.raises(BadMessage, match=r"^b: ") as caught:
        Hello.read(HELLOS[hello], "b")
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 2 * LONGEST_REASON


def says(hello: bytes) -> Callable[[bytes, Any], bytes]:
    return lambda envelope, site: hello if SiteRequest.from_bytes(envelope).kind == "hello" else site(envelope)


def test_garbage_of_a_late_member_does_not_end_the_run(three: Federation) -> None:
    class Arrives:
        def round_end(self, run: Any, record: Any) -> None:
            if "c" not in three.members:
                three.members.append("c")

    del three.members[2]
    three.members.append("c")
    three.between("c", says(pack({"hello": {**HELLO, "train": [10**11, 1]}})))
    del three.members[2]
    run = three.run("i2pfl", rounds=5, callbacks=[Arrives()])
    events = [(event["client"], event["event"]) for line in run.rounds for event in line["events"]]
    assert events == [("c-0", "turned away")]
    assert run.complete


def widening(envelope: bytes, site: Any) -> bytes:
    """The site's own hello, with a thousand classes of its own in it."""
    answer = site(envelope)
    if SiteRequest.from_bytes(envelope).kind != "hello":
        return bytes(answer)
    hello = unpack(answer, "site")[0]["hello"]
    more = [f"class {k} of mine" for k in range(1000)]
    counts = {part: [*hello[part], *(1 for _ in more)] for part in ("train", "test")}
    return pack({"hello": {**hello, "classes": [*hello["classes"], *more], **counts}})


def test_a_hello_that_widens_the_classes_leaves_that_member_out(three: Federation) -> None:
    three.between("b", widening)
    run = three.run("i2pfl", limits=WaitLimits(min_sites=2, round_timeout=5.0, wait=5.0))
    assert run.complete
    assert all(line["participants"] == ["a-0", "c-0"] for line in run.rounds)
    assert "of mine" not in (run.path / "sites.json").read_text()


@pytest.mark.parametrize(
    "hello", [b"", b"garbage", pack({"hello": []}), pack({"result": "failed"}), pack({"hello": HELLO})]
)
@pytest.mark.parametrize("liar", ["a", "b"])
def test_garbage_before_the_first_round_leaves_that_member_out(hello: bytes, liar: str, three: Federation) -> None:
    """Also the first member's, to which the others are not compared; and also a valid hello of other classes."""
    three.between(liar, says(hello))
    run = three.run("i2pfl", limits=WaitLimits(min_sites=2, round_timeout=5.0, wait=5.0))
    assert run.complete
    assert all(line["participants"] == [f"{name}-0" for name in "abc" if name != liar] for line in run.rounds)


def test_an_answer_to_begin_that_is_none_is_told(three: Federation, caplog: pytest.LogCaptureFixture) -> None:
    def mute(envelope: bytes, site: Any) -> bytes:
        kind = SiteRequest.from_bytes(envelope).kind
        return pack({"result": "failed"}) if kind in ("begin", "finish") else site(envelope)

    three.between("b", mute)
    run = three.run("i2pfl", limits=WaitLimits(min_sites=2, round_timeout=5.0, wait=5.0))
    assert run.complete
    assert "it gives no reason" in caplog.text

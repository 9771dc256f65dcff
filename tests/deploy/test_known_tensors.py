"""What a site has already is not sent again, and what it computes with is the same."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from local_sites import Federation
from safetensors.numpy import save

from protofed.deploy.known_tensors import KeptTensors, TensorPart, is_lacking, lacking, leave_out, tensor_parts
from protofed.deploy.protocol import SiteRequest
from protofed.errors import BadMessage


def tensor(seed: int) -> Any:
    return np.random.default_rng(seed).random((100, 100))


ONE = save({"a": tensor(1), "b": tensor(2), "short": np.arange(9)})
TWICE = save({"again": tensor(2), "b": tensor(2), "c": tensor(3), "short": np.arange(8)})


def test_only_large_tensors_are_named() -> None:
    parts = tensor_parts(ONE)
    assert [part.length for part in parts] == [80_000, 80_000]
    assert ONE[parts[0].start : parts[0].start + parts[0].length] in (tensor(1).tobytes(), tensor(2).tobytes())
    assert tensor_parts(b"") == tensor_parts(b"no record at all") == tensor_parts(b"\x02" + bytes(7) + b"[]") == ()


def test_what_is_left_out_is_put_in_again() -> None:
    kept = KeptTensors()
    assert kept.complete(*leave_out(ONE, tensor_parts(ONE), ())) == ONE
    known = [part.digest for part in tensor_parts(ONE)]
    body, parts = leave_out(TWICE, tensor_parts(TWICE), known)
    assert len(body) < len(TWICE) - 150_000
    assert kept.complete(body, parts) == TWICE
    # What it keeps is the last request, and in a request nothing is there twice.
    body, parts = leave_out(ONE, tensor_parts(ONE), known)
    assert kept.complete(body, parts) is None
    body, parts = leave_out(TWICE, tensor_parts(TWICE), ())
    assert [part.sent for part in parts].count(False) == 1
    assert KeptTensors().complete(body, parts) == TWICE


def test_a_request_goes_over_the_wire_with_its_parts() -> None:
    body, parts = leave_out(TWICE, tensor_parts(TWICE), ())
    request = SiteRequest("hello", body=body, tensors=parts)
    assert SiteRequest.from_bytes(request.to_bytes()) == request


@pytest.mark.parametrize(
    "parts",
    [
        [TensorPart(10, 5, "x"), TensorPart(0, 5, "y")],
        [TensorPart(0, 500, "x")],
        [TensorPart(0, 50, "x"), *(TensorPart(50 * k, 50, "x", False) for k in range(1, 100))],
    ],
)
def test_parts_that_do_not_fit_are_refused(parts: list[TensorPart]) -> None:
    with pytest.raises(BadMessage, match="server: "):
        KeptTensors().complete(bytes(60), parts)


def test_who_lacks_something_says_so() -> None:
    assert is_lacking(lacking())
    assert not is_lacking(b"garbage")


LARGE = {"model": "mlp", "set": {"model.hidden": 1024}}


def test_a_run_is_the_same_and_sends_less(three: Federation) -> None:
    """Site b forgets what it had before every job, as if it were started again, and gets everything."""
    sent: dict[str, list[int]] = {name: [] for name in "ac"}
    answers: list[bytes] = []

    def count(name: str) -> Any:
        def between(envelope: bytes, site: Any) -> bytes:
            if SiteRequest.from_bytes(envelope).kind == "job":
                sent[name].append(len(envelope))
            return bytes(site(envelope))

        return between

    def forget(envelope: bytes, site: Any) -> bytes:
        request = SiteRequest.from_bytes(envelope)
        unknown = tuple(replace(part, digest=part.digest if part.sent else "0" * 64) for part in request.tensors)
        answers.append(site(replace(request, tensors=unknown).to_bytes()))
        return answers[-1]

    for name in "ac":
        three.between(name, count(name))
    three.between("b", forget)
    run = three.run("i2pfl", rounds=3, **LARGE)
    assert not any(line["events"] for line in run.rounds)
    assert any(is_lacking(answer) for answer in answers)
    # Training of the first round sends the weights, evaluation those of the next one, which training has then.
    first, evaluated, second, *_ = sent["a"]
    assert second < 0.2 * first
    assert evaluated < 1.5 * first
    for name in "abc":
        three.between(name, forget)
    whole = three.run("i2pfl", "whole", rounds=3, **LARGE)
    assert [line["accuracy"] for line in run.rounds] == [line["accuracy"] for line in whole.rounds]
    assert (run.path / "model.safetensors").read_bytes() == (whole.path / "model.safetensors").read_bytes()

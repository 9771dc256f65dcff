"""Jobs and results as bytes: they come back as they were, and whatever else arrives is refused, never obeyed."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protofed.clients import (
    Evaluate,
    Failed,
    Predict,
    Predicted,
    Score,
    Train,
    Trained,
    decode_job,
    decode_result,
    encode_job,
    encode_result,
    pack,
    unpack,
)
from protofed.errors import BadMessage
from protofed.records import Bytes, Message

MESSAGE = Message(b"record", Bytes(1, 2, 0, 3))
JOBS = [
    Train(3, "a-0"),
    Evaluate("global", 1, None, "a"),
    Evaluate("personal", 1, "a-0", None, True),
    Predict(2, "a", "b"),
]
RESULTS = [Trained(b"record", Bytes(1, 2, 0, 3), {"ce": 0.1 + 0.2}, 7), Score(1, 3), Failed("why", "where")]


@pytest.mark.parametrize("job", JOBS)
def test_a_job_comes_back(job: Any) -> None:
    assert decode_job(encode_job(job, MESSAGE), "server") == (job, MESSAGE)


@pytest.mark.parametrize("result", RESULTS)
def test_a_result_comes_back(result: Any) -> None:
    assert decode_result(encode_result(result), "a") == result


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_probabilities_come_back(dtype: Any) -> None:
    given = np.random.default_rng(0).random((5, 3)).astype(dtype)
    result = decode_result(encode_result(Predicted(given)), "a")
    assert isinstance(result, Predicted)
    assert result.probabilities.dtype == dtype
    assert (result.probabilities == given).all()


def test_a_loss_that_is_not_a_number_comes_back() -> None:
    result = decode_result(encode_result(Trained(b"", Bytes(), {"ce": float("nan")}, 1)), "a")
    assert isinstance(result, Trained)
    assert np.isnan(result.loss["ce"])


@pytest.mark.parametrize(
    ("header", "body", "reason"),
    [
        ({"result": "score", "correct": 5, "total": 3}, b"", "not a valid score"),
        ({"result": "score", "correct": "many", "total": 3}, b"", "'correct' of the Score"),
        ({"result": "score", "correct": 1, "total": 3, "images": [1]}, b"", "no field 'images'"),
        ({"result": "trained", "size": {}, "loss": {}, "samples": 1}, b"", "what its bytes are"),
        ({"result": "predicted", "dtype": "object", "shape": [1]}, b"12345678", "no array"),
        ({"result": "predicted", "dtype": "float32", "shape": [9]}, b"12345678", "promised shape"),
        ({"result": "system"}, b"", "no result"),
        ({}, b"", "no result"),
    ],
)
def test_what_is_no_result_is_refused(header: Any, body: bytes, reason: str) -> None:
    with pytest.raises(BadMessage, match=f"site: .*{reason}"):
        decode_result(pack(header, body), "site")


def test_announced_bytes_must_have_come() -> None:
    envelope = encode_job(JOBS[0], MESSAGE)
    with pytest.raises(BadMessage, match="5 bytes arrived, but 6 were announced"):
        decode_job(envelope[:-1], "server")


@given(st.binary(max_size=200))
@settings(max_examples=300)
def test_noise_is_refused(noise: bytes) -> None:
    for decode in (decode_job, decode_result):
        with pytest.raises(BadMessage):
            decode(noise, "x")


@given(st.integers(0, 400), st.integers(1, 255))
@settings(max_examples=200)
def test_a_damaged_envelope_is_refused_or_something_else_of_the_same_kind(place: int, change: int) -> None:
    envelope = bytearray(encode_result(RESULTS[0]))
    envelope[place % len(envelope)] ^= change
    try:
        result = decode_result(bytes(envelope), "x")
    except BadMessage:
        return
    assert isinstance(result, Trained)


WORDS = st.text("ab", max_size=3)
VALUES = st.none() | st.booleans() | st.integers() | WORDS


@given(VALUES | st.lists(VALUES, max_size=3) | st.dictionaries(WORDS, VALUES, max_size=3))
@settings(max_examples=100)
def test_any_header_is_read_or_refused(value: Any) -> None:
    text = json.dumps(value).encode()
    envelope = len(text).to_bytes(4, "little") + text
    if isinstance(value, dict):
        assert unpack(envelope, "x") == (value, b"")
    else:
        with pytest.raises(BadMessage):
            unpack(envelope, "x")

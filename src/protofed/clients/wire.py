"""Jobs and results as bytes, for engines whose clients are other machines. Never pickled: what arrives is checked.

An envelope is a length, a JSON header of that length, and a body: a record as the codec has encoded it, or the values
of an array.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from pydantic import TypeAdapter, ValidationError

from protofed.clients import jobs
from protofed.errors import BadMessage
from protofed.records import KINDS, Bytes, Message

_LENGTH = struct.Struct("<I")
_CHECKS: dict[type, TypeAdapter[Any]] = {}
_JOBS = {
    kind.__name__.lower(): kind for kind in (jobs.Train, jobs.Summarise, jobs.Evaluate, jobs.Predict, jobs.Project)
}
_FLOATS = ("float32", "float64")


@dataclass(frozen=True)
class _TrainedHeader:
    """What a client reports beside its upload."""

    loss: dict[str, float]
    samples: int


def pack(header: Mapping[str, Any], body: bytes = b"") -> bytes:
    """One envelope."""
    text = json.dumps(header).encode()
    return _LENGTH.pack(len(text)) + text + body


def unpack(envelope: bytes, sender: str) -> tuple[dict[str, Any], bytes]:
    """Header and body of an envelope."""
    try:
        (length,) = _LENGTH.unpack_from(envelope)
        start = _LENGTH.size + length
        if start > len(envelope):
            raise ValueError("it is cut off")
        header = json.loads(envelope[_LENGTH.size : start])
        if not isinstance(header, dict):
            raise ValueError("its header is not an object")
    except (struct.error, ValueError, RecursionError) as error:
        raise BadMessage(f"{sender}: the envelope cannot be read ({error})") from None
    return header, envelope[start:]


def encode_job(job: jobs.Job, message: Message) -> bytes:
    """A job and the message that comes with it."""
    return pack({"job": type(job).__name__.lower(), **asdict(job), "size": asdict(message.size)}, message.blob)


def decode_job(envelope: bytes, sender: str) -> tuple[jobs.Job, Message]:
    """The job in an envelope; anything that is not one is refused in the name of the sender."""
    header, body = unpack(envelope, sender)
    kind = _JOBS.get(str(header.pop("job", "")))
    if kind is None:
        raise BadMessage(f"{sender}: the envelope holds no job")
    size = _size(header.pop("size", None), body, sender)
    return _checked(kind, header, sender), Message(body, size)


def encode_result(result: jobs.Result) -> bytes:
    """The result of a job."""
    if isinstance(result, jobs.Trained):
        report = {"size": asdict(result.size), "loss": result.loss, "samples": result.samples}
        return pack({"result": "trained", **report}, result.blob)
    if isinstance(result, jobs.Predicted):
        array = np.ascontiguousarray(result.probabilities)
        return pack({"result": "predicted", "dtype": array.dtype.name, "shape": array.shape}, array.tobytes())
    return pack({"result": type(result).__name__.lower(), **asdict(result)})


def decode_result(envelope: bytes, sender: str) -> jobs.Result:
    """The result in an envelope, checked."""
    header, body = unpack(envelope, sender)
    kind = header.pop("result", None)
    if kind == "trained":
        size = _size(header.pop("size", None), body, sender)
        report = _checked(_TrainedHeader, header, sender)
        return jobs.Trained(body, size, report.loss, report.samples)
    if kind == "predicted":
        return jobs.Predicted(_array(header, body, sender))
    if kind == "score":
        score: jobs.Score = _checked(jobs.Score, header, sender)
        _refuse_impossible(score, sender)
        return score
    if kind == "projected":
        projected: jobs.Projected = _checked(jobs.Projected, header, sender)
        for score in (projected.before, projected.after):
            _refuse_impossible(score, sender)
        return projected
    if kind == "failed":
        failed: jobs.Failed = _checked(jobs.Failed, header, sender)
        return failed
    raise BadMessage(f"{sender}: the envelope holds no result")


def _refuse_impossible(score: jobs.Score, sender: str) -> None:
    for part in (score, *score.parts):
        if not 0 <= part.correct <= part.total:
            raise BadMessage(f"{sender}: {part.correct} correct of {part.total} is no score")


def _array(header: dict[str, Any], body: bytes, sender: str) -> Any:
    dtype, shape = header.get("dtype"), header.get("shape")
    if dtype not in _FLOATS or not isinstance(shape, list):
        raise BadMessage(f"{sender}: the envelope holds no array of probabilities")
    try:
        return np.frombuffer(body, dtype=dtype).reshape(shape)
    except (TypeError, ValueError) as error:
        raise BadMessage(f"{sender}: the array does not have the shape that is promised ({error})") from None


def _size(report: Any, body: bytes, sender: str) -> Bytes:
    """Bytes by kind as the sender counted them, which must add up to what has arrived."""
    if not isinstance(report, dict) or sorted(report) != sorted(KINDS):
        raise BadMessage(f"{sender}: the envelope does not say what its bytes are")
    size: Bytes = _checked(Bytes, report, sender)
    if size.total != len(body) or min(report.values()) < 0:
        raise BadMessage(f"{sender}: {len(body)} bytes have come where {size.total} are announced")
    return size


def _checked(kind: type[Any], values: Mapping[str, Any], sender: str) -> Any:
    """An instance of a dataclass from values that were sent."""
    unknown = values.keys() - {entry.name for entry in fields(kind)}
    if unknown:
        raise BadMessage(f"{sender}: a {kind.__name__} has no field {sorted(unknown)[0]!r}")
    if kind not in _CHECKS:
        _CHECKS[kind] = TypeAdapter(kind)
    try:
        return _CHECKS[kind].validate_python(dict(values))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise BadMessage(f"{sender}: field {field!r} of the {kind.__name__}: {first['msg']}") from None

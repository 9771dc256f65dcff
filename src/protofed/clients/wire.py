"""Jobs and results as bytes, for engines whose clients are other machines. Never pickled: what arrives is checked.

An envelope is a length, a JSON header of that length, and a body: a record as the codec has encoded it, or the values
of an array. Headers are short, their numbers are numbers, and their texts are made printable; what the answer to a
certain job may be is for `federation/door.py` to say.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError

from protofed.clients import jobs
from protofed.errors import BadMessage
from protofed.records import KINDS, Bytes, Message
from protofed.text import printable

_LENGTH = struct.Struct("<I")
_CHECKS: dict[type, TypeAdapter[Any]] = {}
_JOBS = {
    kind.__name__.lower(): kind for kind in (jobs.Train, jobs.Summarise, jobs.Evaluate, jobs.Predict, jobs.Project)
}
_FLOATS = ("float32", "float64")
_LONGEST_HEADER = 64 * 2**20
"""Of what a server sends, which lists all sites and classes."""
_LONGEST_ANSWER = 2**20
"""A longer header of an answer is not even parsed."""
_LONGEST_TRACE = 20_000
MOST_LOSSES, LONGEST_NAME = 64, 100

Count = Annotated[int, Field(strict=True, ge=0, le=2**53)]
"""A number of things that somebody else claims; larger ones are not even exact in a float."""
Name = Annotated[str, Field(strict=True, min_length=1, max_length=LONGEST_NAME)]


@dataclass(frozen=True)
class _TrainedHeader:
    """What a client reports beside its upload."""

    loss: Annotated[dict[Name, float], Field(max_length=MOST_LOSSES)]
    samples: Count


@dataclass(frozen=True)
class _SizeHeader:
    """Bytes by kind."""

    weights: Count
    prototypes: Count
    features: Count
    other: Count


@dataclass(frozen=True)
class _PartHeader:
    """A score without parts of its own."""

    correct: Count
    total: Count
    parts: tuple[()] = ()


@dataclass(frozen=True)
class _ScoreHeader:
    """A score."""

    correct: Count
    total: Count
    parts: tuple[_PartHeader, ...] = ()

    def score(self) -> jobs.Score:
        """As clients give it."""
        return jobs.Score(self.correct, self.total, tuple(jobs.Score(part.correct, part.total) for part in self.parts))


@dataclass(frozen=True)
class _ProjectedHeader:
    """Two scores."""

    before: _ScoreHeader
    after: _ScoreHeader


def pack(header: Mapping[str, Any], body: bytes = b"") -> bytes:
    """One envelope."""
    text = json.dumps(header).encode()
    return _LENGTH.pack(len(text)) + text + body


def unpack(envelope: bytes, sender: str, longest: int = _LONGEST_HEADER) -> tuple[dict[str, Any], bytes]:
    """Header and body of an envelope; a header longer than `longest` bytes is refused unread."""
    try:
        (length,) = _LENGTH.unpack_from(envelope)
        start = _LENGTH.size + length
        if start > len(envelope):
            raise ValueError("it is truncated")
        if length > longest:
            raise ValueError(f"its header takes {length} bytes, at most {longest} are read")
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
    return checked(kind, header, sender), Message(body, size)


def encode_result(result: jobs.Result) -> bytes:
    """The result of a job."""
    if isinstance(result, jobs.Trained):
        report = {"size": asdict(result.size), "loss": result.loss, "samples": result.samples}
        return pack({"result": "trained", **report}, result.blob)
    if isinstance(result, jobs.Predicted):
        array = np.ascontiguousarray(result.probabilities)
        return pack({"result": "predicted", "dtype": array.dtype.name, "shape": array.shape}, array.tobytes())
    return pack({"result": type(result).__name__.lower(), **asdict(result)})


def unpack_answer(envelope: bytes, sender: str) -> tuple[dict[str, Any], bytes]:
    """Header and body of what a site answers."""
    return unpack(envelope, sender, _LONGEST_ANSWER)


def refusal_in(envelope: bytes, sender: str) -> str | None:
    """Why a site refuses what it was asked, in printable words; None where it does not."""
    try:
        header, _ = unpack_answer(envelope, sender)
    except BadMessage as problem:
        return printable(str(problem))
    return printable(str(header.get("reason", "it gives no reason"))) if header.get("result") == "failed" else None


def decode_result(envelope: bytes, sender: str) -> jobs.Result:
    """The result in an envelope, checked."""
    header, body = unpack_answer(envelope, sender)
    kind = header.pop("result", None)
    if kind == "trained":
        size = _size(header.pop("size", None), body, sender)
        report = checked(_TrainedHeader, header, sender)
        return jobs.Trained(body, size, report.loss, report.samples)
    if kind == "predicted":
        return jobs.Predicted(_array(header, body, sender))
    if kind == "score":
        return _possible(checked(_ScoreHeader, header, sender).score(), sender)
    if kind == "projected":
        projected = checked(_ProjectedHeader, header, sender)
        return jobs.Projected(*(_possible(each.score(), sender) for each in (projected.before, projected.after)))
    if kind == "failed":
        failed: jobs.Failed = checked(jobs.Failed, header, sender)
        return jobs.Failed(printable(failed.reason), failed.trace[:_LONGEST_TRACE], failed.not_finite)
    raise BadMessage(f"{sender}: the envelope holds no result")


def _possible(score: jobs.Score, sender: str) -> jobs.Score:
    for part in (score, *score.parts):
        if part.correct > part.total:
            raise BadMessage(f"{sender}: {part.correct} correct of {part.total} is not a valid score")
    return score


def _array(header: dict[str, Any], body: bytes, sender: str) -> Any:
    dtype, shape = header.get("dtype"), header.get("shape")
    if dtype not in _FLOATS or not isinstance(shape, list):
        raise BadMessage(f"{sender}: the envelope holds no array of probabilities")
    try:
        return np.frombuffer(body, dtype=dtype).reshape(shape)
    except (TypeError, ValueError, OverflowError) as error:
        raise BadMessage(f"{sender}: the array does not have the promised shape ({error})") from None


def _size(report: Any, body: bytes, sender: str) -> Bytes:
    """Bytes by kind as the sender counted them, which must add up to what has arrived."""
    if not isinstance(report, dict) or sorted(report) != sorted(KINDS):
        raise BadMessage(f"{sender}: the envelope does not say what its bytes are")
    size = Bytes(**asdict(checked(_SizeHeader, report, sender)))
    if size.total != len(body):
        raise BadMessage(f"{sender}: {len(body)} bytes arrived, but {size.total} were announced")
    return size


def checked(kind: type[Any], values: Any, sender: str, what: str | None = None) -> Any:
    """An instance of a dataclass from values that were sent; its types and their bounds are what is let in."""
    name = what or kind.__name__.strip("_").removesuffix("Header")
    if not isinstance(values, Mapping):
        raise BadMessage(f"{sender}: there is no {name}")
    unknown = values.keys() - {entry.name for entry in fields(kind)}
    if unknown:
        raise BadMessage(f"{sender}: a {name} has no field {printable(repr(sorted(unknown)[0]), LONGEST_NAME)}")
    if kind not in _CHECKS:
        _CHECKS[kind] = TypeAdapter(kind)
    try:
        return _CHECKS[kind].validate_python(dict(values))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        field = printable(".".join(str(part) for part in first["loc"]), LONGEST_NAME)
        raise BadMessage(f"{sender}: field {field!r} of the {name}: {printable(first['msg'])}") from None

"""Tensors that a site has already are not sent again.

What is evaluated after a round is what the next round begins with, and a model to be scored comes with the broadcast
that holds the same weights. A request names its large tensors by their hashes; those that were in the last request this
site has answered, or earlier in this one, are left out of it and put in again at the site. A site that was restarted
says that it lacks them, and gets everything. Nothing that is computed depends on it.
"""

import hashlib
import json
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from protofed.clients import pack, unpack_answer
from protofed.errors import BadMessage

_LENGTH = struct.Struct("<Q")
_SMALLEST = 2**16
"""Bytes below which a tensor is not worth its hash."""
_LARGEST_GROWTH = 4
"""So many times what was sent and kept a request may be when it is complete: weights are in it twice at most."""
_LACKS = "lacks tensors"


@dataclass(frozen=True)
class TensorPart:
    """Where a tensor lies in the body of a request."""

    start: int
    length: int
    digest: str
    sent: bool = True
    """Whether it is there; else the site has it."""


def tensor_parts(blob: bytes) -> tuple[TensorPart, ...]:
    """The large tensors of an encoded record, in the order in which they lie there."""
    try:
        (length,) = _LENGTH.unpack_from(blob)
        data = _LENGTH.size + length
        header = json.loads(blob[_LENGTH.size : data])
        places = sorted(entry["data_offsets"] for name, entry in header.items() if name != "__metadata__")
    except (struct.error, ValueError, KeyError, AttributeError, TypeError):
        return ()  # no record: it is sent as it is
    return tuple(
        TensorPart(data + start, end - start, hashlib.sha256(memoryview(blob)[data + start : data + end]).hexdigest())
        for start, end in places
        if end - start >= _SMALLEST
    )


def leave_out(body: bytes, parts: Sequence[TensorPart], known: Iterable[str]) -> tuple[bytes, tuple[TensorPart, ...]]:
    """A body without the tensors that are known, or were in it before, and its parts as they are then."""
    there, told, pieces, position = set(known), [], [], 0
    for part in parts:
        told.append(TensorPart(part.start, part.length, part.digest, part.digest not in there))
        there.add(part.digest)
        if not told[-1].sent:
            pieces.append(body[position : part.start])
            position = part.start + part.length
    return b"".join([*pieces, body[position:]]) if pieces else body, tuple(told)


class KeptTensors:
    """The tensors of the last request, at a site."""

    def __init__(self) -> None:
        self._kept: dict[str, bytes] = {}

    def complete(self, body: bytes, parts: Sequence[TensorPart]) -> bytes | None:
        """The body with all its tensors, which are kept; None where one is missing here."""
        absent = sum(part.length for part in parts if not part.sent)
        here = len(body) + sum(len(tensor) for tensor in self._kept.values())
        if absent + len(body) > _LARGEST_GROWTH * here:
            raise BadMessage("server: the request would be far larger than what was sent")
        found: dict[str, bytes] = {}
        pieces, position, taken = [], 0, 0
        for part in parts:
            gap = part.start - position
            if gap < 0 or part.length < 0:
                raise BadMessage("server: the tensors of the request overlap")
            pieces.append(body[taken : taken + gap])
            taken += gap
            if part.sent:
                tensor: bytes | None = body[taken : taken + part.length]
                taken += part.length
            else:
                tensor = found.get(part.digest, self._kept.get(part.digest))
            if tensor is None:
                return None
            if len(tensor) != part.length:
                raise BadMessage("server: a tensor of the request does not have its stated length")
            pieces.append(tensor)
            found[part.digest] = tensor
            position = part.start + part.length
        if parts:
            self._kept = found
        return b"".join([*pieces, body[taken:]])


def lacking() -> bytes:
    """What a site answers that does not have what was left out."""
    return pack({"result": _LACKS})


def is_lacking(reply: bytes) -> bool:
    """Whether a site has answered so."""
    try:
        return len(reply) < _SMALLEST and unpack_answer(reply, "site")[0].get("result") == _LACKS
    except BadMessage:
        return False

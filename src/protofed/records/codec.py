"""One codec for every engine: a record as safetensors bytes, and back against a template that says what is expected.

What is encoded is a valid safetensors file; its header carries a checksum over the names, types, shapes and values,
so a damaged message is refused and never half-used. The number of bytes reported is the length of what is encoded.
"""

import json
import math
import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cache, lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from safetensors.torch import load
from torch import Tensor

from protofed.errors import BadMessage, NotFinite
from protofed.records.quantise import GRID, Quantiser, unpack
from protofed.records.types import Record

R = TypeVar("R", bound=Record)

KINDS = ("weights", "prototypes", "features", "other")

_TYPES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
# What a name, a type, a shape and two offsets take in a header at most, and its frame.
_ENTRY, _FRAME = 256, 4096


@dataclass(frozen=True)
class Bytes:
    """Bytes by kind; headers, running statistics and sample counts are `other`."""

    weights: int = 0
    prototypes: int = 0
    features: int = 0
    other: int = 0

    @property
    def total(self) -> int:
        """Exactly the length of what was encoded."""
        return self.weights + self.prototypes + self.features + self.other

    def __add__(self, more: "Bytes") -> "Bytes":
        return Bytes(*(getattr(self, kind) + getattr(more, kind) for kind in KINDS))

    def as_dict(self) -> dict[str, int]:
        """The contract's form, with the total."""
        return {**asdict(self), "total": self.total}


@dataclass(frozen=True)
class Message:
    """An encoded record and what its bytes are."""

    blob: bytes
    size: Bytes


def encode(record: Record, sender: str, quantiser: Quantiser | None = None) -> Message:
    """The record as bytes; a non-finite value is refused, naming the sender.

    A quantiser makes few bits of what is learnt from samples; statistics and counts travel as they are.
    """
    arrays: dict[str, NDArray[Any]] = {}
    by_kind = dict.fromkeys(KINDS, 0)
    for name, tensor, kind in _leaves(record):
        values = tensor.detach()
        _refuse_not_finite(values, name, sender)
        # ascontiguousarray would turn a scalar into a vector of one.
        arrays[name] = np.asarray(values.cpu().numpy(), order="C")
        if quantiser is not None and kind != "other" and tensor.is_floating_point():
            arrays[name], arrays[name + GRID] = quantiser.pack(arrays[name])
        by_kind[kind] += arrays[name].nbytes
    blob = save(arrays, {"check": _checksum(arrays)})
    by_kind["other"] += len(blob) - sum(by_kind.values())
    return Message(blob, Bytes(**by_kind))


def decode(blob: bytes, like: R, sender: str, bits: int | None = None, largest: float = math.inf) -> R:
    """The record in `blob`, which must have the structure of `like`; anything else is refused, naming the field.

    `bits` says how many the sender's quantiser left of a number. A number beyond `largest` is refused, too.
    """
    with _readable(sender):
        # A quantised tensor is written as two.
        promised = _promised(BytesIO(blob), len(blob), lambda: _longest_header(like) * (1 if bits is None else 2))
        tensors = load(blob)
    _verify(tensors, promised, sender)
    if bits is not None:
        tensors = _unpacked(tensors, bits, sender)
    if largest < math.inf:
        _refuse_beyond(tensors, largest, sender)
    return _matched(tensors, like, sender)


def decode_file(path: Path, like: R, sender: str) -> R:
    """The record in a file. Its tensors are mapped into memory: what is not looked at is not read, what is not changed
    costs nothing of its own.
    """
    with _readable(sender):
        with path.open("rb") as file:
            promised = _promised(file, path.stat().st_size, lambda: _longest_header(like))
        with safe_open(path, "pt") as mapped:
            tensors = {name: mapped.get_tensor(name) for name in mapped.keys()}  # noqa: SIM118 (it is no dictionary)
    _verify(tensors, promised, sender)
    return _matched(tensors, like, sender)


def conform(record: Record, like: R, sender: str) -> tuple[R, Bytes]:
    """The record as its receiver would decode it, and the bytes it would take; what would be refused there is refused.

    For a record that is used where it was made: no bytes are written.
    """
    tensors: dict[str, Tensor] = {}
    by_kind = dict.fromkeys(KINDS, 0)
    for name, tensor, kind in _leaves(record):
        tensors[name] = tensor.detach().cpu()
        by_kind[kind] += tensor.nbytes
    by_kind["other"] += _header_length(tuple((name, t.dtype, tuple(t.shape)) for name, t in tensors.items()))
    return _matched(tensors, like, sender), Bytes(**by_kind)


@lru_cache(maxsize=1024)
def _header_length(entries: tuple[tuple[str, torch.dtype, tuple[int, ...]], ...]) -> int:
    """Bytes of a message besides its values: they depend on names, types and shapes alone."""
    arrays = {name: torch.zeros(shape, dtype=dtype).numpy() for name, dtype, shape in entries}
    return len(save(arrays, {"check": _checksum({})})) - sum(array.nbytes for array in arrays.values())


def _matched(tensors: dict[str, Tensor], like: R, sender: str) -> R:
    """A record of the structure of `like` that takes all the tensors."""
    record = _rebuild(like, tensors, "", sender)
    if tensors:
        raise BadMessage(f"{sender}: unexpected field {sorted(tensors)[0]!r} in a {type(like).__name__} message")
    return record  # type: ignore[no-any-return]


def _leaves(value: Any, path: str = "", kind: str = "other") -> Iterator[tuple[str, Tensor, str]]:
    """Every tensor below `value` with its path and the kind it is counted as."""
    if isinstance(value, Tensor):
        yield path, value, kind
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, _below(path, key), kind)
    elif isinstance(value, Record):
        for name, item in value.to_wire().items():
            yield from _leaves(item, _below(path, name), value.kinds[name] or kind)


def _below(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name


def _checksum(arrays: Mapping[str, NDArray[Any]]) -> str:
    """A CRC over everything that has a meaning, in an order that does not depend on the layout of the file."""
    check = 0
    for name in sorted(arrays):
        array = arrays[name]
        check = zlib.crc32(f"{name}:{_type_name(array.dtype)}:{array.shape}".encode(), check)
        check = zlib.crc32(array.reshape(-1).view(np.uint8).data, check)
    return f"{check:08x}"


@cache
def _type_name(dtype: "np.dtype[Any]") -> str:
    """What numpy calls a type; it puts the name together anew each time it is asked."""
    return dtype.name


def _longest_header(like: Record) -> int:
    """How long the header of such a record may be; a longer one is not even parsed, as it would cost memory."""
    # A character of a name takes up to six in JSON.
    return _FRAME + sum(_ENTRY + 6 * len(name) for name, _, _ in _leaves(like))


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; two readers might choose differently between two values of one name."""
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        raise ValueError("a name occurs twice")
    return mapping


@contextmanager
def _readable(sender: str) -> Iterator[None]:
    """Errors in the form of a message name its sender."""
    try:
        yield
    except (struct.error, ValueError, KeyError, TypeError, RecursionError, SafetensorError) as error:
        raise BadMessage(f"{sender}: the message cannot be read ({error})") from None


def _promised(file: BinaryIO, size: int, longest_header: Callable[[], int]) -> str:
    """The checksum that a message claims to have, from its header, which is read if it is not longer than expected."""
    (length,) = struct.unpack("<Q", file.read(8))
    if length > size - 8:
        raise ValueError("the header is longer than the message")
    if length > _FRAME and length > longest_header():
        raise ValueError(f"the header takes {length} bytes, at most {longest_header()} are expected")
    header = json.loads(file.read(length), object_pairs_hook=_each_once)
    return str(header["__metadata__"]["check"])


def _verify(tensors: dict[str, Tensor], promised: str, sender: str) -> None:
    """What was read is what was written."""
    strange = [name for name, tensor in tensors.items() if tensor.dtype not in _TYPES]
    if strange:
        raise BadMessage(f"{sender}: field {strange[0]!r} has a type that is never sent")
    if _checksum({name: tensor.numpy() for name, tensor in tensors.items()}) != promised:
        raise BadMessage(f"{sender}: the message is corrupted (its checksum does not match)")


def _unpacked(tensors: dict[str, Tensor], bits: int, sender: str) -> dict[str, Tensor]:
    """Quantised tensors by the names and in the types they had; all others as they are."""
    grids = {name.removesuffix(GRID): tensor for name, tensor in tensors.items() if name.endswith(GRID)}
    plain = {name: tensor for name, tensor in tensors.items() if not name.endswith(GRID)}
    for name, grid in sorted(grids.items()):
        if name not in plain:
            raise BadMessage(f"{sender}: field {name!r} is missing")
        try:
            plain[name] = unpack(plain[name], grid, bits)
        except ValueError as error:
            raise BadMessage(f"{sender}: field {name!r} cannot be read: {error}") from None
    return plain


def _rebuild(like: Any, tensors: dict[str, Tensor], path: str, sender: str, free_rows: bool = False) -> Any:
    """A value of the structure of `like`, taking its tensors out of `tensors`."""
    if isinstance(like, Tensor):
        return _fitting(tensors, path, like, sender, free_rows)
    if isinstance(like, dict):
        return {key: _rebuild(item, tensors, _below(path, key), sender) for key, item in like.items()}
    if isinstance(like, Record):
        parts = {
            name: _rebuild(item, tensors, _below(path, name), sender, name in like.free_rows)
            for name, item in like.wire_template().items()
        }
        try:
            return like.from_wire(parts)
        except ValueError as error:
            raise BadMessage(f"{sender}: field {path}/{error}") from None
    return like


def _fitting(tensors: dict[str, Tensor], path: str, like: Tensor, sender: str, free_rows: bool) -> Tensor:
    """The tensor at `path`, which must have the type and shape of `like` and be finite."""
    tensor = tensors.pop(path, None)
    if tensor is None:
        raise BadMessage(f"{sender}: field {path!r} is missing")
    if tensor.dtype != like.dtype:
        raise BadMessage(f"{sender}: field {path!r} has type {_TYPES[tensor.dtype]}, expected {_TYPES[like.dtype]}")
    skip = 1 if free_rows else 0
    if tensor.ndim != like.ndim or tensor.shape[skip:] != like.shape[skip:]:
        raise BadMessage(f"{sender}: field {path!r} has shape {_shape(tensor)}, expected {_shape(like, free_rows)}")
    _refuse_not_finite(tensor, path, sender)
    return tensor


def _shape(tensor: Tensor, free_rows: bool = False) -> str:
    sizes = [str(size) for size in tensor.shape]
    return "x".join(["any", *sizes[1:]] if free_rows else sizes) or "scalar"


def _refuse_not_finite(tensor: Tensor, name: str, sender: str) -> None:
    # A finite sum proves all values finite at half the cost; only a sum that is not calls for the exact look.
    if tensor.is_floating_point() and not math.isfinite(tensor.sum()) and not bool(tensor.isfinite().all()):
        raise NotFinite(f"{sender}: field {name!r} holds values that are not finite")


def _refuse_beyond(tensors: Mapping[str, Tensor], largest: float, sender: str) -> None:
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.numel():
            most = float(torch.linalg.vector_norm(tensor, math.inf))
            if largest < most < math.inf:  # what is not finite has an error of its own
                raise BadMessage(
                    f"{sender}: field {name!r} contains {most:.1e}, but nothing beyond {largest:.0e} is accepted"
                )

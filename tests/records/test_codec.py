"""The codec: what goes in comes out, its bytes are what they are said to be, and damage is refused by name."""

import json
import struct
import zlib
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import Tensor

from protofed.errors import BadMessage
from protofed.records import (
    ClassTable,
    Each,
    Features,
    Mean,
    Nothing,
    PrototypeSet,
    Record,
    Weights,
    conform,
    decode,
    decode_file,
    encode,
    map_tensors,
)

TYPES = [torch.float64, torch.float32, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool]


class Inner(Record):
    """A record in a record."""

    table: ClassTable
    known_to_both: str


class Everything(Record):
    """All that can be in a message."""

    weights: Weights
    table: ClassTable
    bank: Features
    centres: PrototypeSet
    average: Mean[Weights]
    average_table: Mean[ClassTable]
    each: Each[Inner]
    by_client: dict[str, ClassTable]
    odd: dict[str, Tensor]
    nothing: Nothing


@st.composite
def tensors(draw: st.DrawFn, dtype: torch.dtype | None = None, shape: list[int] | None = None) -> Tensor:
    """Any tensor that may travel."""
    if shape is None:
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
    dtype = dtype or draw(st.sampled_from(TYPES))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 2, shape, generator=generator).to(dtype)


@st.composite
def tables(draw: st.DrawFn, classes: int, dim: int) -> ClassTable:
    """Prototypes of some of the classes, possibly none or all."""
    count = torch.tensor(draw(st.lists(st.integers(0, 5), min_size=classes, max_size=classes))).float()
    rows = draw(tensors(torch.float32, [classes, dim])) * (count > 0)[:, None]
    return ClassTable(rows, count)


@st.composite
def labelled(draw: st.DrawFn, kind: type[Features] | type[PrototypeSet], classes: int, dim: int) -> Any:
    """Rows with labels, as many as it likes."""
    labels = torch.tensor(draw(st.lists(st.integers(0, classes - 1), max_size=5)), dtype=torch.int64)
    return kind(draw(tensors(torch.float32, [len(labels), dim])), labels, classes)


names = st.text(st.characters(codec="utf-8", exclude_characters="/", exclude_categories=("Cs", "Cc")), min_size=1)


@st.composite
def weights(draw: st.DrawFn) -> Weights:
    """Some parameters and statistics."""
    found = draw(st.dictionaries(names, tensors(torch.float32), max_size=3))
    return Weights(found, {f"{name}.mean": draw(tensors(torch.float32)) for name in found})


@st.composite
def records(draw: st.DrawFn) -> Everything:
    """A message with everything in it."""
    classes, dim = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    average = draw(tables(classes, dim))
    return Everything(
        weights=draw(weights()),
        table=draw(tables(classes, dim)),
        bank=draw(labelled(Features, classes, dim)),
        centres=draw(labelled(PrototypeSet, classes, dim)),
        average=Mean(draw(weights()), draw(st.floats(0, 1e6))),
        average_table=Mean(average, average.count.double()),
        each=Each(Inner(draw(tables(classes, dim)), "not sent")),
        by_client={client: draw(tables(classes, dim)) for client in draw(st.sets(names, max_size=2))},
        odd=draw(st.dictionaries(names, tensors(), max_size=3)),
        nothing=Nothing(),
    )


def emptied(value: Any) -> Any:
    """A template of the same structure: no values, no rows where rows are free."""
    if isinstance(value, Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return {key: emptied(item) for key, item in value.items()}
    if isinstance(value, Features | PrototypeSet):
        return type(value)(value.rows[:0], value.labels[:0], value.classes)
    if isinstance(value, Mean):
        return Mean(emptied(value.value), torch.as_tensor(value.weight, dtype=torch.float64) * 0)
    if isinstance(value, Record):
        return type(value)(**{entry.name: emptied(getattr(value, entry.name)) for entry in fields(value)})
    return value


def same(left: Any, right: Any) -> bool:
    """Equal in structure, types, shapes and values."""
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        left, right = torch.as_tensor(left), torch.as_tensor(right)
        return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, Mean):
        weight, other = (torch.as_tensor(mean.weight, dtype=torch.float64) for mean in (left, right))
        return torch.equal(weight, other) and same(left.value, right.value)
    if isinstance(left, Record):
        parts = [entry.name for entry in fields(left)]
        return type(left) is type(right) and all(same(getattr(left, name), getattr(right, name)) for name in parts)
    return left == right


@settings(max_examples=60)
@given(records())
def test_what_is_encoded_comes_back(record: Everything) -> None:
    message = encode(record, "site")
    back = decode(message.blob, emptied(record), "site")
    assert same(record, back)
    assert encode(back, "site").blob == message.blob


@settings(max_examples=60)
@given(records())
def test_bytes_are_exact_and_by_kind(record: Everything) -> None:
    message = encode(record, "site")
    size = message.size
    assert size.total == len(message.blob)
    assert size.weights == sum(
        tensor.nbytes for found in (record.weights, record.average.value) for tensor in found.params.values()
    )
    held_tables = [record.table, record.average_table.value, record.each.value.table, *record.by_client.values()]
    dim = record.table.rows.shape[1]
    held = sum(int((table.count > 0).sum()) for table in held_tables)
    assert size.prototypes == 4 * dim * (held + len(record.centres.labels))
    assert size.features == 4 * dim * len(record.bank.labels)
    assert size.as_dict() == {
        "weights": size.weights,
        "prototypes": size.prototypes,
        "features": size.features,
        "other": size.other,
        "total": len(message.blob),
    }
    assert (size + size).total == 2 * size.total


@settings(max_examples=60)
@given(records())
def test_what_is_not_sent_is_received_and_counted_as_if_it_were(record: Everything) -> None:
    message, like = encode(record, "site"), emptied(record)
    received, size = conform(record, like, "site")
    assert same(received, decode(message.blob, like, "site"))
    assert size == message.size


def test_what_is_encoded_is_a_safetensors_file() -> None:
    message = encode(EXAMPLE, "site")
    assert load(message.blob)["table/rows"].shape == (2, 2)  # two of three classes are held


EXAMPLE = Everything(
    weights=Weights({"fc.weight": torch.tensor([[1.0, 2.0]])}, {"bn.mean": torch.tensor([0.5])}),
    table=ClassTable(torch.tensor([[1.0, 2.0], [0.0, 0.0], [3.0, 4.0]]), torch.tensor([2.0, 0.0, 1.0])),
    bank=Features(torch.ones(2, 2), torch.tensor([0, 2]), 3),
    centres=PrototypeSet(torch.ones(1, 2), torch.tensor([1]), 3),
    average=Mean(Weights({"w": torch.tensor(1.5)}, {}), 3.0),
    average_table=Mean(ClassTable(torch.ones(3, 2), torch.ones(3)), torch.ones(3, dtype=torch.float64)),
    each=Each(Inner(ClassTable(torch.ones(3, 2), torch.ones(3)), "not sent")),
    by_client={"a-0": ClassTable(torch.zeros(3, 2), torch.zeros(3))},
    odd={"flag": torch.tensor(True), "bytes": torch.arange(5, dtype=torch.uint8)},
    nothing=Nothing(),
)
SMALL = Inner(EXAMPLE.table, "")


def test_every_truncation_is_refused() -> None:
    blob = encode(EXAMPLE, "site").blob
    for length in range(len(blob)):
        with pytest.raises(BadMessage, match=r"^site: "):
            decode(blob[:length], EXAMPLE, "site")
    with pytest.raises(BadMessage, match=r"^site: "):
        decode(blob + b"\0", EXAMPLE, "site")


def test_every_corrupted_byte_is_refused_or_harmless() -> None:
    blob = encode(EXAMPLE, "site").blob
    refused = 0
    for position in range(len(blob)):
        for flip in (0x01, 0x20, 0xFF):
            damaged = bytearray(blob)
            damaged[position] ^= flip
            try:
                assert same(EXAMPLE, decode(bytes(damaged), EXAMPLE, "site")), position
            except BadMessage:
                refused += 1
    assert refused > 2.9 * len(blob)


@settings(max_examples=300)
@given(st.data())
def test_any_corruption_is_refused_or_harmless(data: st.DataObject) -> None:
    damaged = bytearray(encode(SMALL, "site").blob)
    for _ in range(data.draw(st.integers(1, 4))):
        position = data.draw(st.integers(0, len(damaged) - 1))
        damaged[position] = data.draw(st.integers(0, 255))
    with suppress(BadMessage):
        assert same(SMALL, decode(bytes(damaged), SMALL, "site"))


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_garbage_is_refused(garbage: bytes) -> None:
    with pytest.raises(BadMessage, match=r"^site: "):
        decode(garbage, SMALL, "site")


@settings(max_examples=300)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=8,
    ),
    st.binary(max_size=32),
)
def test_any_header_is_refused(header: Any, body: bytes) -> None:
    text = json.dumps(header).encode()
    with pytest.raises(BadMessage, match=r"^site: "):
        decode(struct.pack("<Q", len(text)) + text + body, SMALL, "site")


@settings(max_examples=200)
@given(
    st.sampled_from(["F64", "F32", "F16", "BF16", "F8_E4M3", "I64", "I16", "U8", "BOOL", "U64", "what", ""]),
    st.lists(st.integers(-2, 2**63), max_size=3),
    st.lists(st.integers(-2, 2**63), max_size=3),
    st.sampled_from(["table/rows", "table/count", "other"]),
)
def test_a_lying_header_is_refused(dtype: str, shape: list[int], offsets: list[int], name: str) -> None:
    entry = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
    text = json.dumps({"__metadata__": {"check": "00000000"}, name: entry}).encode()
    with pytest.raises(BadMessage, match=r"^site: "):
        decode(struct.pack("<Q", len(text)) + text + bytes(16), SMALL, "site")


def test_a_header_longer_than_the_message_is_refused_without_reading_it() -> None:
    with pytest.raises(BadMessage, match="header is longer"):
        decode(struct.pack("<Q", 2**63) + b"{}", SMALL, "site")


def test_deep_json_is_refused() -> None:
    text = b'{"a":' * 100_000
    with pytest.raises(BadMessage):
        decode(struct.pack("<Q", len(text)) + text, SMALL, "site")


def test_an_unsigned_message_is_refused() -> None:
    plain = save({"table/rows": torch.ones(2, 2), "table/count": torch.ones(3)})
    with pytest.raises(BadMessage, match="site"):
        decode(plain, SMALL, "site")


class One(Record):
    """A message of one tensor."""

    value: Tensor


class Two(Record):
    """The same with another."""

    value: Tensor
    more: Tensor


@pytest.mark.parametrize(
    ("sent", "like", "complaint"),
    [
        (One(torch.ones(3)), One(torch.ones(2)), "'value' has shape 3, expected 2"),
        (One(torch.ones(2)), One(torch.ones(2, 1)), "'value' has shape 2, expected 2x1"),
        (One(torch.ones(1)), One(torch.tensor(1.0)), "'value' has shape 1, expected scalar"),
        (One(torch.ones(2).double()), One(torch.ones(2)), "'value' has type F64, expected F32"),
        (One(torch.ones(2)), Two(torch.ones(2), torch.ones(1)), "'more' is missing"),
        (Two(torch.ones(2), torch.ones(1)), One(torch.ones(2)), "unexpected field 'more' in a One message"),
        (
            Inner(ClassTable(torch.ones(3, 5), torch.ones(3)), ""),
            SMALL,
            "'table/rows' has shape 3x5, expected anyx2",
        ),
        (Inner(ClassTable(torch.ones(4, 2), torch.ones(4)), ""), SMALL, "'table/count' has shape 4, expected 3"),
    ],
)
def test_what_does_not_fit_is_named(sent: Record, like: Record, complaint: str) -> None:
    with pytest.raises(BadMessage) as caught:
        decode(encode(sent, "hospital").blob, like, "hospital")
    assert str(caught.value).startswith("hospital: ")
    assert complaint in str(caught.value)


class RawTable(Record):
    """A class table without its checks, as a stranger might send it."""

    rows: Tensor
    count: Tensor


class RawFeatures(Record):
    """Features without checks."""

    rows: Tensor
    labels: Tensor


class Wrapped(Record):
    """Puts what it holds under the path `table`."""

    table: Record


@pytest.mark.parametrize(
    ("sent", "like", "complaint"),
    [
        (RawTable(torch.ones(1, 2), torch.tensor([1.0, 1.0, 0.0])), EXAMPLE.table, "table/rows: 1 rows for 2"),
        (RawTable(torch.ones(1, 2), torch.tensor([1.0, -1.0, 0.0])), EXAMPLE.table, "table/count: .*negative"),
        (RawFeatures(torch.ones(2, 2), torch.tensor([0])), EXAMPLE.bank, "table/labels: 1 labels for 2 rows"),
        (RawFeatures(torch.ones(1, 2), torch.tensor([3])), EXAMPLE.bank, "table/labels: outside 0..2"),
        (RawFeatures(torch.ones(1, 2), torch.tensor([-1])), EXAMPLE.bank, "table/labels: outside 0..2"),
    ],
)
def test_contradictions_inside_a_record_are_named(sent: Record, like: Record, complaint: str) -> None:
    with pytest.raises(BadMessage, match=f"^hospital: field {complaint}"):
        decode(encode(Wrapped(sent), "hospital").blob, Wrapped(like), "hospital")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_neither_sent_nor_accepted(value: float) -> None:
    with pytest.raises(BadMessage, match="hospital: field 'value' holds values that are not finite"):
        encode(One(torch.tensor([1.0, value])), "hospital")
    with pytest.raises(BadMessage, match="hospital: field 'value' holds values that are not finite"):
        decode(_signed({"value": torch.tensor([1.0, value])}), One(torch.ones(2)), "hospital")


def test_what_would_be_refused_is_refused_without_being_sent() -> None:
    with pytest.raises(BadMessage, match=r"^site: field 'value' holds values that are not finite"):
        conform(One(torch.tensor([1.0, torch.nan])), One(torch.zeros(2)), "site")
    with pytest.raises(BadMessage, match=r"^site: field 'value' has shape 3"):
        conform(One(torch.zeros(3)), One(torch.zeros(2)), "site")


def test_a_weight_that_is_not_finite_is_refused() -> None:
    class Upload(Record):
        mean: Mean[Tensor]

    with pytest.raises(BadMessage, match="mean/weight"):
        encode(Upload(Mean(torch.ones(1), float("nan"))), "hospital")


def _signed(found: dict[str, Tensor]) -> bytes:
    """A message with a correct checksum, whatever is in it: what a sender with a bug would send."""
    check = 0
    for name in sorted(found):
        array = found[name].numpy()
        check = zlib.crc32(f"{name}:{array.dtype.name}:{array.shape}".encode(), check)
        check = zlib.crc32(array.tobytes(), check)
    return save(found, {"check": f"{check:08x}"})


def test_a_signed_message_is_accepted() -> None:
    assert decode(_signed({"value": torch.ones(2)}), One(torch.zeros(2)), "site").value.tolist() == [1, 1]


def test_tensors_on_the_way_are_detached_copies() -> None:
    value = torch.ones(2, requires_grad=True)
    message = encode(One(value[::1] * 2), "site")
    back = decode(message.blob, One(torch.zeros(2)), "site")
    assert not back.value.requires_grad
    back.value.add_(1)
    assert torch.equal(decode(message.blob, One(torch.zeros(2)), "site").value, torch.tensor([2.0, 2.0]))


def test_a_file_is_mapped_and_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    path.write_bytes(encode(EXAMPLE, "site").blob)
    before = path.read_bytes()
    back = decode_file(path, EXAMPLE, "site")
    assert same(EXAMPLE, back)
    assert str(path) in Path("/proc/self/maps").read_text()
    back.weights.params["fc.weight"].add_(1)
    assert path.read_bytes() == before
    with pytest.raises(FileNotFoundError):
        decode_file(tmp_path / "other", EXAMPLE, "site")


def test_a_damaged_file_is_refused_as_a_message_is(tmp_path: Path) -> None:
    blob, path = encode(EXAMPLE, "site").blob, tmp_path / "damaged"
    for length in range(0, len(blob), 7):
        path.write_bytes(blob[:length])
        with pytest.raises(BadMessage, match=r"^site: "):
            decode_file(path, EXAMPLE, "site")
    for position in range(0, len(blob), 5):
        path.write_bytes(blob[:position] + bytes([blob[position] ^ 0xFF]) + blob[position + 1 :])
        with suppress(BadMessage):
            assert same(EXAMPLE, decode_file(path, EXAMPLE, "site")), position


def test_views_and_transposed_tensors_travel_as_they_look() -> None:
    value = torch.arange(6.0).reshape(2, 3).T
    assert torch.equal(decode(encode(One(value), "site").blob, One(torch.zeros(3, 2)), "site").value, value)


def test_map_tensors_keeps_the_structure() -> None:
    doubled = map_tensors(EXAMPLE, lambda tensor: tensor.double())
    assert doubled.bank.rows.dtype == torch.float64
    assert doubled.bank.classes == 3
    assert doubled.each.value.known_to_both == "not sent"

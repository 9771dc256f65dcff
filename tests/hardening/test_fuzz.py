"""What comes from outside is refused in one line, quickly and without memory: messages, run folders, presets, data."""

import bz2
import gzip
import importlib
import io
import json
import pickle
import random
import struct
import zipfile
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from pydantic import ValidationError

import protofed
from protofed import system
from protofed.clients import plain_name
from protofed.data import load
from protofed.data.npz import READ_ERRORS, read_arrays
from protofed.data.sources.cifar import _batch
from protofed.data.sources.digits import _libsvm, read_idx
from protofed.errors import UserError
from protofed.models import read_weights
from protofed.runs.opened import Run
from protofed.studies.tables.preset import Preset, find_preset

ROOT = Path(__file__).parents[2]


@pytest.fixture
def fuzzer(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT))
    return importlib.import_module("benchmarks.fuzz")


def check(outcome):
    assert outcome.crashes == []
    assert outcome.garbage == []
    assert outcome.passed
    # The fuzzer itself works: some of what it sends is valid, and most kinds of damage are refused outright.
    assert outcome.accepted["other_values"] == outcome.tried["other_values"]
    for name in ("truncated", "extended", "garbage", "twice_named", "renamed", "lacking_or_more", "many_fields"):
        assert outcome.accepted[name] == 0, name


def test_thousands_of_messages(fuzzer):
    check(fuzzer.fuzz(1900, seed=1))


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_hundred_thousand_messages(fuzzer):
    check(fuzzer.fuzz(100_000))


def test_the_fuzzers_own_check_sees_garbage(fuzzer):
    good = fuzzer.upload()
    assert fuzzer.faults_of(good, good) == []
    good.bank.value.labels[0] = 99
    good.own.value.count[0] = -1
    assert len(fuzzer.faults_of(good, fuzzer.TEMPLATE)) >= 2


@pytest.fixture
def small_memory(monkeypatch):
    """Files may ask for 1 MiB."""
    monkeypatch.setattr(system, "_LARGEST_READ", 2**20)


def npz(path, **arrays):
    np.savez_compressed(path, **arrays)
    return path


@pytest.mark.usefixtures("small_memory")
def test_an_npz_bomb_is_refused_before_it_unfolds(tmp_path):
    bomb = npz(tmp_path / "a.npz", x_train=np.zeros((40, 256, 256), np.uint8), y_train=[0], x_test=[0], y_test=[0])
    assert bomb.stat().st_size < 20_000
    with pytest.raises(UserError, match="GiB"):
        load(str(tmp_path))


def test_an_array_larger_than_its_file_is_refused(tmp_path):
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|u1", "fortran_order": False, "shape": (2**30,)})
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("x.npy", header.getvalue() + b"few")
    with pytest.raises(ValueError, match="shorter than its header says"):
        read_arrays(tmp_path / "a.npz")


def test_names_inside_an_archive_lead_nowhere(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("../../escaped.npy", b"x")
    with pytest.raises(READ_ERRORS):
        read_arrays(tmp_path / "a.npz")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.npz"]


@pytest.mark.usefixtures("small_memory")
def test_a_gzip_bomb_is_not_unfolded(tmp_path):
    giant = struct.pack(">HBB", 0, 8, 1) + struct.pack(">I", 2**31)
    (tmp_path / "giant.gz").write_bytes(gzip.compress(giant))
    with pytest.raises(UserError, match="GiB"):
        read_idx(tmp_path / "giant")
    # A modest header before an endless body: no more is unpacked than the header promises.
    modest = struct.pack(">HBB", 0, 8, 1) + struct.pack(">I", 4)
    (tmp_path / "modest.gz").write_bytes(gzip.compress(modest + bytes(50 * 2**20)))
    with pytest.raises(UserError, match="download it again"):
        read_idx(tmp_path / "modest")


def test_a_bz2_bomb_is_not_unfolded(tmp_path):
    (tmp_path / "usps.bz2").write_bytes(bz2.compress(b"1" * (20 * 2**20)))
    with pytest.raises(UserError, match="download it again"):
        _libsvm(tmp_path / "usps.bz2")


def test_a_picture_bomb_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    for part in ("train", "test"):
        (tmp_path / "a" / part / "x").mkdir(parents=True)
        Image.new("L", (40, 30)).save(tmp_path / "a" / part / "x" / "one.png")
    with pytest.raises(UserError, match="cannot be read"):
        load(str(tmp_path))


@pytest.mark.usefixtures("small_memory")
def test_a_weights_bomb_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "w.pth", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/0", bytes(4 * 2**20))
    with pytest.raises(UserError, match="GiB"):
        read_weights(tmp_path / "w.pth")


class Touch:
    """Unpickling it would create a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize("kind", ["cifar", "weights", "npz"])
def test_no_pickle_runs(tmp_path, kind):
    mark = tmp_path / "ran"
    evil = pickle.dumps({b"data": Touch(mark), b"labels": []})
    if kind == "cifar":
        (tmp_path / "batch").write_bytes(evil)
        with pytest.raises(UserError, match="image data does not need"):
            _batch(tmp_path / "batch")
    elif kind == "weights":
        torch.save({"w": Touch(mark)}, tmp_path / "w.pth")
        with pytest.raises(UserError, match="code is never executed"):
            read_weights(tmp_path / "w.pth")
    else:
        np.savez(
            tmp_path / "a.npz", **{key: np.array([Touch(mark)]) for key in ("x_train", "y_train", "x_test", "y_test")}
        )
        with pytest.raises(UserError, match="Python objects"):
            load(str(tmp_path))
    assert not mark.exists()


class Hex:
    """Doubles its text each time it is unpickled around itself."""

    def __init__(self, inner):
        self.inner = inner

    def __reduce__(self):
        import codecs

        return codecs.encode, (self.inner, "hex")


def test_a_pickle_cannot_double_its_text(tmp_path):
    (tmp_path / "batch").write_bytes(pickle.dumps(Hex(Hex("00"))))
    with pytest.raises(UserError, match="image data does not need"):
        _batch(tmp_path / "batch")


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_damaged_archives_are_read_or_refused(tmp_path, seed):
    rng = random.Random(seed)
    path = npz(tmp_path / "a.npz", x=np.arange(50), y=np.ones((2, 3), np.float32))
    damaged = bytearray(path.read_bytes())
    for _ in range(rng.choice((1, 3, 20))):
        damaged[rng.randrange(len(damaged))] = rng.randrange(256)
    path.write_bytes(damaged[: rng.choice((len(damaged), rng.randrange(len(damaged))))])
    with suppress(*READ_ERRORS, UserError):
        read_arrays(path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A run that could be resumed."""
    from protofed.testing import toy_data

    place = tmp_path_factory.mktemp("begun")
    data = toy_data(place / "data", ["a", "b"])
    return protofed.run("fedavg", data, out=place / "run", model="mlp", rounds=2, engine="loop").path


@pytest.mark.parametrize(
    "manifest",
    [
        b"",
        b"[]",
        b"{",
        b"[" * 100_000,
        b'{"round": 1}',
        b'{"round": -1, "clients": [], "rounds_jsonl_bytes": 0}',
        b'{"round": 1, "clients": "a-0", "rounds_jsonl_bytes": 0}',
        b'{"round": 1, "clients": [], "rounds_jsonl_bytes": 1000000000000}',
        b'{"round": 1, "clients": ["../../x"], "rounds_jsonl_bytes": 0}',
        b'{"round": 77, "clients": [], "rounds_jsonl_bytes": 0}',
    ],
)
def test_a_damaged_checkpoint_is_refused_and_left_alone(begun, manifest):
    (begun / "summary.json").unlink(missing_ok=True)
    path, lines = begun / "checkpoint" / "manifest.json", (begun / "rounds.jsonl").read_bytes()
    good = path.read_bytes()
    path.write_bytes(manifest)
    try:
        with pytest.raises(UserError):
            protofed.run(out=begun, resume=True)
        assert (begun / "rounds.jsonl").read_bytes() == lines
    finally:
        path.write_bytes(good)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(JSON)
def test_any_run_json_is_read_or_refused(tmp_path, content):
    (tmp_path / "run.json").write_text(json.dumps(content))
    with suppress(UserError):
        assert isinstance(Run(tmp_path).options, dict)


@pytest.mark.parametrize("name", ["../x", "a/b", "", ".", "..", "/etc/passwd", "a\0b"])
def test_clients_cannot_name_files_elsewhere(name):
    with pytest.raises(UserError, match="cannot be named"):
        plain_name(name)


@settings(max_examples=150)
@given(st.dictionaries(st.sampled_from(sorted(Preset.model_fields)), JSON, max_size=4))
def test_any_preset_is_read_or_refused(changes):
    good = find_preset("fedmp.table2").model_dump(by_alias=True)
    with suppress(ValidationError):
        Preset.model_validate({**good, **changes})


@pytest.mark.parametrize("name", ["../suites/medical", "suites.medical", "fedmp./etc/passwd", "", "."])
def test_tables_are_found_by_name_only(name):
    with pytest.raises(UserError, match="unknown table"):
        find_preset(name)

"""predictions.npz: what is written is what is read, and nothing else is."""

from pathlib import Path

import numpy as np
import pytest

from protofed.errors import UserError
from protofed.metrics import KeptPredictions, PredictedSet


def a_set(n: int, start: int) -> PredictedSet:
    rng = np.random.default_rng(start)
    return PredictedSet(
        rng.integers(0, 3, n), rng.dirichlet(np.ones(3), n).astype(np.float32), np.arange(start, start + n)
    )


def kept() -> KeptPredictions:
    first, second = a_set(5, 0), a_set(3, 5)
    return KeptPredictions(
        ("x", "y", "z"),
        {"global": {"a": first, "b": second}, "personal": {"a-0": first, "a-1": first, "b-0": a_set(3, 5)}},
    )


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "predictions.npz"
    path.write_bytes(kept().encoded())
    read, wanted = KeptPredictions.read(path), kept()
    assert read.classes == wanted.classes
    for view, parts in wanted.views.items():
        assert list(read.views[view]) == list(parts)
        for name, part in parts.items():
            again = read.views[view][name]
            assert np.array_equal(again.labels, part.labels)
            assert np.array_equal(again.probabilities, part.probabilities)
            assert np.array_equal(again.samples, part.samples)
            assert again.probabilities.dtype == np.float32
    with np.load(path, allow_pickle=False) as file:
        assert len(file["labels"]) == 11, "parts that say the same share their rows"


def test_equal_predictions_are_equal_bytes() -> None:
    assert kept().encoded() == kept().encoded()


def test_a_view_without_parts(tmp_path: Path) -> None:
    path = tmp_path / "predictions.npz"
    path.write_bytes(KeptPredictions(("x", "y"), {"personal": {}}).encoded())
    assert KeptPredictions.read(path).views == {"personal": {}}


@pytest.mark.parametrize(
    "change",
    [
        {"labels": np.array([0, 1, 7], np.int32)},
        {"samples": np.arange(2)},
        {"probabilities": np.zeros((3, 5), np.float32)},
        {"probabilities": np.zeros((3, 2), np.int64)},
        {"global_stop": np.array([9])},
        {"global_start": np.array([-1])},
        {"global_names": np.array(["a", "b"])},
        {"classes": np.array([{"not": "text"}], dtype=object)},
    ],
)
def test_damage_is_refused(change: dict[str, np.ndarray], tmp_path: Path) -> None:
    arrays = {
        "classes": np.array(["x", "y"]),
        "labels": np.array([0, 1, 1], np.int32),
        "samples": np.arange(3),
        "probabilities": np.full((3, 2), 0.5, np.float32),
        "global_names": np.array(["a"]),
        "global_start": np.array([0]),
        "global_stop": np.array([3]),
    }
    path = tmp_path / "predictions.npz"
    np.savez(path, **arrays)
    assert len(KeptPredictions.read(path).views["global"]["a"]) == 3
    np.savez(path, **{**arrays, **change}, allow_pickle=True)
    with pytest.raises(UserError, match="damaged"):
        KeptPredictions.read(path)


def test_what_is_no_archive(tmp_path: Path) -> None:
    path = tmp_path / "predictions.npz"
    path.write_bytes(b"no archive")
    with pytest.raises(UserError, match="damaged"):
        KeptPredictions.read(path)
    path.write_bytes(kept().encoded()[:300])
    with pytest.raises(UserError, match="damaged"):
        KeptPredictions.read(path)

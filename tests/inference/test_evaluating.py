"""Scores of a run's models on other data."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from protofed.errors import UserError
from protofed.inference import evaluate
from protofed.inference.evaluating import metrics
from protofed.testing import toy_data


def test_metrics_by_hand() -> None:
    probabilities = np.array([[0.9, 0.1], [0.6, 0.4], [0.3, 0.7], [0.7, 0.3]])
    scores = metrics(probabilities, np.array([0, 0, 1, 1]))
    assert scores["accuracy"] == 0.75
    assert scores["balanced_accuracy"] == 0.75
    assert scores["auc"] == 0.75
    assert scores["confusion"] == [[2, 0], [1, 1]]
    assert scores["sensitivity"] == 0.5
    assert scores["specificity"] == 1.0
    assert scores["intervals"]["accuracy"][0] <= 0.75 <= scores["intervals"]["accuracy"][1]


@pytest.mark.filterwarnings("error")
def test_a_class_that_the_data_does_not_have() -> None:
    scores = metrics(np.array([[0.9, 0.1], [0.6, 0.4], [0.3, 0.7], [0.7, 0.3]]), np.zeros(4, dtype=np.int64))
    expected = {"accuracy": 0.75, "balanced_accuracy": 0.75, "auc": None, "confusion": [[3, 1], [0, 0]]}
    assert scores.items() >= expected.items()
    assert scores["intervals"]["auc"] is None


@pytest.mark.parametrize("classes", [2, 3])
def test_auc_is_the_share_of_pairs_won(classes: int) -> None:
    """A tie counts half; of more than two classes, the mean over each against the rest."""
    rng = np.random.default_rng(0)
    probabilities = rng.dirichlet(np.ones(classes), 60).round(1)
    y = rng.integers(0, classes, 60)
    areas = []
    for k in range(classes) if classes > 2 else [1]:
        own, others = probabilities[y == k, k], probabilities[y != k, k]
        won = (own[:, None] > others).sum() + (own[:, None] == others).sum() / 2
        areas.append(won / (len(own) * len(others)))
    assert metrics(probabilities, y)["auc"] == pytest.approx(np.mean(areas), rel=1e-12)


def test_evaluation_equals_that_of_the_run(tiny_run: Any, tiny_data: str) -> None:
    run = tiny_run("fedavg")
    content = evaluate(run.path, tiny_data)
    final = run.summary["accuracy_final"]["global"]
    for domain in ("a", "b", "c"):
        assert content["models"]["global"]["domains"][domain] == pytest.approx(final[domain])
    assert set(content["models"]) == {"a-0", "b-0", "c-0", "global"}
    assert content["images"] == 36
    with pytest.raises(UserError, match="regroup"):
        evaluate(run.path, tiny_data, labels="0=well,1-3=ill")


def test_an_external_site_need_not_have_every_class(tiny_run: Any, tmp_path: Path) -> None:
    """Its classes are known by name, not by number."""
    run = tiny_run("fedavg", rounds=1)
    data = toy_data(tmp_path / "external", ["z"], test=10)
    whole = evaluate(run.path, data)["models"]["global"]["confusion"]
    with np.load(tmp_path / "external" / "z.npz") as held:
        arrays = dict(held)
    for part in ("train", "test"):
        second = arrays[f"y_{part}"] == 1
        arrays[f"x_{part}"], arrays[f"y_{part}"] = arrays[f"x_{part}"][second], arrays[f"y_{part}"][second] - 1
    (tmp_path / "second").mkdir()
    np.savez(tmp_path / "second" / "z.npz", **{**arrays, "classes": np.array(["class1"])})
    scores = evaluate(run.path, str(tmp_path / "second"))["models"]["global"]
    assert scores["confusion"] == [[0] * 4, whole[1], [0] * 4, [0] * 4]
    assert scores["auc"] is None

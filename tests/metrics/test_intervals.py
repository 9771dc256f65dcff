"""Bootstrap intervals: what is drawn, and that they say what they claim to."""

import numpy as np
import pytest
from sklearn.metrics import f1_score, roc_auc_score

from protofed.metrics import METRICS, PredictedSet, average_draws, draws_of, percentile_interval, resamples_for
from protofed.metrics.intervals import _weights


def binary(n: int, seed: int = 0, shift: float = 1.0) -> PredictedSet:
    rng = np.random.default_rng(seed)
    labels = (np.arange(n) % 3 == 0).astype(np.int64)
    score = 1 / (1 + np.exp(-(rng.normal(size=n) + shift * labels)))
    return PredictedSet(labels, np.stack([1 - score, score], 1), np.arange(n))


def test_every_resample_has_the_class_counts_of_the_test_set() -> None:
    images = binary(31)
    weights = np.concatenate(list(_weights(images, 50)))
    assert weights.shape == (50, 31)
    assert (weights[:, images.labels == 1].sum(1) == images.labels.sum()).all()
    assert (weights.sum(1) == 31).all()
    assert len({tuple(row) for row in weights.tolist()}) > 40


def test_a_draw_is_the_metric_of_the_images_drawn() -> None:
    """Against scikit-learn on the repeated images."""
    images = binary(40)
    found = draws_of(images, [METRICS["auc"], METRICS["macro_f1"]], 20)
    for row, area, score in zip(
        np.concatenate(list(_weights(images, 20))), found["auc"], found["macro_f1"], strict=True
    ):
        taken = np.repeat(np.arange(40), row.astype(int))
        y, p = images.labels[taken], images.probabilities[taken]
        assert area == pytest.approx(roc_auc_score(y, p[:, 1]))
        assert score == pytest.approx(f1_score(y, p.argmax(1), average="macro"))


def test_models_on_the_same_images_are_resampled_together() -> None:
    """And in the same way in pieces as at once."""
    one, other = binary(50, seed=1), binary(50, seed=2)
    assert np.array_equal(next(_weights(one, 30)), next(_weights(other, 30)))
    elsewhere = PredictedSet(one.labels, one.probabilities, one.samples + 50)
    assert not np.array_equal(next(_weights(one, 30)), next(_weights(elsewhere, 30)))
    assert np.array_equal(draws_of(one, [METRICS["auc"]], 30)["auc"], draws_of(one, [METRICS["auc"]], 30)["auc"])


def test_an_interval_covers_the_truth_as_often_as_it_says() -> None:
    """The area of two normal distributions one standard deviation apart is .7602; 95 % of 200 is 190, sd 3."""
    truth = 0.7602
    covered = 0
    for seed in range(200):
        low, high = percentile_interval(draws_of(binary(150, seed), [METRICS["auc"]], 200)["auc"])
        covered += low <= truth <= high
    assert covered >= 178


def test_an_interval_leaves_out_a_fortieth_on_each_side() -> None:
    assert percentile_interval(np.arange(1001) / 1000) == pytest.approx([0.025, 0.975])


def test_undefined_figures() -> None:
    healthy = PredictedSet(np.zeros(4, np.int64), np.full((4, 2), 0.5), np.arange(4))
    draws = draws_of(healthy, [METRICS["auc"]], 10)["auc"]
    assert percentile_interval(draws) is None
    there = draws_of(binary(20), [METRICS["auc"]], 10)["auc"]
    assert np.array_equal(average_draws([draws, there]), there)
    assert np.isnan(average_draws([draws])).all()


def test_large_test_sets_are_resampled_less() -> None:
    class Large:
        classes = 10

        def __len__(self) -> int:
            return 50_000

    assert resamples_for([binary(100)]) == 1000
    assert resamples_for([Large()]) == 100

"""Paired tests against direct computations."""

import numpy as np
import pytest
from scipy.stats import binomtest

from protofed.metrics import METRICS, PredictedSet, compare_on_images, draws_of, mcnemar_p, paired_delong
from protofed.metrics.paired import _bootstrap_p


def pair(n: int = 60, seed: int = 0, gain: float = 1.0, start: int = 0) -> tuple[PredictedSet, PredictedSet]:
    """Two models on the same images, whose scores have something in common; rounded, so that there are ties."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, 2, n)
    common = rng.normal(size=n)
    samples = np.arange(start, start + n)

    def model(strength: float) -> PredictedSet:
        score = 1 / (1 + np.exp(-(common + rng.normal(size=n) + strength * labels)))
        score = score.round(2)
        return PredictedSet(labels, np.stack([1 - score, score], 1), samples)

    return model(1 + gain), model(1)


def delong_directly(one: PredictedSet, other: PredictedSet) -> tuple[float, float]:
    """From the table of all pairs of a positive and a negative, as the paper writes it."""
    positive = one.labels == 1

    def kernel(model: PredictedSet) -> np.ndarray:
        x, y = model.probabilities[positive, 1][:, None], model.probabilities[~positive, 1][None, :]
        return (x > y) + 0.5 * (x == y)

    tables = [kernel(one), kernel(other)]
    areas = [table.mean() for table in tables]
    s10 = np.cov([table.mean(1) for table in tables])
    s01 = np.cov([table.mean(0) for table in tables])
    s = s10 / tables[0].shape[0] + s01 / tables[0].shape[1]
    return areas[0] - areas[1], s[0, 0] + s[1, 1] - 2 * s[0, 1]


@pytest.mark.parametrize("seed", range(4))
def test_delong_is_the_papers(seed: int) -> None:
    one, other = pair(seed=seed)
    assert paired_delong([(one, other, 1.0)]) == pytest.approx(delong_directly(one, other), rel=1e-9)


def test_delong_over_several_test_sets() -> None:
    """Different images are independent; several models on the same images are not."""
    pairs = [pair(seed=seed, start=100 * seed) for seed in range(3)]
    difference, variance = paired_delong([(*each, 1 / 3) for each in pairs])
    single = [delong_directly(*each) for each in pairs]
    assert difference == pytest.approx(np.mean([each[0] for each in single]))
    assert variance == pytest.approx(sum(each[1] for each in single) / 9)
    one, other = pair()
    assert paired_delong([(one, other, 0.5), (one, other, 0.5)])[1] == pytest.approx(delong_directly(one, other)[1])


@pytest.mark.parametrize(("first", "second"), [(0, 0), (5, 0), (3, 9), (40, 41), (700, 800)])
def test_mcnemar_is_the_exact_binomial_test(first: int, second: int) -> None:
    expected = binomtest(first, first + second).pvalue if first + second else 1.0
    assert mcnemar_p(first, second) == pytest.approx(expected, rel=1e-9)
    assert mcnemar_p(first, second) == mcnemar_p(second, first)


def test_the_test_follows_the_metric() -> None:
    one, other = pair(200, gain=2.0)
    area = compare_on_images(METRICS["auc"], {"a": [one]}, {"a": [other]})
    assert area["test"] == "DeLong"
    assert area["difference"] == pytest.approx(METRICS["auc"].of(one) - METRICS["auc"].of(other))
    assert area["p"] < 0.05
    assert area["interval"][0] > 0
    accuracy = compare_on_images(METRICS["accuracy"], {"a": [one]}, {"a": [other]})
    right = [(each.probabilities.argmax(1) == each.labels) for each in (one, other)]
    assert accuracy["test"] == "exact McNemar"
    assert accuracy["p"] == mcnemar_p(int((right[0] & ~right[1]).sum()), int((~right[0] & right[1]).sum()))
    assert accuracy["images"] == 200
    # An image that counts twice is no independent evidence.
    assert compare_on_images(METRICS["accuracy"], {"a": [one, one]}, {"a": [other, other]})["test"] == "bootstrap"
    score = compare_on_images(METRICS["macro_f1"], {"a": [one]}, {"a": [other]})
    assert score["test"] == "bootstrap"
    assert score["interval"][0] <= score["difference"] <= score["interval"][1]


def test_the_bootstrap_agrees_with_delong() -> None:
    """Their standard errors differ by the noise of 1000 resamples, about 2 %, and little else."""
    one, other = pair(300, gain=0.5)
    draws = draws_of(one, [METRICS["auc"]], 1000)["auc"] - draws_of(other, [METRICS["auc"]], 1000)["auc"]
    assert draws.std() == pytest.approx(np.sqrt(paired_delong([(one, other, 1.0)])[1]), rel=0.12)


def test_a_bootstrap_counts_both_sides() -> None:
    """24 of 999 resamples have the other sign: 2 x 25 / 1000."""
    draws = np.concatenate([-np.ones(24), np.ones(975)])
    assert _bootstrap_p(draws) == _bootstrap_p(-draws) == pytest.approx(0.05)


def test_equal_models_do_not_differ() -> None:
    one, _ = pair()
    for name in ("auc", "accuracy", "macro_f1"):
        test = compare_on_images(METRICS[name], {"a": [one]}, {"a": [one]})
        assert test["difference"] == 0
        assert test["p"] == 1.0


def test_only_the_same_images_are_compared() -> None:
    one, other = pair()
    order = np.random.default_rng(0).permutation(len(one))
    shuffled = PredictedSet(other.labels[order], other.probabilities[order], other.samples[order])
    metric = METRICS["auc"]
    assert compare_on_images(metric, {"a": [one]}, {"a": [shuffled]}) == compare_on_images(
        metric, {"a": [one]}, {"a": [other]}
    )
    elsewhere = PredictedSet(other.labels, other.probabilities, other.samples + 1)
    assert compare_on_images(metric, {"a": [one]}, {"a": [elsewhere]}) is None
    assert compare_on_images(metric, {"a": [one]}, {"b": [other]}) is None
    healthy = PredictedSet(np.zeros(3, np.int64), np.full((3, 2), 0.5), np.arange(900, 903))
    beside = compare_on_images(metric, {"a": [one], "b": [healthy]}, {"a": [other], "b": [healthy]})
    assert beside["images"] == len(one), "a set without positives has no area"

"""Measures against scikit-learn, and by hand where it has none."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn import metrics as reference
from sklearn.calibration import calibration_curve

from protofed.errors import UserError
from protofed.metrics import (
    CHOICES,
    METRICS,
    PredictedSet,
    are_grades,
    confusion_matrix,
    find_metric,
    metrics_for,
    refuse_unsuited,
    reliability_curve,
    roc_curve,
)


def predicted(labels, probabilities, samples=None) -> PredictedSet:
    labels = np.asarray(labels, dtype=np.int64)
    samples = np.arange(len(labels)) if samples is None else np.asarray(samples)
    return PredictedSet(labels, np.asarray(probabilities), samples)


def drawn(classes: int, seed: int = 0, n: int = 90, ties: bool = True) -> PredictedSet:
    """Predictions that are somewhat right; rounded, so that there are ties."""
    rng = np.random.default_rng(seed)
    labels = np.concatenate([np.arange(classes), rng.integers(0, classes, n - classes)])
    logits = rng.normal(size=(n, classes)) + 1.5 * np.eye(classes)[labels]
    probabilities = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    return predicted(labels, probabilities.round(2) if ties else probabilities)


def value(name: str, images: PredictedSet) -> float | None:
    return METRICS[name].of(images)


@pytest.mark.parametrize("classes", [2, 3, 5])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_as_scikit_learn_has_them(classes: int, seed: int) -> None:
    images = drawn(classes, seed)
    y, p = images.labels, images.probabilities
    said = p.argmax(1)
    assert value("accuracy", images) == pytest.approx(reference.accuracy_score(y, said), rel=1e-12)
    assert value("balanced_accuracy", images) == pytest.approx(reference.balanced_accuracy_score(y, said), rel=1e-12)
    assert value("macro_f1", images) == pytest.approx(reference.f1_score(y, said, average="macro"), rel=1e-12)
    area = (
        reference.roc_auc_score(y, p[:, 1])
        if classes == 2
        else reference.roc_auc_score(np.eye(classes)[y], p, average="macro")
    )
    assert value("auc", images) == pytest.approx(area, rel=1e-12)
    kappa = reference.cohen_kappa_score(y, said, weights="quadratic")
    assert value("quadratic_kappa", images) == pytest.approx(kappa, rel=1e-12)
    assert confusion_matrix(y, p).tolist() == reference.confusion_matrix(y, said).tolist()


@pytest.mark.parametrize("seed", range(5))
def test_two_classes_as_scikit_learn_has_them(seed: int) -> None:
    images = drawn(2, seed)
    y, p = images.labels, images.probabilities
    said = p.argmax(1)
    assert value("sensitivity", images) == pytest.approx(reference.recall_score(y, said), rel=1e-12)
    assert value("specificity", images) == pytest.approx(reference.recall_score(y, said, pos_label=0), rel=1e-12)
    fpr, tpr, _ = reference.roc_curve(y, p[:, 1], drop_intermediate=False)
    assert value("sensitivity_at_90_specificity", images) == pytest.approx(tpr[fpr <= 0.1 + 1e-9].max(), rel=1e-12)
    assert value("specificity_at_90_sensitivity", images) == pytest.approx(1 - fpr[tpr >= 0.9 - 1e-9].min(), rel=1e-12)
    drawn_curve = np.array(roc_curve(images))
    assert np.trapezoid(drawn_curve[:, 1], drawn_curve[:, 0]) == pytest.approx(value("auc", images), rel=1e-12)
    assert np.allclose(np.interp(0.5, fpr, tpr), np.interp(0.5, drawn_curve[:, 0], drawn_curve[:, 1]))


def test_the_reliability_curve_is_that_of_scikit_learn() -> None:
    images = drawn(2, ties=False)
    points = reliability_curve(images)
    true, claimed = calibration_curve(images.labels, images.probabilities[:, 1], n_bins=10)
    assert [point.happened for point in points] == pytest.approx(true.tolist())
    assert [point.claimed for point in points] == pytest.approx(claimed.tolist())
    assert sum(point.images for point in points) == len(images)
    error = sum(point.images * abs(point.claimed - point.happened) for point in points) / len(images)
    assert value("ece", images) == pytest.approx(error)


def test_calibration_by_hand() -> None:
    """Two classes: the probability of the second. More: that of the class predicted."""
    images = predicted([0, 1, 1, 0], [[0.8, 0.2], [0.75, 0.25], [0.1, 0.9], [0.1, 0.9]])
    # One bin claims .225 and sees 1 of 2; the other claims .9 and sees 1 of 2.
    assert value("ece", images) == pytest.approx(0.5 * 0.275 + 0.5 * 0.4)
    images = predicted([0, 2], [[0.62, 0.2, 0.18], [0.2, 0.64, 0.16]])
    assert value("ece", images) == pytest.approx(0.63 - 0.5)


def test_the_threshold_is_inclusive() -> None:
    """Of ten negatives one may pass: exactly 90 % specificity is enough."""
    scores = np.array([0.9, 0.8, *np.linspace(0.1, 0.5, 9), 0.85, 0.7, 0.32])
    labels = [1, 0, *[0] * 9, 1, 1, 1]
    images = predicted(labels, np.stack([1 - scores, scores], 1))
    assert value("sensitivity_at_90_specificity", images) == pytest.approx(3 / 4)
    assert value("specificity_at_90_sensitivity", images) == pytest.approx(5 / 10)


def test_what_is_not_defined_is_none() -> None:
    healthy = predicted([0, 0], [[0.9, 0.1], [0.4, 0.6]])
    assert value("auc", healthy) is None
    assert value("sensitivity", healthy) is None
    assert value("specificity", healthy) == 0.5
    assert value("sensitivity_at_90_specificity", healthy) is None
    assert value("balanced_accuracy", healthy) == 0.5
    assert value("quadratic_kappa", predicted([0, 0], [[0.9, 0.1], [0.9, 0.1]])) is None
    assert roc_curve(healthy) == []
    for name in METRICS:
        assert value(name, predicted([], np.zeros((0, 2)))) is None
        assert value(name, predicted([0, 1], [[np.nan, np.nan], [0.5, 0.5]])) is None


@given(st.integers(0, 10**6), st.floats(0.1, 5), st.integers(2, 4))
def test_the_area_looks_at_nothing_but_the_order(seed: int, power: float, classes: int) -> None:
    images = drawn(classes, seed, n=40)
    bent = predicted(images.labels, images.probabilities**power)
    assert value("auc", bent) == pytest.approx(value("auc", images), rel=1e-12)
    if classes == 2:
        turned = predicted(images.labels, 1 - images.probabilities)
        assert value("auc", turned) == pytest.approx(1 - value("auc", images), abs=1e-12)


@given(st.integers(0, 10**6), st.integers(2, 6))
def test_kappa_is_symmetric(seed: int, classes: int) -> None:
    """It does not matter which of two graders is the truth, nor from which end grades are counted."""
    rng = np.random.default_rng(seed)
    one, other = rng.integers(0, classes, (2, 30))
    there = value("quadratic_kappa", predicted(one, np.eye(classes)[other]))
    back = value("quadratic_kappa", predicted(other, np.eye(classes)[one]))
    counted_down = value("quadratic_kappa", predicted(classes - 1 - one, np.eye(classes)[classes - 1 - other]))
    assert there == pytest.approx(back, nan_ok=True)
    assert there == pytest.approx(counted_down, nan_ok=True)


@given(st.integers(0, 10**6), st.integers(2, 5))
def test_the_order_of_images_does_not_matter(seed: int, classes: int) -> None:
    images = drawn(classes, seed, n=30)
    order = np.random.default_rng(seed).permutation(30)
    shuffled = predicted(images.labels[order], images.probabilities[order])
    for metric in metrics_for([f"c{k}" for k in range(classes)]):
        assert metric.of(shuffled) == pytest.approx(metric.of(images), rel=1e-12, abs=1e-12)


def test_which_metrics_fit_which_data() -> None:
    two, digits = ["healthy", "ill"], [str(k) for k in range(10)]
    assert {metric.name for metric in metrics_for(two)} == set(METRICS) - {"quadratic_kappa"}
    assert not any(metric.binary or metric.graded for metric in metrics_for(digits))
    assert "quadratic_kappa" in {metric.name for metric in metrics_for(["0", "1", "2", "3", "4"])}
    assert "quadratic_kappa" in {metric.name for metric in metrics_for(digits, "quadratic_kappa")}
    assert are_grades(("No DR", "Mild", "Moderate", "Severe", "Proliferative"))
    assert not are_grades(("Mild", "Moderate", "No DR", "Proliferative", "Severe"))
    assert not are_grades(("0", "2", "1"))
    assert "ece" not in CHOICES
    with pytest.raises(UserError, match="two classes"):
        refuse_unsuited("sensitivity", digits)
    with pytest.raises(UserError, match="auc"):
        find_metric("aux")

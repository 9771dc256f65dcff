"""What is read from the course of a run, against values found by hand."""

import math

import pytest

from protofed.studies.convergence import Convergence


def records(averages, view="global", sent=(3, 2)):
    other = {"global": "personal", "personal": "global"}[view]
    return [
        {
            "round": number,
            "accuracy": None if average is None else {view: {"average": average}, other: None},
            "bytes": {"up": {"total": sent[0]}, "down": {"total": sent[1]}},
        }
        for number, average in enumerate(averages, start=1)
    ]


def test_rounds_and_bytes_to_a_target():
    course = Convergence.of(records([0.1, 0.5, 0.4, 0.7]), "global")
    assert [course.rounds_to(target) for target in (0.05, 0.5, 0.6, 0.71)] == [1, 2, 4, None]
    assert [course.bytes_to(target) for target in (0.05, 0.5, 0.6, 0.71)] == [5, 10, 20, None]


def test_rounds_that_are_not_evaluated_count_in_bytes_only():
    course = Convergence.of(records([None, 0.5, None, 0.7], "personal"), "personal")
    assert course.rounds == [2, 4]
    assert course.rounds_to(0.6) == 4
    assert course.bytes_to(0.6) == 20
    assert Convergence.of(records([0.5], "personal"), "global").rounds == []


def test_convergence_round():
    # Means of five, ending in rounds 5 to 9: 0.2, 0.36, 0.52, 0.59, 0.594; the best is 0.594, enough is 0.589.
    averages = [0.0, 0.0, 0.2, 0.3, 0.5, 0.8, 0.8, 0.55, 0.32]
    assert Convergence.of(records(averages), "global").convergence_round() == 8
    assert Convergence.of(records([0.5] * 5), "global").convergence_round() == 5
    assert Convergence.of(records([0.5] * 4), "global").convergence_round() is None
    # Exactly half a point below the best is within half a point.
    assert Convergence.of(records([0.5] * 5 + [0.525]), "global").convergence_round() == 5
    assert Convergence.of(records([0.5] * 5 + [0.526]), "global").convergence_round() == 6


def test_fluctuation_over_the_last_twenty():
    averages = [0.0] * 10 + [0.4, 0.6] * 10
    expected = math.sqrt(20 * 0.01 / 19)
    assert Convergence.of(records(averages), "global").fluctuation() == pytest.approx(expected)
    assert Convergence.of(records([0.1, 0.3]), "global").fluctuation() == pytest.approx(math.sqrt(0.02))
    assert Convergence.of(records([0.1]), "global").fluctuation() is None

"""Figures over seeds against values computed by hand and by scipy; properties of Holm's correction."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from protofed.studies.statistics import holm, paired_tests, partial_spread, spread

P_VALUES = st.dictionaries(st.text("abcdefgh", min_size=1, max_size=3), st.floats(0, 1), min_size=1, max_size=8)


def test_spread_by_hand():
    assert spread([1.0, 2.0, 6.0]) == {"mean": 3.0, "std": pytest.approx(math.sqrt(7)), "seeds": [1.0, 2.0, 6.0]}
    assert spread([0.5]) == {"mean": 0.5, "std": None, "seeds": [0.5]}


def test_a_mean_over_the_lucky_seeds_is_not_given():
    assert partial_spread([3, None, 5]) == {"mean": None, "std": None, "seeds": [3, None, 5], "reached": 2}
    assert partial_spread([3, 5]) == {"mean": 4, "std": pytest.approx(math.sqrt(2)), "seeds": [3, 5], "reached": 2}
    assert partial_spread([None])["mean"] is None


def test_a_paired_test_by_hand():
    # Gaps 0.01, 0.02, 0.03: mean 0.02, standard error 0.01 / sqrt(3), t = 3.4641 with 2 degrees of freedom, for which
    # the two-sided p is 1 - t / sqrt(2 + t^2) = 0.07418.
    test = paired_tests({"base": {0: 0.5, 1: 0.6, 2: 0.4}, "new": {0: 0.51, 1: 0.62, 2: 0.43}}, "base")["new"]
    t = 0.02 / (0.01 / math.sqrt(3))
    assert test["difference"] == pytest.approx(0.02)
    assert test["p"] == pytest.approx(1 - t / math.sqrt(2 + t * t)) == pytest.approx(0.07418, abs=1e-5)
    assert test["p_holm"] == test["p"]
    # 4.3027 is the 97.5 % quantile of t with 2 degrees of freedom.
    assert test["interval"] == pytest.approx([0.02 - 4.30265 * 0.0057735, 0.02 + 4.30265 * 0.0057735], abs=1e-6)


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=2, max_size=6))
def test_a_paired_test_is_that_of_scipy(pairs):
    gaps = [new - base for new, base in pairs]
    test = paired_tests({"base": [base for _, base in pairs], "new": [new for new, _ in pairs]}, "base")["new"]
    if max(gaps) - min(gaps) > 1e-6:
        assert test["p"] == pytest.approx(stats.ttest_1samp(gaps, 0).pvalue, rel=1e-5, abs=1e-12)
        assert (test["interval"][0] <= 0 <= test["interval"][1]) == (test["p"] >= 0.05) or abs(test["p"] - 0.05) < 1e-9


def test_only_common_seeds_are_paired():
    tests = paired_tests({"base": {0: 0.1, 1: 0.2, 2: 0.4}, "new": {2: 0.5, 1: 0.25, 7: 0.0}, "one": {0: 0.9}}, "base")
    assert tests["new"]["seeds"] == 2
    assert tests["new"]["difference"] == pytest.approx(0.075)
    assert tests["one"] is None
    assert "base" not in tests
    assert tests["new"]["tests"] == 1


def test_without_the_baseline_or_with_one_seed_there_is_no_test():
    assert paired_tests({"a": {0: 0.1, 1: 0.2}}, "base") == {"a": None}
    assert paired_tests({"base": [0.1], "a": [0.2]}, "base") == {"a": None}


def test_a_gap_that_never_varies_proves_nothing():
    tests = paired_tests({"base": [0.1, 0.2], "same": [0.1, 0.2], "shifted": [0.2, 0.3], "new": [0.3, 0.25]}, "base")
    assert tests["same"]["p"] == 1
    assert tests["shifted"]["p"] is None
    assert tests["shifted"]["p_holm"] is None
    assert tests["new"]["p_holm"] == pytest.approx(min(1, 3 * tests["new"]["p"])), "it counts in the correction"


def test_holm_by_hand():
    # 0.01 x 4; 0.02 x 3; 0.03 x 2; 0.04 x 1 is raised to its predecessor's 0.06.
    corrected = holm({"d": 0.04, "a": 0.01, "c": 0.03, "b": 0.02})
    assert corrected == pytest.approx({"a": 0.04, "b": 0.06, "c": 0.06, "d": 0.06})
    assert holm({"a": 0.6, "b": 0.7}) == {"a": 1.0, "b": 1.0}
    assert holm({}) == {}


@given(P_VALUES)
def test_properties_of_holm(p_values):
    corrected = holm(p_values)
    count = len(p_values)
    assert corrected.keys() == p_values.keys()
    for name, p in p_values.items():
        assert p <= corrected[name] <= 1, "never below the raw value"
        assert corrected[name] <= min(1, count * p) + 1e-15, "never above Bonferroni's"
        for other, q in p_values.items():
            assert not p < q or corrected[name] <= corrected[other], "the order is kept"
    smallest = min(p_values, key=p_values.__getitem__)
    assert corrected[smallest] == min(1, count * p_values[smallest]), "the smallest is Bonferroni's"
    assert holm(dict(reversed(p_values.items()))) == corrected, "the order in which tests are listed does not matter"
    assert all(holm(p_values, count + 2)[name] >= corrected[name] for name in p_values)

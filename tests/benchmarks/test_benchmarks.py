"""The benchmarks run. What they measure is not tested: machines are noisy."""

import math
from dataclasses import replace

import pytest


def finite(ratios):
    return len(ratios.values) == 2 and all(math.isfinite(value) and value > 0 for value in ratios.values)


def test_overhead_quick(benchmark, capsys):
    measured = benchmark("overhead").main(["--quick"])
    assert measured
    assert all(finite(ratios) for methods in measured.values() for ratios in methods.values())
    assert "fedavg / bare" in capsys.readouterr().out


def test_overhead_refuses_to_compare_different_work(benchmark, monkeypatch):
    overhead = benchmark("overhead")
    train = overhead.BareLoop._train
    monkeypatch.setattr(overhead.BareLoop, "_train", lambda self, x, y, order: train(self, x[:32], y[:32], order))
    with pytest.raises(RuntimeError, match="does other work than ours"):
        overhead.measure(overhead.QUICK[0], alternations=1, rounds=1)


@pytest.mark.parametrize("method", ["i2pfl", "single", "fedmp_fewshot", "centralized"])
def test_method_cost(method, benchmark):
    costs = benchmark("method_cost")
    work = replace(costs.WORK, clients=2, samples=20, settings={"model.width": 2})
    assert finite(costs.measure(method, 2, work))

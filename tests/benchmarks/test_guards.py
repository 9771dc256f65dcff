"""The benchmarks of guards and robust averages run, at a size at which their figures mean nothing."""

import pytest

from protofed.federation import Diverged


def test_privacy_utility(tmp_path, benchmark) -> None:
    pytest.importorskip("opacus")
    pytest.importorskip("matplotlib")
    curves = benchmark("privacy_utility")
    points = curves.main(["--quick", "--seeds", "0", "--methods", "conffedproto"])
    assert len(points) == 6
    epsilons = [point.epsilon for point in points[:-1]]
    assert epsilons == sorted(epsilons)
    assert points[-1].epsilon is None
    curves.draw(points, tmp_path / "picture.svg")
    assert (tmp_path / "picture.svg").read_text().startswith("<?xml")


@pytest.mark.parametrize("attack", range(6))
def test_hostile(attack: int, benchmark) -> None:
    hostile = benchmark("hostile")
    reached = hostile.accuracy("fedproto_avg", hostile.ATTACKS[attack], "median", rounds=1, samples_per_client=20)
    assert 0 <= reached <= 1


@pytest.mark.parametrize("rule", ["median", "trimmed=0.2", "norm-bound=1", "krum=0.2"])
def test_sums_and_second_moments_of_one_client_do_no_harm(rule: str, benchmark) -> None:
    """What it sends would otherwise decide the head alone."""
    hostile, small = benchmark("hostile"), {"samples_per_client": 60}
    honest = hostile.accuracy("fed3r", hostile.HONEST, rule, **small)
    reversed_sums, inflated = hostile.ATTACKS[-2:]
    assert hostile.accuracy("fed3r", reversed_sums, "none", **small) < honest - 0.2
    for attack in (reversed_sums, inflated):
        assert hostile.accuracy("fed3r", attack, rule, **small) > honest - 0.05


def test_an_attack_changes_what_is_averaged(benchmark) -> None:
    hostile = benchmark("hostile")
    small = {"rounds": 2, "samples_per_client": 40}
    honest, attacked = (
        hostile.accuracy("fedavg", attack, "none", **small) for attack in (hostile.HONEST, hostile.ATTACKS[3])
    )
    assert attacked != honest


def test_a_label_flip_is_one(benchmark, monkeypatch: pytest.MonkeyPatch) -> None:
    hostile = benchmark("hostile")
    labels = []

    def look(prepared, client, _):
        labels.append(prepared.context.samples(client).y.tolist())
        raise InterruptedError

    monkeypatch.setattr(hostile, "_Infiltrated", look)
    flip = next(attack for attack in hostile.ATTACKS if attack.flips_labels)
    for attack in (hostile.HONEST, flip):
        with pytest.raises(InterruptedError):
            hostile.accuracy("fedavg", attack, "none", samples_per_client=40)
    assert labels[1] == [9 - label for label in labels[0]]


def test_a_federation_that_an_attack_ends_is_judged_by_its_last_round(benchmark) -> None:
    hostile = benchmark("hostile")

    def rounds():
        yield {"accuracy": {"global": {"average": 0.1}}}
        raise Diverged(2, "the weights of all clients were no longer finite")

    assert hostile._last_accuracy(rounds()) == 0.1


def test_what_was_measured_is_kept(tmp_path, benchmark, monkeypatch: pytest.MonkeyPatch) -> None:
    hostile = benchmark("hostile")
    asked = []

    def accuracy(method, *_, **__):
        asked.append(method)
        return 0.5

    monkeypatch.setattr(hostile, "accuracy", accuracy)
    for seed in (0, 0, 1):
        cells = hostile.Cells(tmp_path / "cells.json")
        assert cells.accuracy("fedavg", hostile.HONEST, "median", seed, 8) == 0.5
    assert len(asked) == 2

"""The benchmarks of guards and robust averages run, at a size at which their figures mean nothing."""

import pytest


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


@pytest.mark.parametrize("attack", range(5))
def test_hostile(attack: int, benchmark) -> None:
    hostile = benchmark("hostile")
    reached = hostile.accuracy("fedproto_avg", hostile.ATTACKS[attack], "median", rounds=1, samples_per_client=20)
    assert 0 <= reached <= 1


def test_an_attack_changes_what_is_averaged(benchmark) -> None:
    hostile = benchmark("hostile")
    small = {"rounds": 2, "samples_per_client": 40}
    honest, attacked = (
        hostile.accuracy("fedavg", attack, "none", **small) for attack in (hostile.HONEST, hostile.ATTACKS[2])
    )
    assert attacked != honest

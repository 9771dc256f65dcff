"""Noise on sums: what one image or site can change, how strong the noise is, and what the server makes of it."""

from dataclasses import replace
from math import sqrt
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from protofed.closed_form.moments import MomentsUpload
from protofed.closed_form.sums import added_up
from protofed.guards import noise_on_sum, noised_form, parse_guard, possible_total, privatise
from protofed.records import NoisedTable, Tally, decode, encode, parts_of
from protofed.registry import find_method
from protofed.verbs import exact_class_means, pack_symmetric, second_moment, unpack_symmetric

CLASSES, DIM = 3, 6
NOISE = "clip=1,noise=2"


def features(images: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    h = functional.normalize(torch.randn(images, DIM, generator=rng, dtype=torch.float64), dim=1)
    return h, torch.randint(CLASSES, (images,), generator=rng)


def upload(h: Tensor, y: Tensor) -> MomentsUpload:
    return MomentsUpload(added_up(exact_class_means(h, y, CLASSES)), added_up(second_moment(h)))


def known(make_at: Any, unit: Any = "sample", bound: float = 1.0) -> Any:
    return find_method("fed3r")().sum_sensitivity(unit, bound, make_at(dim=DIM, classes=CLASSES))


def summed(item: Any) -> tuple[Tensor, Tensor]:
    return item.value.rows * item.value.count[:, None], item.value.count


def here(make_at: Any, size: int = 20) -> Any:
    return make_at(dim=DIM, classes=CLASSES, clients={"a": size}, client="a")


@given(images=st.integers(1, 12), seed=st.integers(0, 1000), coordinate=st.booleans())
def test_one_image_more_or_less_changes_no_sum_by_more_than_is_said(images: int, seed: int, coordinate: bool) -> None:
    from protofed import At, Plan

    at = At(plan=Plan(epochs=(0,)), classes=CLASSES, dim=DIM, clients={})
    declared = find_method("fedcgs")().sum_sensitivity("sample", 1.0, at)
    h, y = features(images, seed)
    if coordinate:  # the worst case of an unscaled triangle
        h[-1] = torch.eye(DIM, dtype=torch.float64)[seed % DIM]
    with_it, without = parts_of(upload(h, y)), parts_of(upload(h[:-1], y[:-1]))
    for name, bound in declared.items():
        (rows, count), (fewer_rows, fewer) = summed(with_it[name]), summed(without[name])
        assert float(((rows - fewer_rows) / bound.scale).norm()) <= 1 + 1e-9
        assert float((count - fewer).norm()) == 1
    # An image changes the second moment by h h', whose norm is exactly 1: the bound is not loose.
    gram = (summed(with_it["gram"])[0] - summed(without["gram"])[0]) / declared["gram"].scale
    assert float(gram.norm()) == pytest.approx(1)


def test_shorter_rows_need_less_noise(make_at) -> None:
    half = known(make_at, bound=0.5)
    assert half["sums"].scale == 0.5
    assert float(half["gram"].scale.max()) == 0.25
    assert known(make_at, bound=7.0)["sums"].scale == 1.0, "features have length 1"


@pytest.mark.parametrize("method", ["fedncm", "fed3r", "fedcgs", "protoridge"])
def test_all_shares_add_up(method: str, make_at) -> None:
    shares = find_method(method)().sum_sensitivity("sample", 1.0, make_at(dim=DIM, classes=CLASSES)).values()
    assert sum(each.rows + each.count for each in shares) == pytest.approx(1)


def test_without_second_moments_sums_get_nine_tenths(make_at) -> None:
    (share,) = find_method("protoridge")(gram="none").sum_sensitivity("sample", 1.0, make_at(dim=DIM)).values()
    assert (share.rows, share.count) == (0.9, 0.1)


def test_noise_is_as_strong_as_its_share_says(make_at) -> None:
    """Over 600 draws; of the counts, the fewest numbers, a deviation of 1,800 is known to a sixtieth of itself."""
    h, y = features(20)
    sent, guard, declared = upload(h, y), parse_guard(NOISE), known(make_at)
    plain = {name: summed(item) for name, item in parts_of(sent).items()}
    draws: dict[str, list[Tensor]] = {"sums": [], "gram": [], "count": []}
    for round in range(600):
        at = make_at(round=round, dim=DIM, classes=CLASSES, clients={"a": 20}, client="a")
        private = privatise(guard, sent, at, declared)
        draws["sums"].append((private.sums.value.rows - plain["sums"][0]).flatten())
        draws["gram"].append(((private.gram.value.rows - plain["gram"][0]) / declared["gram"].scale).flatten())
        draws["count"].append(private.sums.value.count - plain["sums"][1])
        assert torch.equal(private.gram.value.count, torch.ones(1).double())
    for name, share in (("sums", 0.45), ("gram", 0.5), ("count", 0.05)):
        drawn, deviation = torch.stack(draws[name]), 2 / sqrt(share)
        assert float(drawn.std()) == pytest.approx(deviation, rel=0.1)
        assert float(drawn.mean()) == pytest.approx(0, abs=5 * deviation / sqrt(drawn.numel()))


def test_shared_noise_adds_up_to_the_whole(make_at) -> None:
    h, y = features(20)
    guard = parse_guard(NOISE + ",secure=on").model_copy(update={"among": 4})
    errors = []
    for round in range(150):
        tally: Tally[MomentsUpload] = Tally()
        for client in "abcd":
            at = make_at(round=round, dim=DIM, classes=CLASSES, clients=dict.fromkeys("abcd", 20), client=client)
            tally.add(client, privatise(guard, upload(h, y), at, known(make_at)))
        errors.append(tally.total().sums.rows - 4 * summed(upload(h, y).sums)[0])
    assert float(torch.stack(errors).std()) == pytest.approx(2 / sqrt(0.45), rel=0.1)
    assert noise_on_sum(guard, known(make_at), [20] * 4, CLASSES)[0] == pytest.approx(2)
    assert noise_on_sum(guard, known(make_at), [20] * 3, CLASSES)[0] == pytest.approx(2 * sqrt(3 / 4))


def test_small_sites_count_less_where_each_adds_all_noise(make_at) -> None:
    guard = parse_guard(NOISE)
    (small, large) = (
        float(privatise(guard, upload(*features(9)), here(make_at, size), known(make_at)).sums.weight[0])
        for size in (9, 10_000)
    )
    assert small < 0.6 < 0.99 < large <= 1
    deviation, units = noise_on_sum(guard, known(make_at), [9, 10_000], CLASSES)
    assert deviation == pytest.approx(2 * sqrt(small**2 + large**2))
    assert units == pytest.approx(9 * small + 10_000 * large)


@pytest.mark.parametrize("images", [1, 30, 400])
def test_all_of_a_site_together_is_bounded_and_its_means_stay(images: int, make_at) -> None:
    guard = parse_guard("unit=client,clip=0.5,noise=1e-9")
    declared, h, y = known(make_at, "client"), *features(images)
    private = parts_of(privatise(guard, upload(h, y), here(make_at), declared))
    for name, bound in declared.items():
        assert float((private[name].value.rows / bound.scale).norm()) <= 0.5 + 1e-6
    table = private["sums"].value
    assert float(table.count.norm()) <= 0.5 + 1e-6
    means = exact_class_means(h, y, CLASSES)
    found = table.rows / table.count[:, None]
    torch.testing.assert_close(found[means.held], means.rows[means.held], atol=1e-5, rtol=0)


def test_which_classes_a_site_has_does_not_show_and_negative_counts_arrive(make_at) -> None:
    h, y = features(20)
    guard = parse_guard(NOISE)
    one_class = upload(h, torch.zeros_like(y))
    private = privatise(guard, one_class, here(make_at), known(make_at))
    blob = encode(private, "a").blob
    assert len(blob) == len(encode(privatise(guard, upload(h, y), here(make_at), known(make_at)), "a").blob)
    arrived = decode(blob, noised_form(guard, one_class), "a")
    assert isinstance(arrived.sums.value, NoisedTable)
    assert torch.equal(arrived.sums.value.count, private.sums.value.count)
    assert float(private.sums.value.count.min()) < 0


def test_a_total_becomes_possible_again_and_one_that_is_stays(make_at) -> None:
    guard, declared = parse_guard(NOISE), known(make_at)
    h, y = features(40)
    tally: Tally[MomentsUpload] = Tally()
    tally.add("a", upload(h, y))
    total = tally.total()
    kept = possible_total(guard, declared, total)
    torch.testing.assert_close(kept.gram.rows, total.gram.rows, atol=1e-9, rtol=0)
    assert torch.equal(kept.sums.rows, total.sums.rows)
    G = torch.diag(torch.tensor([3.0, 2.0, 1.0, 0.0, -1.0, -2.0]).double())
    noised = replace(total, gram=replace(total.gram, rows=pack_symmetric(G)[None]))
    noised = replace(noised, sums=replace(total.sums, count=torch.tensor([-4.0, 0.5, 9.0]).double()))
    repaired = possible_total(guard, declared, noised)
    torch.testing.assert_close(unpack_symmetric(repaired.gram.rows[0], DIM), G.clamp(min=0))
    assert repaired.sums.count.tolist() == [1.0, 1.0, 9.0]
    assert possible_total(parse_guard(None), {}, noised) is noised


@pytest.mark.parametrize("method", ["fedncm", "fed3r", "fedcgs", "fedcof", "protoridge"])
@pytest.mark.parametrize("guard", ["epsilon=200,delta=1e-5", "epsilon=200,delta=1e-5,unit=client", "epsilon=3"])
def test_runs(method: str, guard: str, tiny_run) -> None:
    pytest.importorskip("opacus")
    run = tiny_run(method, guard=guard, engine="loop")
    privacy = run.summary["privacy"]
    assert privacy["epsilon"] == pytest.approx(float(guard.split(",")[0].removeprefix("epsilon=")), rel=1e-2)
    assert run.rounds[0]["privacy"]["epsilon"] == privacy["epsilon"]
    assert not any("class with one image" in warning for warning in run.config["warnings"])
    assert run.summary["accuracy_final"]["global"]["average"] >= 0


def test_a_secure_run_says_what_sharing_means_and_what_a_drop_out_costs(tiny_run, monkeypatch) -> None:
    pytest.importorskip("flwr")
    method = find_method("fedncm")
    plain = tiny_run("fedncm", guard="epsilon=3,secure=on", protocol="equal=2", dtype="float64")
    assert plain.summary["privacy"]["epsilon"] == pytest.approx(3)
    assert plain.config["guard"]["among"] == 6
    assert any("adds 1/6 of the noise's variance" in warning for warning in plain.config["warnings"])
    upload = method.upload

    def failing(self: Any, net: Any, data: Any, at: Any) -> Any:
        if at.client == "b-0" and len(data.y) > 2:
            raise RuntimeError("gone")
        return upload(self, net, data, at)

    monkeypatch.setattr(method, "upload", failing)
    fewer = tiny_run("fedncm", guard="epsilon=3,secure=on", protocol="equal=2", dtype="float64")
    assert fewer.summary["privacy"]["epsilon"] > 3.2
    assert fewer.rounds[0]["privacy"]["epsilon"] == fewer.summary["privacy"]["epsilon"]


def test_much_budget_gives_the_head_without_noise(tiny_run) -> None:
    plain = tiny_run("protoridge", set={"gram": "none"}, dtype="float64")
    noised = tiny_run("protoridge", set={"gram": "none", "project": 0}, dtype="float64", guard="epsilon=1e12")
    for domain, score in plain.summary["accuracy_final"]["global"].items():
        if isinstance(score, float):
            assert noised.summary["accuracy_final"]["global"][domain] == pytest.approx(score, abs=0.05)


def test_noise_decides_how_many_dimensions_are_left(make_at) -> None:
    method = find_method("protoridge")(gram="none")
    at = make_at(classes=10, dim=1280, clients={"a": 864}, noise=1.6977, noised=864.0)
    assert method._dimensions(1280, at) == 0, "all of them"
    assert method._dimensions(1280, replace(at, noise=4.5)) == 256
    assert method._dimensions(1280, replace(at, noise=100.0)) == 64
    assert method._dimensions(1280, replace(at, noise=0.0)) == 0


def test_engines_agree_under_noise(tiny_run, same_results) -> None:
    guard = "epsilon=3,delta=1e-5,quantise=8"
    plain = tiny_run("protoridge", guard=guard, name="plain")
    same_results(plain, tiny_run("protoridge", guard=guard, engine="workers", workers=2))

"""I2PFL: GT-23 to GT-27, invariants of its weights, every knob and preset."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import one_hot

from protofed.methods.fedproto import ModelAndPrototypes
from protofed.methods.fpl import SeparatePrototypeUpload
from protofed.methods.i2pfl import I2PFL
from protofed.records import ClassTable, Weights
from protofed.seeding import generator
from protofed.verbs import class_means


def tables(rows: list[list[float]] | Tensor, held: list[bool] | None = None) -> list[ClassTable]:
    """One client per row, one class."""
    rows = torch.as_tensor(rows)
    owns = held or [True] * len(rows)
    return [ClassTable(row[None] * own, torch.tensor([float(own)])) for row, own in zip(rows, owns, strict=True)]


def close(found: Tensor, expected: list[Any]) -> None:
    torch.testing.assert_close(found, torch.tensor(expected, dtype=found.dtype), atol=1e-5, rtol=0)


# The server: Eq. 3-5

GT_23 = [[0.0, 0.0], [1.0, 0.0], [5.0, 3.0]]
GT_24 = [[0.0, 0.0]] * 3 + [[4.0, 0.0]]


@pytest.mark.parametrize(
    ("rows", "power", "expected"),
    [
        (GT_23, 2.0, [3.35, 1.95]),
        (GT_23, 1.0, [2.679495, 1.490753]),
        (GT_24, 2.0, [3.0, 0.0]),
        (GT_24, 1.0, [2.0, 0.0]),
    ],
)
def test_gt_23_and_24(rows: list[list[float]], power: float, expected: list[float]) -> None:
    close(I2PFL(reweight_power=power).generalized(tables(rows)).rows[0], expected)


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        ({}, [3.3265, 1.9405]),
        ({"ema_weight_on": "past"}, [1.0235, 1.0095]),
        ({"ema": False}, [3.35, 1.95]),
        ({"ema_beta": 0.5}, [2.175, 1.475]),
    ],
)
def test_gt_25(choice: dict[str, Any], expected: list[float], make_at: Any) -> None:
    before = ModelAndPrototypes(Weights({}, {}), ClassTable(torch.tensor([[1.0, 1.0]]), torch.ones(1)))
    total = SeparatePrototypeUpload(weights=Weights({}, {}), P=dict(enumerate(tables(GT_23))))
    close(I2PFL(**choice).aggregate(before, total, make_at(client=None)).G.rows[0], expected)


def test_the_first_average_is_not_mixed_with_nothing(make_at: Any) -> None:
    before = ModelAndPrototypes(Weights({}, {}), ClassTable.empty(1, 2, torch.ones(1)))
    total = SeparatePrototypeUpload(weights=Weights({}, {}), P=dict(enumerate(tables(GT_23))))
    for on in ("new", "past"):
        close(I2PFL(ema_weight_on=on).aggregate(before, total, make_at(client=None)).G.rows[0], [3.35, 1.95])


@pytest.mark.parametrize(("stale", "expected"), [("keep", [7.0, 7.0]), ("drop", [0.0, 0.0])])
def test_a_class_nobody_sent(stale: str, expected: list[float], make_at: Any) -> None:
    before = ModelAndPrototypes(Weights({}, {}), ClassTable(torch.tensor([[7.0, 7.0]]), torch.ones(1)))
    total = SeparatePrototypeUpload(weights=Weights({}, {}), P=dict(enumerate(tables(GT_23, [False] * 3))))
    G = I2PFL(stale_protos=stale).aggregate(before, total, make_at(client=None)).G
    close(G.rows[0], expected)
    assert G.held.tolist() == [stale == "keep"]


@pytest.mark.parametrize("kind", ["reweight", "mean", "finch"])
def test_a_client_without_the_class_changes_nothing(kind: str) -> None:
    method = I2PFL(global_proto=kind)
    without = method.generalized(tables(GT_23)).rows
    assert torch.equal(method.generalized(tables([*GT_23, [50.0, 50.0]], [True, True, True, False])).rows, without)


def test_one_or_two_owners_and_equal_prototypes_give_the_plain_mean() -> None:
    close(I2PFL().generalized(tables([[3.0, 1.0]])).rows[0], [3.0, 1.0])
    close(I2PFL().generalized(tables([[3.0, 1.0], [7.0, 2.0]])).rows[0], [5.0, 1.5])
    close(I2PFL().generalized(tables([[3.0, 1.0]] * 4)).rows[0], [3.0, 1.0])


@pytest.mark.parametrize(("power", "share"), [(2.0, 2 / 7), (1.0, 1 / 2)])
def test_a_majority_is_inverted_and_balanced_by_power_one(power: float, share: float) -> None:
    """Five clients at 0, two at 1: the total weight of the five."""
    rows = [[0.0, 0.0]] * 5 + [[1.0, 0.0]] * 2
    close(I2PFL(reweight_power=power).generalized(tables(rows)).rows[0], [1 - share, 0.0])


@settings(max_examples=40)
@given(st.integers(1, 7), st.integers(0, 10**6), st.sampled_from([1.0, 2.0, 3.0]))
def test_weights_are_convex_and_ignore_position_rotation_and_scale(owners: int, seed: int, power: float) -> None:
    rng = generator(seed, "p")
    p = torch.randn(owners, 3, generator=rng, dtype=torch.float64)
    method = I2PFL(reweight_power=power)

    def g(rows: Tensor) -> Tensor:
        return method.generalized(tables(rows)).rows[0]

    # The weights themselves: append coordinates that tell the clients apart, far too small to matter.
    tiny = 1e-9
    marked = torch.cat([p, tiny * torch.eye(owners, dtype=torch.float64)], 1)
    w = g(marked)[3:] / tiny
    assert (w >= -1e-9).all()
    assert w.sum().item() == pytest.approx(1, abs=1e-6)
    shift = torch.randn(3, generator=rng, dtype=torch.float64)
    rotation = torch.linalg.qr(torch.randn(3, 3, generator=rng, dtype=torch.float64))[0]
    torch.testing.assert_close(g(p + shift), g(p) + shift)
    torch.testing.assert_close(g(p @ rotation), g(p) @ rotation)
    torch.testing.assert_close(g(p * 37), g(p) * 37)
    order = torch.randperm(owners, generator=rng)
    torch.testing.assert_close(g(p[order]), g(p))


def test_finch_averages_cluster_centres() -> None:
    radians = torch.tensor([0, 6, 11, 15, 90, 95], dtype=torch.float64) * math.pi / 180
    rows = torch.stack([radians.cos(), radians.sin()], 1)
    close(I2PFL(global_proto="finch").generalized(tables(rows)).rows[0], [0.470970, 0.568318])
    close(I2PFL(global_proto="mean").generalized(tables(rows)).rows[0], [0.642487, 0.425059])
    none = I2PFL(global_proto="finch").generalized(tables(rows, [False] * 6))
    assert not none.rows.any()
    assert not none.held.any()


# The client: Eq. 6-10

H = torch.tensor([[2.0, 0.0], [0.0, 2.0], [4.0, 4.0]])
Y = torch.tensor([0, 0, 1])


def drawn(gamma: float, partners: list[int]) -> dict[str, Tensor]:
    """A lottery that these partners win."""
    return {
        "gamma": torch.full((len(partners),), gamma),
        "pick": one_hot(torch.tensor(partners), 3),
    }


@pytest.mark.parametrize(("reduction", "expected"), [("mse_mean", 1.25), ("class_sum", 4.375), ("class_mean", 2.375)])
@pytest.mark.parametrize("detach", [True, False])
def test_gt_27(reduction: str, expected: float, detach: bool, make_at: Any, identity_net: Any) -> None:
    method = I2PFL(apa_reduction=reduction, apa_detach=detach)
    at = make_at(draw=drawn(0.75, [2, 2, 0]))
    mixed = method.mixed(identity_net(), H, H, Y, at)
    close(mixed, [[2.5, 1.0], [1.0, 2.5], [3.5, 3.0]])
    close(class_means(mixed, Y, 2).rows, [[1.75, 1.75], [3.5, 3.0]])
    assert method.alignment(H, mixed, Y, at).item() == pytest.approx(expected, abs=1e-5)


def test_detached_prototypes_get_no_gradient(make_at: Any) -> None:
    at = make_at()
    for detach in (True, False):
        h, mixed = H.clone().requires_grad_(), (H + 1).requires_grad_()
        loss = I2PFL(apa_detach=detach).alignment(h, mixed, Y, at)
        of_h, of_mixed = torch.autograd.grad(loss, [h, mixed], allow_unused=True)
        assert of_h.any()
        assert (of_mixed is None) if detach else bool(of_mixed.any())


def test_gt_26_in_the_loss(make_at: Any, identity_net: Any) -> None:
    h, y = torch.tensor([[3.0, 4.0], [1.0, 0.0]]), torch.tensor([0, 1])
    G = ClassTable(torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.ones(2))
    method = I2PFL(tau=0.5, lambda_inter=2.0, lambda_intra=0.0, apa_source="none")
    terms, _ = method.loss(identity_net(), h, y, make_at(down=ModelAndPrototypes(Weights({}, {}), G)))
    assert terms["inter"].item() == pytest.approx(2 * 0.319972, abs=1e-5)
    assert terms["intra"].item() == 0
    nothing = ModelAndPrototypes(Weights({}, {}), ClassTable.empty(2, 2, h))
    assert method.loss(identity_net(), h, y, make_at(down=nothing))[0]["inter"].item() == 0


def partners_of(method: I2PFL, y: Tensor, at: Any, net: Any) -> Tensor:
    """Who is mixed in: features that are unit vectors, gamma 0."""
    marks = torch.eye(len(y))
    mixed = method.mixed(net, marks, marks, y, at)
    return mixed.argmax(1)


@pytest.mark.parametrize("partner", ["different", "any", "same"])
def test_partners(partner: str, make_at: Any, identity_net: Any) -> None:
    y = torch.tensor([0, 0, 1, 1, 2])
    method = I2PFL(mixup_partner=partner)
    met = torch.zeros(5, 5)
    for seed in range(200):
        pick = method.draw(y, make_at(), generator(seed, "draw"))["pick"]
        j = partners_of(method, y, make_at(draw={"pick": pick, "gamma": torch.zeros(5)}), identity_net())
        met[torch.arange(5), j] += 1
    same = y[:, None] == y
    other = ~torch.eye(5, dtype=torch.bool)
    allowed = {"different": ~same, "any": other, "same": same & other}[partner]
    if partner == "same":  # the only one of its class is mixed with nobody
        assert met[4].tolist() == [0, 0, 0, 0, 200]
        met, allowed = met[:4], allowed[:4]
    assert ((met > 0) == allowed).all()
    # Uniform among those allowed: 200 draws of a share p have a standard deviation of sqrt(200 p (1 - p)), 7.1 at most.
    expected = (200 / allowed.sum(1))[:, None].expand(met.shape)
    assert ((met - expected)[allowed].abs() < 4 * 7.1).all()


def test_one_class_alone_is_not_mixed(make_at: Any, identity_net: Any) -> None:
    at = make_at(draw={"gamma": torch.full((3,), 0.2), "pick": torch.rand(3, 3)})
    assert torch.equal(I2PFL().mixed(identity_net(), H, H, torch.zeros(3, dtype=torch.int64), at), H)


def test_draws(make_at: Any) -> None:
    y = torch.zeros(500, dtype=torch.int64)
    rng = generator(0, "draw")
    per_sample = I2PFL().draw(y, make_at(), rng)["gamma"]
    per_batch = I2PFL(mixup_scope="batch").draw(y, make_at(), rng)["gamma"]
    folded = I2PFL(mixup_fold=True).draw(y, make_at(), rng)["gamma"]
    assert len(per_sample.unique()) == 500
    assert per_batch.shape == (500,)
    assert len(per_batch.unique()) == 1
    assert folded.min() >= 0.5
    assert 0.4 < per_sample.mean() < 0.6


def test_sources(make_at: Any, identity_net: Any) -> None:
    at = make_at(draw=drawn(0.75, [2, 2, 0]))
    assert torch.equal(I2PFL(apa_source="none").mixed(identity_net(), H, H, Y, at), H)
    images = H[:, :, None, None]
    net = SimpleNamespace(features=lambda x: x[:, :, 0, 0] ** 2, quiet=torch.no_grad)
    inputs = I2PFL(apa_source="input_mixup").mixed(net, images, H**2, Y, at)  # type: ignore[arg-type]
    close(inputs, [[2.5**2, 1.0], [1.0, 2.5**2], [3.5**2, 9.0]])


def test_input_mixup_leaves_running_statistics_alone(tiny_run: Any) -> None:
    """A second look at the batch must not move them: with all weights zero the run is FedAvg, statistics included."""
    options: dict[str, Any] = {"model": "resnet10", "rounds": 1}
    zero = {"lambda_intra": 0, "lambda_inter": 0, "apa_source": "input_mixup", "model.width": 4, "clip": 0}
    ours, plain = tiny_run("i2pfl", set=zero, **options), tiny_run("fedavg", set={"model.width": 4}, **options)
    assert (ours.path / "model.safetensors").read_bytes() == (plain.path / "model.safetensors").read_bytes()


def test_with_all_weights_zero_it_is_fedavg(tiny_run: Any) -> None:
    ours, plain = tiny_run("i2pfl", set={"lambda_intra": 0, "lambda_inter": 0, "clip": 0}), tiny_run("fedavg")
    assert (ours.path / "model.safetensors").read_bytes() == (plain.path / "model.safetensors").read_bytes()
    assert [record["accuracy"] for record in ours.rounds] == [record["accuracy"] for record in plain.rounds]


def test_the_first_round_has_no_contrast(tiny_run: Any) -> None:
    one = tiny_run("i2pfl", rounds=1, set={"lambda_intra": 0})
    plain = tiny_run("fedavg", rounds=1)
    assert (one.path / "model.safetensors").read_bytes() == (plain.path / "model.safetensors").read_bytes()
    parts = [record["loss_parts"] for record in tiny_run("i2pfl").rounds]
    assert parts[0]["inter"] == 0
    assert parts[0]["intra"] > 0
    assert parts[1]["inter"] > 0


def test_it_learns(tiny_run: Any) -> None:
    # With 16 coordinates instead of 512 the paper's weight of 10 would draw all features together.
    run = tiny_run("i2pfl", rounds=12, epochs=2, lr=0.05, set={"lambda_intra": 1})
    assert run.summary["accuracy_final"]["global"]["average"] > 0.9


@pytest.mark.parametrize("preset", ["digits", "office_caltech10", "pacs"])
def test_presets(preset: str, tiny_run: Any) -> None:
    knobs = tiny_run("i2pfl", preset=preset, rounds=1).config["method"]["knobs"]
    expected = {"digits": (0.07, 0.4, 10), "office_caltech10": (0.02, 0.4, 10), "pacs": (0.04, 0.2, 2)}[preset]
    assert (knobs["tau"], knobs["alpha"], knobs["lambda_intra"]) == expected
    assert knobs["lambda_inter"] == 1


CHOICES: list[dict[str, Any]] = [
    {},
    {"tau": 0.5},
    {"alpha": 2.0},
    {"lambda_intra": 1.0},
    {"lambda_inter": 3.0},
    {"ema": "off"},
    {"ema_beta": 0.5},
    {"ema_weight_on": "past"},
    {"reweight_power": 1.0},
    {"global_proto": "mean"},
    {"apa_source": "input_mixup"},
    {"apa_source": "none"},
    {"apa_reduction": "class_sum"},
    {"apa_reduction": "class_mean"},
    {"apa_detach": "off"},
    {"mixup_scope": "batch"},
    {"mixup_partner": "any"},
    {"mixup_partner": "same"},
    {"mixup_fold": "on"},
    {"proto_pass": "last_epoch"},
    {"weighting": "uniform"},
    {"persist_optimizer": "on"},
]


def test_every_knob_changes_what_is_learnt(tiny_run: Any, make_data: Any) -> None:
    # Domains of different size, so that weighting shows; three rounds, so that the average over rounds does.
    data = make_data(train={"a": 24, "b": 16, "c": 32}, absent={"a": [3]})
    found: dict[bytes, dict[str, Any]] = {}
    for choice in CHOICES:
        run = tiny_run("i2pfl", data, rounds=3, set={"model.hidden": 8, **choice})
        assert all(record["train_loss"] is not None for record in run.rounds), choice
        model = (run.path / "model.safetensors").read_bytes()
        assert model not in found, (choice, found[model])
        found[model] = choice


@pytest.mark.parametrize("choice", [{"global_proto": "finch"}, {"stale_protos": "drop"}])
def test_knobs_that_need_more_clients_run(choice: dict[str, Any], tiny_run: Any) -> None:
    assert tiny_run("i2pfl", protocol="equal=2", participation=0.5, set=choice).complete


def test_bytes_are_the_closed_form(tiny_run: Any) -> None:
    run = tiny_run("i2pfl")
    learnable = 64 * 16 + 16 + 16 * 4 + 4
    up, down = (run.rounds[1]["bytes"][way] for way in ("up", "down"))
    assert (up["weights"], up["prototypes"]) == (3 * 4 * learnable, (3 + 3 + 4) * 16 * 4)
    assert (down["weights"], down["prototypes"]) == (3 * 4 * learnable, 3 * 4 * 16 * 4)


def test_gradients_are_bounded_but_in_the_papers_presets(tiny_run: Any) -> None:
    assert I2PFL().steps[0].clip == 5.0
    assert all(settings["clip"] == 0 for settings in I2PFL.presets.values())
    assert I2PFL(clip=0).steps[0].clip is None
    plain = {"rounds": 1, "momentum": 0.0, "weight_decay": 0.0}
    start, tight, wide = (
        tiny_run("i2pfl", **plain, lr=lr, set={"clip": clip}).model().get_submodule("fc").weight
        for lr, clip in ((1e-12, 5), (1.0, 1e-6), (1.0, 1e6))
    )
    assert (tight - start).abs().max() < 1e-4 < (wide - start).abs().max()

"""FedMP and its few-shot form: golden vectors 34 to 36, invariant 9, the exchange of embeddings, knobs, whole runs."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from protofed import At, Plan, UserError
from protofed.method import FeatureTraffic
from protofed.methods import fedmp
from protofed.methods.fedavg import FedAvg
from protofed.methods.fedmp import FedMP, FedMPBroadcast, FedMPServer, FedMPUpload, FewShotFedMP, balanced, owners_mean
from protofed.models import build_model
from protofed.models.net import Net
from protofed.records import ClassTable, Features, Weights, encode
from protofed.registry import find_method, knobs, make_method
from protofed.seeding import generator

NO_WEIGHTS = Weights({}, {})


def embeddings(rows: Any, labels: Any, classes: int = 2) -> Features:
    return Features(torch.as_tensor(rows, dtype=torch.float32), torch.as_tensor(labels), classes)


def table(rows: Any) -> ClassTable:
    given = torch.as_tensor(rows, dtype=torch.float32)
    return ClassTable(given, torch.ones(len(given)))


def empty_server(*clients: str, classes: int = 1, dim: int = 2) -> FedMPServer:
    none = ClassTable.empty(classes, dim, torch.zeros(1))
    nothing = Features(torch.zeros(0, dim), torch.zeros(0, dtype=torch.long), classes)
    return FedMPServer(NO_WEIGHTS, dict.fromkeys(clients, nothing), dict.fromkeys(clients, none), none)


def after(method: FedMP, server: FedMPServer, at: At, sent: dict[str, Features]) -> FedMPServer:
    return method.aggregate(server, FedMPUpload(NO_WEIGHTS, sent), at)


def stepped(
    method: FedMP, net: Net, x: Tensor, y: Tensor, at: At, rng: int = 0
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Values of the terms, and the gradient of their sum."""
    drawn = replace(at, draw=method.draw(y, at, torch.Generator().manual_seed(rng)))
    outcome = method.loss(net, x, y, drawn)
    terms = outcome[0] if isinstance(outcome, tuple) else outcome
    found = torch.autograd.grad(torch.stack(list(terms.values())).sum(), list(net.params().values()))
    return {name: value.detach() for name, value in terms.items()}, list(found)


@pytest.fixture
def lesson(make_at: Callable[..., At]) -> Callable[..., tuple[Net, Tensor, Tensor, At]]:
    """A model, a batch, and a client that has received embeddings and prototypes (or, with `rows=0`, nothing)."""

    def make(model: str = "mlp", rows: int = 12, stage: int = 4) -> tuple[Net, Tensor, Tensor, At]:
        torch.manual_seed(5)
        shape, options = ((1, 8, 8), {"hidden": 6}) if model == "mlp" else ((1, 16, 16), {"width": 4})
        net = Net(build_model(model, shape, 3, options).double())
        x, y = torch.rand(8, *shape, dtype=torch.float64), torch.arange(8) % 3
        u = net.features(torch.rand(rows, *shape, dtype=torch.float64), FedMP(stage=stage).cut).detach()
        p = ClassTable(torch.rand(3, u[0:1].numel() if rows else u.shape[1], dtype=torch.float64), torch.ones(3))
        if not rows:
            p = ClassTable(0 * p.rows, 0 * p.count)
        down = FedMPBroadcast(net.pick(), p, Features(u, torch.arange(rows) % 3, 3))
        return net, x, y, make_at(classes=3, dim=net.dim, clients={"a": 8, "b": 8}, down=down, image_shape=shape)

    return make


# Golden vectors


@pytest.mark.parametrize(
    ("literal", "expected", "weight", "L"), [(True, (2.2931, 2.1466), -2.0746, 6), (False, (1.7069, 1.8534), 2.0746, 2)]
)
def test_gt34_weights_of_the_added_losses(literal: bool, expected: tuple[float, ...], weight: float, L: float) -> None:
    th = torch.tensor([1.0, 2.0], requires_grad=True)
    l_local, l_sfmc, l_cpgma = th[0] ** 2 + 1, 3 * th[1] ** 2, -torch.tanh(th[0] * th[1])
    terms = torch.stack([l_local, balanced(l_sfmc, l_local), balanced(l_cpgma, l_local, literal)])
    weights = torch.stack(torch.autograd.grad(terms.sum(), (l_sfmc, l_cpgma), retain_graph=True))
    torch.testing.assert_close(weights, torch.tensor([1 / 6, weight]), atol=5e-5, rtol=0)
    assert float((l_local + weights[0] * l_sfmc + weights[1] * l_cpgma).detach()) == pytest.approx(L, abs=1e-5)
    (gradient,) = torch.autograd.grad(terms.sum(), th)
    torch.testing.assert_close(gradient, torch.tensor(expected), atol=5e-5, rtol=0)
    # What is logged is the loss itself: weighted, it would always be the local one, up to its sign.
    torch.testing.assert_close(terms.detach(), torch.tensor([2.0, 12.0, -0.964028]))


def test_gt35_centres_and_prototypes_over_two_rounds(make_at: Callable[..., At]) -> None:
    at = make_at(classes=1, clients={"a": 10, "b": 30}, client=None)
    rounds = [
        {"a": embeddings([[1.0, 0], [3, 0]], [0, 0], 1), "b": embeddings([[0.0, 4]], [0], 1)},
        {"a": embeddings([[4.0, 0]], [0], 1), "b": embeddings([[0.0, 4]], [0], 1)},
    ]
    expected = {
        "zero": [([1, 0], [0, 2], [0.175, 1.05]), ([2.5, 0], [0, 3], [0.49, 1.89])],
        "first": [([2, 0], [0, 4], [0.5, 3]), ([3, 0], [0, 4], [0.675, 3])],
    }
    for init, values in expected.items():
        method, server = FedMP(proto_init=init), empty_server("a", "b")
        for sent, (a, b, p) in zip(rounds, values, strict=True):
            server = after(method, server, at, sent)
            found = torch.cat([server.zbar["a"].rows, server.zbar["b"].rows, server.p.rows])
            torch.testing.assert_close(found, torch.tensor([a, b, p], dtype=torch.float32), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("form", "expected"), [("abs", -1.8), ("literal", -1.8), ("one_minus_cos", 0.2)])
def test_gt36_alignment(form: Any, expected: float) -> None:
    h, y = torch.tensor([[3.0, 4.0], [1.0, 0.0], [0.0, 2.0]]), torch.tensor([0, 0, 1])
    found = FedMP(cpgma_weight=form).alignment(h, y, table([[1.0, 0.0], [0.0, 1.0]]))
    torch.testing.assert_close(found, torch.tensor(expected), atol=1e-5, rtol=0)


# The objective


def test_scaling_the_completion_loss_changes_no_step(lesson: Callable[..., Any]) -> None:
    class TenTimes(FedMP):
        def completion(self, scores: Tensor, y: Tensor) -> Tensor:
            return 10 * super().completion(scores, y)

    plain, scaled = stepped(FedMP(), *lesson()), stepped(TenTimes(), *lesson())
    torch.testing.assert_close(scaled[0]["sfmc"], 10 * plain[0]["sfmc"])
    torch.testing.assert_close(scaled[1], plain[1], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(("form", "towards"), [("abs", True), ("one_minus_cos", True), ("literal", False)])
def test_only_the_printed_sign_pushes_features_away(lesson: Callable[..., Any], form: Any, towards: bool) -> None:
    net, x, y, at = lesson()
    base, method = FedMP(sfmc=False, cpgma=False), FedMP(sfmc=False, cpgma_weight=form)
    with_term, without = stepped(method, net, x, y, at)[1], stepped(base, net, x, y, at)[1]
    before = FedMP().alignment(net.features(x), y, at.down.p)
    with torch.no_grad():  # a step along the gradient of the alignment alone
        for param, one, other in zip(net.params().values(), with_term, without, strict=True):
            param -= 1e-3 * (one - other)
    now = FedMP().alignment(net.features(x), y, at.down.p)
    assert bool(now < before) is towards


def test_completion_trains_the_classifier_only(lesson: Callable[..., Any]) -> None:
    net, x, y, at = lesson()
    full, local = (stepped(FedMP(sfmc=on, cpgma=False), net, x, y, at)[1] for on in (True, False))
    moved = {name for name, one, other in zip(net.params(), full, local, strict=True) if not torch.equal(one, other)}
    assert moved == {"fc.weight", "fc.bias"}


def test_without_embeddings_and_prototypes_only_the_local_loss_is_left(lesson: Callable[..., Any]) -> None:
    terms, gradient = stepped(FedMP(), *lesson(rows=0))
    assert list(terms) == ["local", "sfmc", "cpgma"]
    assert float(terms["sfmc"]) == float(terms["cpgma"]) == 0.0
    plain = stepped(FedMP(sfmc=False, cpgma=False), *lesson(rows=0))
    assert list(plain[0]) == ["local"]
    assert all(torch.equal(one, other) for one, other in zip(gradient, plain[1], strict=True))


def test_a_class_without_prototype_takes_no_part() -> None:
    h, y = torch.tensor([[3.0, 4.0], [0.0, 2.0]], requires_grad=True), torch.tensor([0, 1])
    p = ClassTable(torch.tensor([[1.0, 0.0], [0.0, 0.0]]), torch.tensor([5.0, 0.0]))
    for form, expected in (("abs", -0.6), ("one_minus_cos", 0.4)):
        loss = FedMP(cpgma_weight=form).alignment(h, y, p)
        (gradient,) = torch.autograd.grad(loss, h)
        assert float(loss.detach()) == pytest.approx(expected)
        assert gradient[1].tolist() == [0.0, 0.0]


def test_normalisation_in_the_classifier_sees_the_received_apart_or_together(lesson: Callable[..., Any]) -> None:
    for stage, same in ((4, True), (3, False)):
        losses = {}
        for form in ("separate", "shared"):
            net, x, y, at = lesson("resnet10", stage=stage)
            losses[form] = stepped(FedMP(stage=stage, sfmc_bn=form), net, x, y, at)[0]["sfmc"]
        assert torch.isclose(losses["separate"], losses["shared"]) == same


def test_a_step_takes_one_batch_of_what_was_received(lesson: Callable[..., Any]) -> None:
    _, _, y, at = lesson(rows=12)
    received = FedMP().draw(y, at, torch.Generator().manual_seed(0))["received"].tolist()
    assert len(received) == at.plan.batch == len(set(received))
    alone = replace(at, down=replace(at.down, U=Features(at.down.U.rows[:1], at.down.U.labels[:1], 3)))
    taken = [FedMP(drop_singleton_batch=on).draw(y, alone, torch.Generator())["received"] for on in (True, False)]
    assert [len(rows) for rows in taken] == [0, 1]


# What travels


def test_a_client_is_sent_embeddings_of_others(make_at: Callable[..., At]) -> None:
    bank = {name: embeddings(torch.full((20, 2), float(i)), [0] * 20) for i, name in enumerate("abc")}
    server = replace(empty_server("a", "b", "c", classes=2), bank=bank)
    at = make_at(clients=dict.fromkeys("abc", 20), client="b")

    def sent(method: FedMP, at: At) -> Tensor:
        return method.broadcast(server, at).U.rows[:, 0]

    some = sent(FedMP(download_per_client=10), at)
    assert len(some) == 10
    assert set(some.tolist()) <= {0.0, 2.0}
    assert sorted(sent(FedMP(), at).tolist()) == [0.0] * 20 + [2.0] * 20
    assert set(sent(FedMP(), replace(at, client=None)).tolist()) == {0.0, 1.0, 2.0}
    assert len(sent(FedMP(sfmc=False), at)) == 0
    other_round = sent(FedMP(download_per_client=10), replace(at, round=1))
    assert torch.equal(some, sent(FedMP(download_per_client=10), at))
    assert not torch.equal(some, other_round)


def test_an_upload_has_the_embeddings_of_the_last_epoch_up_to_a_number(
    lesson: Callable[..., Any], samples_of: Callable[..., Any]
) -> None:
    net, x, y, at = lesson()
    seen = FedMP().observe(net, x, y)
    done = replace(at, notes={key: value.detach() for key, value in seen.items()})
    every = FedMP().upload(net, samples_of(x, y), done)[0].U.value
    assert sorted(every.rows.tolist()) == sorted(done.notes["u"].tolist())
    few = FedMP(upload_per_client=3).upload(net, samples_of(x, y), done)[0]
    assert len(few.U.value.labels) == 3
    size = encode(few, "a").size
    assert size.features == 3 * net.dim * 8
    assert size.weights == sum(param.numel() for param in net.params().values()) * 8
    # Which of them is chance, and another one in every round.
    drawn = [
        FedMP(upload_per_client=3).upload(net, samples_of(x, y), replace(done, round=round))[0].U.value.rows
        for round in range(2)
    ]
    assert not torch.equal(*drawn)
    # With a clean pass the embeddings are those of the data, whatever the last epoch saw.
    clean = FedMP(proto_pass="extra_eval").upload(net, samples_of(x, y), replace(done, notes={}))[0].U.value
    torch.testing.assert_close(clean.rows.sum(0), seen["u"].sum(0))


def test_no_more_embeddings_are_kept_during_the_last_epoch_than_are_sent(lesson: Callable[..., Any]) -> None:
    net, x, y, at = lesson()
    method = FedMP(upload_per_client=10)
    many = replace(at, clients={"a": 80, "b": 80})
    drawn = replace(many, draw=method.draw(y, many, torch.Generator()))
    _, notes = method.loss(net, x, y, drawn)
    assert notes["u"].shape == (1, net.dim)  # 8 of 80 samples: a tenth of the ten
    assert len(method.draw(y, at, torch.Generator())["keep"]) == 8


def test_the_bank_is_limited_in_bytes(
    lesson: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    net, _, _, at = lesson("resnet10", stage=1)
    method = FedMP(stage=1)
    assert method.quota(at) == 512
    monkeypatch.setattr(fedmp, "BANK_BYTES", 5 * 2 * 4 * 16 * 16 * 8)  # five for each of two clients
    assert method.quota(at) == 5
    method.build(net.model, at)
    assert "at most 5 embeddings instead of 512" in caplog.text
    monkeypatch.setattr(fedmp, "BANK_BYTES", 1)
    assert method.quota(at) == 1


def test_it_says_how_many_embeddings_travel_and_where_they_are_taken(lesson: Callable[..., Any]) -> None:
    _, _, _, at = lesson()
    method = FedMP(upload_per_client=10, download_per_client=7)
    assert method.traffic(at) == FeatureTraffic(up=10, down=7)
    assert replace(method, sfmc=False).traffic(at) == FeatureTraffic(up=10, down=0)
    last = replace(at, round=at.rounds - 1)
    assert FewShotFedMP(upload_per_client=10).traffic(last) == FeatureTraffic(up=0, down=128)
    assert FedAvg().traffic(at) == FeatureTraffic(up=0, down=0)
    assert (FedMP(stage=2).cut, method.cut, FedAvg().cut) == ("layer2", None, None)


# The server


def test_prototypes_are_means_over_owners_weighted_by_client_size() -> None:
    a = ClassTable(torch.tensor([[2.0], [8.0]]), torch.tensor([3.0, 1.0]))
    b = ClassTable(torch.tensor([[6.0], [0.0]]), torch.tensor([1.0, 0.0]))
    p = owners_mean([a, b], [10, 30])
    assert p.rows[:, 0].tolist() == [5.0, 8.0]
    assert p.count.tolist() == [4.0, 1.0]


@pytest.mark.parametrize(("stale", "kept"), [("keep", True), ("drop", False)])
def test_what_nobody_sends_any_more(make_at: Callable[..., At], stale: Any, kept: bool) -> None:
    at, method = make_at(clients={"a": 5, "b": 5}, client=None), FedMP(stale_protos=stale)
    first = after(
        method,
        empty_server("a", "b", classes=2),
        at,
        {"a": embeddings([[1.0, 0]], [0]), "b": embeddings([[0.0, 1], [2.0, 2]], [1, 1])},
    )
    assert first.p.rows.tolist() == [[1.0, 0.0], [1.0, 1.5]]
    second = after(method, first, at, {"a": embeddings([[3.0, 0]], [0])})
    assert second.p.held.tolist() == [True, kept]
    assert bool(second.p.rows[1].any()) is kept
    assert second.zbar["a"].rows[0].tolist() == [2.0, 0.0]
    # A client's embeddings stay until it sends others.
    assert second.bank["a"].rows.tolist() == [[3.0, 0.0]]
    assert second.bank["b"] is first.bank["b"]


def test_the_order_of_clients_does_not_matter(make_at: Callable[..., At]) -> None:
    torch.manual_seed(0)
    sizes = {"a": 3, "b": 7, "c": 2}
    sent = {client: embeddings(torch.rand(size, 2), torch.arange(size) % 2) for client, size in sizes.items()}
    found = []
    for order in ("abc", "cab"):
        at = make_at(clients={client: sizes[client] for client in order}, client=None)
        server = after(FedMP(), empty_server(*order, classes=2), at, {client: sent[client] for client in order})
        found.append(server.p.rows)
    torch.testing.assert_close(*found)


# Whole runs


def test_the_first_round_is_that_of_fedavg(tiny_run: Callable[..., Any]) -> None:
    ours, base = (tiny_run(method, rounds=1) for method in ("fedmp", "fedavg"))
    left, right = ours.model().state_dict(), base.model().state_dict()
    assert all(torch.equal(left[name], right[name]) for name in left)
    parts = ours.rounds[0]["loss_parts"]
    assert (parts["sfmc"], parts["cpgma"]) == (0.0, 0.0)


def test_without_both_terms_it_is_fedavg(tiny_run: Callable[..., Any]) -> None:
    ours = tiny_run("fedmp", set={"sfmc": "off", "cpgma": "off"})
    left, right = ours.model().state_dict(), tiny_run("fedavg").model().state_dict()
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert ours.rounds[1]["bytes"]["down"]["features"] == 0


def test_the_log_shows_each_part_and_the_bytes_of_the_embeddings(tiny_run: Callable[..., Any]) -> None:
    run = tiny_run("fedmp", set={"download_per_client": 10})
    first, second = run.rounds
    assert set(second["loss_parts"]) == {"local", "sfmc", "cpgma"}
    assert second["loss_parts"]["sfmc"] > 0 > second["loss_parts"]["cpgma"]
    assert second["loss_parts"]["sfmc"] != pytest.approx(second["loss_parts"]["local"], rel=1e-4)
    assert first["bytes"]["up"]["features"] == 3 * 24 * 16 * 4
    assert (first["bytes"]["down"]["features"], second["bytes"]["down"]["features"]) == (0, 3 * 10 * 16 * 4)
    assert run.prototypes()["count"].tolist() == [14, 22, 22, 14]
    assert not second["events"]


@pytest.mark.parametrize("stage", [1, 2, 3, 4])
def test_every_stage_of_a_residual_network(
    make_data: Callable[..., str], tiny_run: Callable[..., Any], stage: int
) -> None:
    data = make_data(("a", "b"), size=16, train=12, test=4)
    run = tiny_run("fedmp", data, model="resnet10", set={"model.width": 4, "stage": stage})
    length = {1: 4 * 16 * 16, 2: 8 * 8 * 8, 3: 16 * 4 * 4, 4: 32}[stage]
    assert run.rounds[1]["bytes"]["up"]["features"] == 2 * 12 * length * 4
    assert run.rounds[1]["bytes"]["down"]["features"] == 2 * 12 * length * 4
    assert run.rounds[1]["loss_parts"]["sfmc"] > 0
    assert run.prototypes()["rows"].shape == (4, length)
    assert not run.rounds[1]["events"]


def test_an_early_stage_needs_a_model_that_has_it(tiny_run: Callable[..., Any]) -> None:
    with pytest.raises(UserError, match=r"no stage layer2; use stage=4, or a model of .*resnet10, .*resnet50"):
        tiny_run("fedmp", set={"stage": 2})


@pytest.mark.parametrize(
    "settings",
    [
        {"cpgma_weight": "literal", "proto_init": "zero"},
        {"cpgma_weight": "one_minus_cos", "sfmc_bn": "shared"},
        {"proto_pass": "extra_eval", "mu_client": 1, "mu_server": 0.1},
        {"upload_per_client": 1, "download_per_client": 0, "stale_protos": "drop"},
    ],
)
def test_knobs_work_in_a_run_with_some_clients_silent(tiny_run: Callable[..., Any], settings: dict[str, Any]) -> None:
    run = tiny_run("fedmp", participation=0.5, rounds=3, set=settings)
    assert [len(record["participants"]) for record in run.rounds] == [2, 2, 2]
    assert not any(record["events"] for record in run.rounds)


def test_a_federation_of_one_receives_nothing(tiny_run: Callable[..., Any]) -> None:
    run = tiny_run("fedmp", domains="a")
    assert run.rounds[1]["bytes"]["down"]["features"] == 0
    assert run.rounds[1]["loss_parts"]["sfmc"] == 0


def test_processes_and_interruptions_change_nothing(
    tiny_run: Callable[..., Any], same_results: Callable[..., None]
) -> None:
    class Stop:
        def round_end(self, run: Any, record: dict[str, Any]) -> None:
            raise KeyboardInterrupt

    whole = tiny_run("fedmp")
    same_results(whole, tiny_run("fedmp", engine="workers", workers=2))
    with pytest.raises(KeyboardInterrupt):
        tiny_run("fedmp", name="interrupted", callbacks=[Stop()])
    same_results(whole, tiny_run("fedmp", name="interrupted", resume=True))


# Few-shot


def test_few_shot_has_three_stages_and_the_last_exchange_is_of_models(tiny_run: Callable[..., Any]) -> None:
    run = tiny_run("fedmp_fewshot", set={"plan": "2,3,1"})
    assert run.config["plan"]["epochs"] == [2, 3, 1]
    assert [record["samples"] for record in run.rounds] == [72 * epochs for epochs in (2, 3, 1)]
    up = [record["bytes"]["up"]["features"] for record in run.rounds]
    assert up == [3 * 24 * 16 * 4, 3 * 24 * 16 * 4, 0]
    assert run.rounds[0]["loss_parts"]["cpgma"] == 0 > run.rounds[1]["loss_parts"]["cpgma"]
    assert bool((run.prototypes()["count"] > 0).all())
    assert not any(record["events"] for record in run.rounds)


def test_few_shot_prototypes_have_no_history(make_at: Callable[..., At]) -> None:
    at, server = make_at(classes=1, clients={"a": 10, "b": 30}, client=None), empty_server("a", "b")
    for means in ([[9.0, 9]], [[4.0, 0]]):
        sent = {"a": embeddings(means, [0], 1), "b": embeddings([[0.0, 4]], [0], 1)}
        server = after(FewShotFedMP(), server, at, sent)
    assert server.p.rows.tolist() == [[1.0, 3.0]]


def test_few_shot_knobs() -> None:
    cls = find_method("fedmp_fewshot")
    listed = {knob.name: knob.default for knob in knobs(cls)}
    assert listed["plan"] == "30,60,60"
    assert listed["ensemble_weights"] == "uniform"
    asked = Plan(epochs=(1,) * 10, lr=0.3)
    assert make_method(cls, {}).plan(asked) == replace(asked, epochs=(30, 60, 60))
    with pytest.raises(UserError, match="plan=30,x is not valid"):
        make_method(cls, {"plan": "30,x"}).plan(asked)
    with pytest.raises(UserError, match="stage=5 is not valid; it takes a whole number >= 1 and <= 4"):
        make_method(cls, {"stage": "5"})


def test_batches_of_received_embeddings_are_drawn_anew(make_at: Any) -> None:
    bank = Features(torch.zeros(50, 2), torch.zeros(50, dtype=torch.int64), 2)
    at = make_at(down=SimpleNamespace(U=bank), clients={"a": 8}, client="a")
    rng = generator(0, "draw")
    drawn = [FedMP().draw(torch.zeros(8, dtype=torch.int64), at, rng)["received"] for _ in range(40)]
    assert all(len(rows.unique()) == at.plan.batch for rows in drawn)
    assert not torch.equal(drawn[0].sort().values, drawn[1].sort().values)
    counts = torch.bincount(torch.cat(drawn), minlength=50)  # 40 x 8 / 50 = 6.4 each, standard deviation 2.3
    assert counts.min() > 0
    assert counts.max() < 6.4 + 5 * 2.3

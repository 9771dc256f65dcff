from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from protofed.errors import UserError
from protofed.method import At
from protofed.methods.fedadapter import adapters
from protofed.methods.fedadapterproto import FedAdapterProto, FedPrototypical, nearest
from protofed.methods.fedavg import SharedModel
from protofed.models import Split, build_model
from protofed.models.net import Net
from protofed.models.protopnet import project, prototype_layer, prototypes_of, with_prototypes
from protofed.records.tally import Tally
from protofed.runs.assembly import assemble
from protofed.runs.options import make_options

TINY: dict[str, Any] = {"model": "resnet10", "optimizer": "sgd", "lr": 0.02, "rounds": 2}
SMALL = {"model.width": 4, "prototype_dim": 8, "per_class": 2}
CLIENTS = ("a-0", "b-0", "c-0")


@pytest.fixture
def data(make_data: Callable[..., str]) -> str:
    return make_data(classes=2, size=16, train={"a": 8, "b": 16, "c": 16}, test=8)


def net_of(method: FedPrototypical, at: At, model: str = "resnet10", options: dict[str, object] | None = None) -> Net:
    torch.manual_seed(0)
    return Net(method.build(build_model(model, (3, 32, 32), 2, options or {"width": 4}), at))


def client_model(run: Any, client: str) -> dict[str, Tensor]:
    """A client's weights as its last training left them."""
    stored = load_file(run.path / "clients" / f"{client}.safetensors")
    return {name.split("/", 2)[2]: tensor for name, tensor in stored.items() if name.startswith("model/")}


def _none(*_: object) -> None:
    """No global model."""


def initial(run: Any) -> Split:
    return assemble(make_options(run.options), Path("unused")).context.model


def test_gt32_prototype_terms(make_at: Callable[..., At]) -> None:
    """y = 0: clst 0, sep .10, masked L1 2; .8 x 0 - .08 x .1 + 1e-4 x 2 = -.0078."""
    base = Split(
        {"maps": nn.Conv2d(2, 2, 1), "pool": nn.Flatten(), "fc": nn.Linear(1, 2)}, cut="pool", dim=1, classes=2
    )
    made = with_prototypes(base, per_class=2, dim=2, size=1, similarity="linear")
    vectors = torch.tensor([[0.2, 0.1], [1.0, 1.0], [0.5, 0.5], [0.0, 1.0]], dtype=torch.float64).view(4, 2, 1, 1)
    prototypes_of(made).vectors.data = vectors
    patches = {**made.stages(), "maps": nn.Identity(), "addon": nn.Sequential(nn.Identity())}
    net = Net(Split(patches, cut=made.cut, dim=made.dim, classes=2).double())
    z = torch.tensor([[[[0.2, 0.8], [0.5, 1.0]], [[0.1, 0.4], [0.9, 0.0]]]], dtype=torch.float64)
    method = FedPrototypical(per_class=2, prototype_dim=2)
    down = SharedModel(net.pick(prototype_layer))
    terms = method.loss(net, z, torch.tensor([0]), make_at(down=down))
    assert terms["ce"].item() == pytest.approx(0.620957, abs=1e-5)
    assert terms["clst"].item() == pytest.approx(0, abs=1e-5)
    assert terms["sep"].item() == pytest.approx(-0.08 * 0.10, abs=1e-5)
    assert terms["l1"].item() == pytest.approx(2e-4, abs=1e-8)
    assert sum(terms[name].item() for name in ("clst", "sep", "l1")) == pytest.approx(-0.0078, abs=1e-5)
    assert terms["prox_phi"].item() == 0
    other = method.loss(net, z, torch.tensor([1]), make_at(down=down))
    assert other["clst"].item() == pytest.approx(0.8 * 0.10, abs=1e-5)
    assert other["sep"].item() == pytest.approx(0, abs=1e-5)


def test_cluster_and_separation_take_the_nearest_of_the_chosen_prototypes() -> None:
    d = torch.tensor([[3.0, 1.0, 2.0, 0.5], [0.1, 0.2, 4.0, 5.0]])
    labels = torch.tensor([0, 0, 1, 1])
    own = labels == torch.tensor([1, 0])[:, None]
    assert nearest(d, own).item() == pytest.approx((0.5 + 0.1) / 2)
    assert nearest(d, ~own).item() == pytest.approx((1.0 + 4.0) / 2)


def test_masked_distances_have_finite_gradients() -> None:
    d = torch.rand(3, 4, requires_grad=True)
    own = torch.tensor([0, 0, 1, 1]) == torch.tensor([1, 0, 0])[:, None]
    nearest(d, own).backward()
    assert d.grad is not None
    assert d.grad.isfinite().all()
    assert (d.grad[~own] == 0).all()


def test_l1_spares_the_own_class(make_at: Callable[..., At]) -> None:
    method = FedAdapterProto(per_class=2, prototype_dim=4)
    net = net_of(method, make_at())
    at = make_at(down=SharedModel(net.pick(method.shares)))
    l1 = method.loss(net, torch.randn(4, 3, 32, 32), torch.tensor([0, 1, 0, 1]), at)["l1"]
    (gradient,) = torch.autograd.grad(l1, [net.params(prototype_layer)["last.weight"]])
    torch.testing.assert_close(gradient, -1e-4 * torch.tensor([[0.0, 0, 1, 1], [1, 1, 0, 0]]))


@pytest.mark.parametrize(
    ("rule", "expected"), [("size", 4.0), ("mean", 3.0), ("steps_size", 4.5625), ("steps", (7 + 5 * 19) / 26)]
)
def test_gt31_weights_of_the_adapters(
    rule: Any, expected: float, make_at: Callable[..., At], samples_of: Callable[..., Any]
) -> None:
    """theta = [1, 5], n = [100, 300], steps 7 and 19; the prototype layer always goes by samples."""
    method = FedAdapterProto(adapter_agg=rule, per_class=1, prototype_dim=2)
    clients = {"a": 100, "b": 300}
    net = net_of(method, make_at())
    server = method.server_state(net, make_at())
    tally = Tally()
    for client, value, steps in (("a", 1.0, 7), ("b", 5.0, 19)):
        with torch.no_grad():
            for param in net.params(method.shares).values():
                param.fill_(value)
        at = make_at(clients=clients, client=client, taken=steps)
        tally.add(client, method.upload(net, samples_of([], []), at)[0])
    after = method.aggregate(server, tally.total(), make_at(clients=clients)).shared.weights
    assert after.params.keys() == server.shared.weights.params.keys()
    of_adapters = adapters.names(net.model)
    for name, tensor in after.params.items():
        torch.testing.assert_close(tensor, torch.full_like(tensor, expected if name in of_adapters else 4.0))


def test_clients_without_a_step_leave_the_adapters_as_they_were(
    make_at: Callable[..., At], samples_of: Callable[..., Any]
) -> None:
    method = FedAdapterProto(adapter_agg="steps", per_class=1, prototype_dim=2)
    net = net_of(method, make_at())
    server = method.server_state(net, make_at())
    tally = Tally()
    tally.add("a", method.upload(net, samples_of([], []), make_at(taken=0))[0])
    after = method.aggregate(server, tally.total(), make_at())
    torch.testing.assert_close(after.shared.weights.params, server.shared.weights.params, rtol=0, atol=0)


def test_proximal_terms_have_their_own_weights_and_start_after_round_0(make_at: Callable[..., At]) -> None:
    method = FedAdapterProto(mu1=0.01, mu2=0.04, per_class=1, prototype_dim=2)
    net = net_of(method, make_at())
    reference = net.pick(method.shares)
    for name in ("adapter1.up.bias", "prototypes.vectors"):
        reference.params[name].view(-1)[0] += 2.0
    x, y = torch.randn(4, 3, 32, 32), torch.tensor([0, 1, 0, 1])
    terms = method.loss(net, x, y, make_at(down=SharedModel(reference), round=1))
    assert terms["prox_alpha"].item() == pytest.approx(0.01 / 2 * 4, abs=1e-6)
    assert terms["prox_phi"].item() == pytest.approx(0.04 / 2 * 4, abs=1e-6)
    first = method.loss(net, x, y, make_at(down=SharedModel(reference), round=0))
    assert first["prox_alpha"].item() == first["prox_phi"].item() == 0


def test_payloads_of_resnet50(make_at: Callable[..., At]) -> None:
    for method, expected in ((FedPrototypical(), 1_316_884), (FedAdapterProto(), 2_017_284)):
        net = net_of(method, make_at(), "resnet50", {"stem": "standard"})
        sent = method.broadcast(method.server_state(net, make_at()), make_at()).weights
        assert sum(tensor.numel() for tensor in sent.params.values()) == expected
        assert not sent.stats


def test_kind_follows_from_what_is_loaded_and_trained() -> None:
    assert FedPrototypical().kind == FedAdapterProto().kind == "global"
    assert FedAdapterProto(share="prototypes_only").kind == "both"
    assert FedAdapterProto(load_global=False).kind == "personal"


@pytest.mark.parametrize("name", ["fedprototypical", "fedadapterproto"])
def test_run_moves_nothing_of_the_backbone(name: str, data: str, tiny_run: Callable[..., Any]) -> None:
    run = tiny_run(name, data, set=SMALL, **TINY)
    before = initial(run)
    start = Net(before).pick().tensors()
    trained = prototype_layer.names(before) | adapters.names(before)
    final = load_file(run.path / "model.safetensors")
    assert final.keys() == start.keys()
    for weights in (final, *(client_model(run, client) for client in CLIENTS)):
        changed = {key for key in start if not torch.equal(weights[key], start[key])}
        assert changed == trained  # running statistics among what stays
    accuracy = run.rounds[-1]["accuracy"]
    assert accuracy["personal"]["a-0"] == accuracy["global"]["a"]
    floats = sum(start[key].numel() for key in trained)
    assert run.rounds[0]["bytes"]["up"]["weights"] == run.rounds[0]["bytes"]["down"]["weights"] == 3 * 4 * floats


def test_personal_and_global_view_agree_when_all_is_loaded(
    data: str, tiny_run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`kind` lets the evaluation skip the clients; without the short cut they must score the same."""
    quick = tiny_run("fedadapterproto", data, set={**SMALL, "start": "uniform"}, **TINY)
    monkeypatch.setattr(FedAdapterProto, "kind", "both")
    monkeypatch.setattr(FedAdapterProto, "global_weights", _none)
    slow = tiny_run("fedadapterproto", data, set={**SMALL, "start": "uniform"}, **TINY)
    assert [r["accuracy"]["personal"] for r in quick.rounds] == [r["accuracy"]["personal"] for r in slow.rounds]


@pytest.mark.parametrize("name", ["fedprototypical", "fedadapterproto"])
def test_one_client_is_a_fixed_point_of_aggregation(name: str, data: str, tiny_run: Callable[..., Any]) -> None:
    run = tiny_run(name, data, set=SMALL, domains="b", **TINY)
    torch.testing.assert_close(load_file(run.path / "model.safetensors"), client_model(run, "b-0"), rtol=0, atol=0)


def test_sharing_prototypes_only_keeps_the_rest_private(data: str, tiny_run: Callable[..., Any]) -> None:
    run = tiny_run("fedadapterproto", data, set={**SMALL, "share": "prototypes_only"}, **TINY)
    sent = load_file(run.path / "broadcast.safetensors")
    assert {key.split("/")[-1].split(".")[0] for key in sent} == {
        *(f"adapter{level}" for level in (1, 2, 3, 4)),
        "prototypes",
    }
    assert run.rounds[-1]["accuracy"]["global"] is None
    assert run.rounds[1]["loss_parts"]["prox_phi"] > 0
    lasts = [client_model(run, client)["last.weight"] for client in CLIENTS]
    assert not torch.equal(lasts[0], lasts[1])


def test_authors_preset_keeps_own_weights(data: str, tiny_run: Callable[..., Any]) -> None:
    options = {**TINY, "optimizer": "adam", "lr": 1e-3}
    pulled = tiny_run("fedadapterproto", data, set=SMALL, preset="authors", **options)
    free = tiny_run("fedadapterproto", data, set={**SMALL, "mu1": 0, "mu2": 0}, preset="authors", **options)
    alone = tiny_run(
        "fedadapterproto", data, set={**SMALL, "mu1": 0, "mu2": 0}, preset="authors", domains="b", **options
    )
    assert pulled.config["method"]["kind"] == "personal"
    assert pulled.rounds[-1]["accuracy"]["global"] is None
    mine, theirs, other = client_model(free, "b-0"), client_model(alone, "b-0"), client_model(pulled, "b-0")
    assert all(torch.equal(mine[key], theirs[key]) for key in mine)
    assert not all(torch.equal(mine[key], other[key]) for key in mine)


@pytest.mark.parametrize(
    "settings",
    [
        {"per_class": 3},
        {"prototype_dim": 4},
        {"prototype_size": 2},
        {"similarity": "log"},
        {"lambda_clst": 0},
        {"lambda_sep": 0},
        {"l1": 0.01},
        {"mu1": 1},
        {"mu2": 1},
        {"beta": 0.01},
        {"reduction": 2},
        {"adapter_kernel": 3},
        {"adapter_init": "kaiming"},
        {"adapter_agg": "mean"},
        {"adapter_agg": "steps_size"},
        {"load_global": "off"},
        {"weighting": "uniform"},
        {"start": "uniform"},
    ],
)
def test_knobs_change_the_run(
    settings: dict[str, object], make_data: Callable[..., str], tiny_run: Callable[..., Any]
) -> None:
    data = make_data("ab", classes=2, size=16, train={"a": 8, "b": 12}, test=2)
    options = {**TINY, "batch": 4}
    plain = tiny_run("fedadapterproto", data, set=SMALL, **options)
    other = tiny_run("fedadapterproto", data, set={**SMALL, **settings}, **options)
    assert plain.rounds[1]["loss_parts"] != other.rounds[1]["loss_parts"]


def test_training_lowers_the_loss(data: str, tiny_run: Callable[..., Any]) -> None:
    run = tiny_run("fedadapterproto", data, set=SMALL, **{**TINY, "rounds": 6, "optimizer": "adam", "lr": 5e-3})
    assert run.rounds[-1]["loss_parts"]["ce"] < run.rounds[0]["loss_parts"]["ce"]


def test_the_trained_model_can_be_projected(data: str, tiny_run: Callable[..., Any]) -> None:
    run = tiny_run("fedprototypical", data, set=SMALL, **TINY)
    net = Net(run.model())
    context = assemble(make_options(run.options), Path("unused")).context
    samples = context.samples("a-0")
    found = project(net, samples.batches())
    assert torch.equal(samples.y[found.image], prototypes_of(net.model).labels)


def test_prototypes_too_large_for_the_images_are_refused(data: str, tiny_run: Callable[..., Any]) -> None:
    with pytest.raises(UserError, match="prototype_size"):
        tiny_run("fedprototypical", data, set={**SMALL, "prototype_size": 3}, **TINY)


@pytest.mark.parametrize("name", ["fedprototypical", "fedadapterproto"])
def test_its_own_defaults_learn_more_than_chance(name: str, make_data: Callable[..., str], tiny_run: Any) -> None:
    """Four classes, a backbone of random weights, four rounds."""
    data = make_data(classes=4, size=16, train=48, test=24)
    run = tiny_run(name, data, model="resnet10", rounds=4, batch=8, set={"model.width": 8, "prototype_dim": 32})
    assert (run.options["optimizer"], run.options["lr"]) == ("adam", 1e-3)
    assert run.config["method"]["run_defaults"] == {"optimizer": "adam", "lr": 1e-3}
    assert run.summary["accuracy_final"]["global"]["average"] > 0.8


def test_class_means_of_patches_travel_once(data: str, tiny_run: Callable[..., Any]) -> None:
    run = tiny_run("fedprototypical", data, set=SMALL, **TINY)
    first, second = (record["bytes"]["up"] for record in run.rounds)
    assert first["prototypes"] == 3 * 2 * 32 * 4  # clients x classes x channels of the last stage
    assert second["prototypes"] == 0


@pytest.mark.parametrize(
    "more", [{"preset": "authors"}, {"guard": "unit=client,clip=1,noise=1"}, {"set": {"start": "uniform"}}]
)
def test_no_class_means_where_they_cannot_be_used(more: dict[str, Any], data: str, tiny_run: Any) -> None:
    settings = {**SMALL, **more.get("set", {}), "model.norm": "group"}
    run = tiny_run("fedadapterproto", data, **{**TINY, **more, "rounds": 1, "set": settings})
    assert not run.config["method"]["starts_from_means"]
    assert run.rounds[0]["bytes"]["up"]["prototypes"] == 0

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from protofed.errors import UserError
from protofed.method import At
from protofed.methods.fedadapter import FedAdapter, FedAdapterNoProx, adapters
from protofed.methods.fedadapterproto import FedAdapterProto
from protofed.methods.fedavg import ModelUpload, SharedModel
from protofed.models import Split, build_model, everything, head
from protofed.models.net import Net
from protofed.records import Weights
from protofed.records.tally import Tally
from protofed.runs.assembly import assemble
from protofed.runs.options import make_options
from protofed.verbs import joined

TINY: dict[str, Any] = {"model": "resnet10", "optimizer": "sgd", "lr": 0.05, "rounds": 2}
WIDTH = {"model.width": 4}
HEAD = {"fc.weight", "fc.bias"}


@pytest.fixture
def data(make_data: Callable[..., str]) -> str:
    return make_data(classes=2, size=16, train=16, test=8)


def net_of(method: FedAdapter, at: At, classes: int = 2) -> Net:
    torch.manual_seed(0)
    base = build_model("resnet10", (1, 16, 16), classes, {"width": 4})
    return Net(method.build(base, at))


def client_model(run: Any, client: str) -> dict[str, torch.Tensor]:
    """A client's weights as its last training left them."""
    stored = load_file(run.path / "clients" / f"{client}.safetensors")
    return {name.split("/", 2)[2]: tensor for name, tensor in stored.items() if name.startswith("model/")}


def initial(run: Any) -> Split:
    return assemble(make_options(run.options), Path("unused")).context.model


def test_gt33_proximal_term_and_squared_norm(make_at: Callable[..., At]) -> None:
    """alpha = [1, 2], alpha_g = [0, 1], mu = .01: .01; beta = 1e-5: 5e-5."""
    method = FedAdapter()
    net = net_of(method, make_at())
    with torch.no_grad():
        for param in net.params(method.shares).values():
            param.zero_()
        bias = net.params(adapters)["adapter1.down.bias"]
        weight = net.params(adapters)["adapter1.up.bias"]
        bias[0], weight[0] = 1.0, 2.0
    reference = net.pick(method.shares)
    reference.params["adapter1.down.bias"][0] = 0.0
    reference.params["adapter1.up.bias"][0] = 1.0
    images, labels = torch.zeros(2, 1, 16, 16), torch.tensor([0, 1])
    terms = method.loss(net, images, labels, make_at(down=SharedModel(reference), round=1))
    assert terms["prox"].item() == pytest.approx(0.01, abs=1e-5)
    assert terms["adapter"].item() == pytest.approx(5e-5, abs=1e-9)
    assert method.loss(net, images, labels, make_at(down=SharedModel(reference), round=0))["prox"].item() == 0


def test_adapters_and_head_of_resnet50_travel_and_nothing_else(make_at: Callable[..., At]) -> None:
    method = FedAdapter()
    net = Net(method.build(build_model("resnet50", (3, 64, 64), 2), make_at()))
    server = method.server_state(net, make_at())
    sent = method.broadcast(server, make_at()).weights
    assert sum(tensor.numel() for tensor in sent.params.values()) == 700_400 + 4_098
    assert not sent.stats
    complete = method.global_weights(server)
    assert complete is not None
    assert {name: tensor.shape for name, tensor in complete.tensors().items()} == {
        name: tensor.shape for name, tensor in net.pick(everything).tensors().items()
    }


def test_server_takes_the_mean_by_samples(make_at: Callable[..., At], samples_of: Callable[..., Any]) -> None:
    method = FedAdapter()
    clients = {"a": 100, "b": 300}
    net = net_of(method, make_at())
    server = method.server_state(net, make_at())
    tally = Tally()
    for client, value in (("a", 1.0), ("b", 5.0)):
        with torch.no_grad():
            for param in net.params(method.shares).values():
                param.fill_(value)
        upload, _ = method.upload(net, samples_of([], []), make_at(clients=clients, client=client))
        assert isinstance(upload, ModelUpload)
        tally.add(client, upload)
    after = method.aggregate(server, tally.total(), make_at(clients=clients))
    assert all((tensor == 4.0).all() for tensor in after.shared.weights.params.values())
    assert after.rest is server.rest


def test_kind_and_what_is_loaded() -> None:
    assert FedAdapter().kind == "global"
    assert FedAdapter(load_global=False).kind == "personal"
    assert FedAdapter().loads == adapters + head


def test_run_trains_adapters_and_head_only(data: str, tiny_run: Callable[..., Any]) -> None:
    run = tiny_run("fedadapter", data, set=WIDTH, **TINY)
    before = initial(run)
    start = Net(before).pick().tensors()
    trained = adapters.names(before) | HEAD
    final = load_file(run.path / "model.safetensors")
    assert final.keys() == start.keys()
    for weights in (final, *(client_model(run, client) for client in ("a-0", "b-0", "c-0"))):
        changed = {name for name in start if not torch.equal(weights[name], start[name])}
        assert changed == trained  # running statistics among what stays
    assert run.config["method"]["kind"] == "global"
    assert run.rounds[-1]["accuracy"]["global"] is not None
    assert run.rounds[0]["loss_parts"]["prox"] == 0
    assert run.rounds[1]["loss_parts"]["prox"] > 0
    floats = sum(start[name].numel() for name in trained)
    assert run.rounds[0]["bytes"]["up"]["weights"] == run.rounds[0]["bytes"]["down"]["weights"] == 3 * 4 * floats
    torch.testing.assert_close(Net(run.model()).pick().tensors(), final, rtol=0, atol=0)


def test_noprox_is_mu_zero(data: str, tiny_run: Callable[..., Any], same_results: Callable[..., None]) -> None:
    assert FedAdapterNoProx().mu == 0
    pulled = tiny_run("fedadapter", data, set=WIDTH, **TINY)
    free = tiny_run("fedadapter_noprox", data, set=WIDTH, **TINY)
    same_results(tiny_run("fedadapter", data, set={**WIDTH, "mu": 0}, **TINY), free)
    assert pulled.rounds[0]["loss_parts"]["ce"] == free.rounds[0]["loss_parts"]["ce"]
    one, other = (load_file(run.path / "model.safetensors") for run in (pulled, free))
    assert not torch.equal(one["fc.weight"], other["fc.weight"])


def test_without_global_weights_and_pull_training_is_local(data: str, tiny_run: Callable[..., Any]) -> None:
    together = tiny_run("fedadapter_noprox", data, set={**WIDTH, "load_global": "off"}, **TINY)
    alone = tiny_run("fedadapter_noprox", data, set={**WIDTH, "load_global": "off"}, domains="a", **TINY)
    assert together.rounds[-1]["accuracy"]["global"] is None
    assert not (together.path / "model.safetensors").exists()
    mine, theirs = client_model(together, "a-0"), client_model(alone, "a-0")
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_one_client_is_a_fixed_point_of_aggregation(data: str, tiny_run: Callable[..., Any]) -> None:
    run = tiny_run("fedadapter", data, set=WIDTH, domains="a", **TINY)
    torch.testing.assert_close(load_file(run.path / "model.safetensors"), client_model(run, "a-0"), rtol=0, atol=0)


@pytest.mark.parametrize(
    "settings",
    [{"reduction": 2}, {"adapter_kernel": 3}, {"adapter_init": "kaiming"}, {"beta": 0.1}, {"weighting": "uniform"}],
)
def test_knobs_change_the_run(settings: dict[str, object], make_data: Callable[..., str], tiny_run: Any) -> None:
    data = make_data("ab", classes=2, size=16, train={"a": 8, "b": 12}, test=2)
    plain = tiny_run("fedadapter", data, set=WIDTH, **TINY)
    other = tiny_run("fedadapter", data, set={**WIDTH, **settings}, **TINY)
    assert plain.rounds[1]["loss_parts"] != other.rounds[1]["loss_parts"]


def test_authors_preset_and_double_precision(data: str, tiny_run: Callable[..., Any]) -> None:
    run = tiny_run("fedadapter", data, set=WIDTH, preset="authors", dtype="float64", **{**TINY, "optimizer": "adam"})
    assert run.config["method"]["kind"] == "personal"
    assert client_model(run, "a-0")["adapter1.up.weight"].dtype == torch.float64


def test_a_model_without_stages_is_refused(tiny_run: Callable[..., Any]) -> None:
    with pytest.raises(UserError, match="resnet18"):
        tiny_run("fedadapter")


def test_the_joined_model_holds_every_tensor_once() -> None:
    one = Weights({"a": torch.ones(1)}, {"m": torch.zeros(1)})
    other = Weights({"b": torch.ones(2)}, {})
    both = joined(one, other)
    assert list(both.params) == ["a", "b"]
    assert list(both.stats) == ["m"]


def test_freezing_can_be_left_out(data: str, tiny_run: Callable[..., Any]) -> None:
    """C3: a client trains its own backbone, or lets its statistics drift; neither travels."""
    moved = {}
    for name, settings in {
        "frozen": {},
        "drifts": {"freeze_bn": False},
        "trained": {"freeze": False},
    }.items():
        run = tiny_run("fedadapter", data, set={**WIDTH, **settings}, **TINY)
        start = Net(initial(run)).pick().tensors()
        client = client_model(run, "a-0")
        moved[name] = {key for key in start if not torch.equal(client[key], start[key])}
        sent = {key.split("/")[-1] for key in load_file(run.path / "broadcast.safetensors")}
        assert not any(key.startswith(("stem", "layer")) for key in sent)
        assert run.config["method"]["kind"] == ("global" if name == "frozen" else "both")
    assert not any(key.startswith(("stem", "layer")) for key in moved["frozen"])
    drifted = moved["drifts"] - moved["frozen"]
    assert {key.rpartition(".")[2] for key in drifted} == {"running_mean", "running_var"}
    assert {"stem.conv1.weight", "stem.bn1.weight", "stem.bn1.running_mean"} <= moved["trained"]


def test_the_authors_train_their_backbones() -> None:
    for method in (FedAdapter, FedAdapterProto):
        assert method(**method.presets["authors"]).steps[0].trains == everything  # type: ignore[arg-type]

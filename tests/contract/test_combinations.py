"""Options that must work with every method they make sense for: ensembles, plans, mixed architectures, balance."""

from pathlib import Path

import numpy as np
import pytest
import torch

from protofed import UserError
from protofed.clients import ClientSide, GlobalModel, Predict, Predicted, Score
from protofed.federation.evaluation import Evaluator, Member
from protofed.inference.evaluating import evaluate
from protofed.records import Bytes, Message, decode, encode
from protofed.registry import find_method, method_names
from protofed.runs.assembly import assemble
from protofed.runs.options import make_options

NEEDS_RESNET = {"fedadapter", "fedadapter_noprox", "fedadapterproto", "fedprototypical"}
GLOBAL = [name for name in method_names() if find_method(name)().kind == "global"]


@pytest.mark.parametrize("method", GLOBAL)
def test_every_global_method_can_end_in_an_ensemble(method, make_data, tiny_run):
    data = make_data(["a", "b"], train=16, test=8)
    model = {"model": "resnet10", "set": {"model.width": 2}} if method in NEEDS_RESNET else {"model": "mlp"}
    if method == "fedmp_fewshot":
        model["set"] = {"plan": "1,2"}
    run = tiny_run(method, data, plan="1,2", ensemble=True, **model)
    last = run.rounds[-1]["accuracy"]["global"]
    assert run.summary["accuracy"]["global"] == last, "the final model counts, not a mean over rounds"
    assert 0 <= last["average"] <= 1


def test_an_ensemble_is_the_mean_of_its_members_probabilities(make_data, tiny_run):
    run = tiny_run("fedavg", make_data(["a", "b"], train=16, test=8), rounds=2, ensemble=True, model="mlp")
    parts = assemble(make_options(run.options), run.path / "clients")
    side = ClientSide(parts.prepared)
    mean = 0
    for client in ("a-0", "b-0"):
        blob = (run.path / "clients" / f"{client}.safetensors").read_bytes()
        state = decode(blob, parts.prepared.templates.clients[0], client)
        package = encode(GlobalModel(state.model, parts.prepared.templates.down), client)
        mean = mean + side.perform(Predict(1, "a", client), package).probabilities / 2
    correct = (mean.argmax(1) == parts.context.dataset.domains["a"].test.y.numpy()).mean()
    assert run.rounds[-1]["accuracy"]["global"]["a"] == pytest.approx(correct)


def test_an_ensemble_is_no_vote(make_data):
    """GT-43: the mean softmax is [.5333, .4667], class 0, where two of three members say 1."""
    data = make_data(["a"], classes=2, train=8, test=1)  # the one test image is of class 0
    context = assemble(make_options({"method": "fedavg", "data": data, "model": "mlp"}), Path("unused")).context
    softmax = {"first": [0.9, 0.1], "second": [0.4, 0.6], "third": [0.3, 0.7]}

    class Given:
        """Members that predict what is given."""

        def perform(self, jobs):
            for job, _ in jobs:
                yield job, Predicted(np.array([softmax[job.member]])) if isinstance(job, Predict) else Score(0, 1)

    nothing = Message(b"", Bytes())
    members = [Member(client, 1 / 3, nothing) for client in softmax]
    accuracy = Evaluator(context, Given()).evaluate(0, None, lambda _client: nothing, members)
    assert accuracy["global"]["a"] == 1.0


@pytest.mark.parametrize("method", ["fedproto", "conffedproto"])
def test_prototype_methods_train_different_architectures(method, make_data, tiny_run):
    data = make_data(["a", "b", "c"], train=24, test=8, size=16)
    run = tiny_run(method, data, rounds=2, model="lenet5,cnn,mlp", set={"model.hidden": 200})
    counts = run.config["model"]["parameters"]
    assert len(set(counts)) == 3
    assert run.config["model"]["dim"] == 120, "the shortest features; longer ones are projected"
    assert run.summary["accuracy"]["personal"]["average"] > 0


@pytest.mark.parametrize("method", ["fedavg", "i2pfl", "fedbn"])
def test_methods_that_exchange_weights_refuse_different_architectures(method, make_data, tiny_run):
    with pytest.raises(UserError, match="exchanges weights, so all clients need the same architecture"):
        tiny_run(method, make_data(size=16), model="lenet5,cnn")


def test_balanced_sampling_shows_rare_classes_as_often(make_data):
    data = make_data(["a"], classes=2, labels={"a": [0] * 90 + [1] * 10})
    options = make_options({"method": "fedavg", "data": data, "model": "mlp", "balanced": True})
    samples = assemble(options, Path("unused")).context.samples("a-0")
    generator = torch.Generator().manual_seed(0)
    drawn = torch.cat([y for _ in range(20) for _, y in samples.epoch(32, generator, generator)])
    assert len(drawn) == 20 * 100
    assert 0.45 < drawn.float().mean() < 0.55


def test_the_upper_bound_pools_the_data_and_sends_nothing(make_data, tiny_run):
    run = tiny_run("centralized", make_data(["a", "b"]), rounds=2, model="mlp")
    assert list(run.config["partition"]["clients"]) == ["pool-0"]
    assert run.config["partition"]["clients"]["pool-0"]["train"] == 48
    assert run.summary["bytes"]["up"]["total"] == run.summary["bytes"]["down"]["total"] == 0
    assert run.summary["accuracy"]["personal"] is None


def test_the_round_that_validates_best_is_reported(make_data, tiny_run):
    run = tiny_run("fedavg", make_data(), rounds=3, model="mlp", set={"data.validation": 0.25})
    best = max(run.rounds, key=lambda record: record["validation"])
    assert run.summary["accuracy_best_validation"] == best["accuracy"]
    assert tiny_run("fedavg", make_data(), rounds=1, model="mlp").summary["accuracy_best_validation"] is None


def test_a_frozen_random_backbone_is_warned_of(make_data, tiny_run):
    run = tiny_run("fedadapter", make_data(), rounds=1, model="resnet10", set={"model.width": 2})
    assert any("the rest is random" in warning for warning in run.config["warnings"])


def test_a_run_that_ends_in_an_ensemble_is_evaluated_as_one(make_data, tiny_run):
    data = make_data(["a", "b"], train=40, test=80, absent={"a": [0], "b": [3]})
    run = tiny_run("fedavg", data, rounds=1, epochs=6, ensemble=True)
    scores = evaluate(run.path, data, clients=["global"])["models"]["global"]["domains"]
    reported = run.rounds[-1]["accuracy"]["global"]
    assert scores == pytest.approx({name: reported[name] for name in ("a", "b")})
    mean = tiny_run("fedavg", data, rounds=1, epochs=6).rounds[-1]["accuracy"]["global"]
    assert scores != pytest.approx({name: mean[name] for name in ("a", "b")}), "the mean of the models says otherwise"

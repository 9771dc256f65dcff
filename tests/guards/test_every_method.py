"""Guards method by method: what did not change passes as it is, a budget gives an epsilon, or there is a refusal."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from protofed.errors import UserError
from protofed.guards import privatise, sensitivity_of
from protofed.records import ClassTable, Weights, parts_of
from protofed.registry import find_method, method_names
from protofed.runs.assembly import Assembly, assemble
from protofed.runs.description import describe_run
from protofed.runs.options import make_options

pytest.importorskip("opacus")

REFUSED = {
    "centralized": "sends nothing",
    "copa": "fc.bias, which is not in the broadcast",
    "elastic": "also sends omega",
    "fedbn": "bn1.bias, which is not in the broadcast",
    "fedga": "also sends",
    "fedmp": "also sends U",
    "fedmp_fewshot": "also sends U",
    "fednova": "also sends steps",
    "fedplvm": "also sends C",
    "prototune": "not training",
}
SETTINGS = {"fedbn": {"global_bn": "mean"}}


def assembled(method: str, data: str, guard: str = "unit=client,clip=1,noise=1e-9") -> Assembly:
    options: dict[str, Any] = {
        "method": method,
        "data": data,
        "model": "resnet10",
        "engine": "loop",
        "rounds": 2,
        "guard": guard,
        "set": {"model.width": 4, **SETTINGS.get(method, {})},
    }
    return assemble(make_options(options), Path("unused"))


@pytest.mark.parametrize("method", [name for name in method_names() if name not in REFUSED])
def test_what_did_not_change_passes_as_it_is(method: str, tiny_data: str) -> None:
    parts = assembled(method, tiny_data)
    templates, context = parts.prepared.templates, parts.context
    at = replace(context.at(0, context.partition.clients[0]), down=templates.down)
    known = sensitivity_of(context.method, context.guard, at)
    private = parts_of(privatise(context.guard, templates.upload, at, known))
    for name, item in parts_of(templates.upload).items():
        if isinstance(item.value, ClassTable):
            continue  # rows are bounded, not their changes
        assert isinstance(item.value, Weights)
        if name in templates.upload.changes:
            assert sum(tensor.pow(2).sum() for tensor in private[name].value.params.values()) < 1 + 1e-4
            torch.testing.assert_close(private[name].value.stats, item.value.stats, atol=1e-5, rtol=0)
        else:
            torch.testing.assert_close(private[name].value.tensors(), item.value.tensors(), atol=1e-5, rtol=0)


@pytest.mark.parametrize(("method", "reason"), REFUSED.items())
def test_what_cannot_be_bounded_is_refused(method: str, reason: str, tiny_data: str) -> None:
    with pytest.raises(UserError, match=reason):
        assembled(method, tiny_data)


@pytest.mark.parametrize("method", [name for name in method_names() if name not in REFUSED])
def test_a_named_epsilon_is_what_a_whole_client_spends(method: str, tiny_data: str) -> None:
    parts = assembled(method, tiny_data, "unit=client,epsilon=5,delta=1e-4")
    planned = describe_run(parts)["privacy"]
    assert 4.9 < planned["epsilon"] <= 5
    assert (planned["unit"], planned["delta"]) == ("client", 1e-4)
    assert 0 < planned["one_round"] <= planned["epsilon"]
    assert parts.context.guard.noise > 0


SEPARABLE = [name for name in method_names() if find_method(name)().separable and name != "centralized"]
ON_STAGES = {"model": "resnet10", "image_size": 32, "set": {"model.width": 4}}
"""Adapters and part prototypes need the stages of a residual network."""


def sample_level(method: str, data: str) -> Assembly:
    chosen: dict[str, Any] = {"method": method, "data": data, "model": "mlp", "engine": "loop", "rounds": 2}
    needs_stages = method.startswith(("fedadapter", "fedprototypical"))
    network = ON_STAGES if needs_stages else {"set": {"model.hidden": 8}}
    return assemble(make_options({**chosen, "guard": "epsilon=3,delta=1e-5,unit=image", **network}), Path("unused"))


@pytest.mark.parametrize("method", SEPARABLE)
def test_a_named_epsilon_is_what_one_sample_spends(method: str, tiny_data: str) -> None:
    planned = describe_run(sample_level(method, tiny_data))["privacy"]
    assert 2.9 < planned["epsilon"] <= 3
    assert planned["unit"] == "sample"


@pytest.mark.parametrize("method", [name for name in method_names() if name not in SEPARABLE])
def test_where_one_sample_cannot_be_bounded_an_epsilon_is_refused_in_one_line(method: str, tiny_data: str) -> None:
    with pytest.raises(UserError) as refusal:
        sample_level(method, tiny_data)
    assert "\n" not in str(refusal.value)

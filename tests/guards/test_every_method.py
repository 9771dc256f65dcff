"""Whole clients are guarded method by method: an upload without a change passes as it is, or it is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from protofed.errors import UserError
from protofed.guards import privatise
from protofed.records import ClassTable, Weights, parts_of
from protofed.registry import method_names
from protofed.runs.assembly import Assembly, assemble
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
}
SETTINGS = {"fedbn": {"global_bn": "mean"}}


def assembled(method: str, data: str) -> Assembly:
    options: dict[str, Any] = {
        "method": method,
        "data": data,
        "model": "resnet10",
        "engine": "loop",
        "guard": "unit=client,clip=1,noise=1e-9",
        "set": {"model.width": 4, **SETTINGS.get(method, {})},
    }
    return assemble(make_options(options), Path("unused"))


@pytest.mark.parametrize("method", [name for name in method_names() if name not in REFUSED])
def test_what_did_not_change_passes_as_it_is(method: str, tiny_data: str) -> None:
    parts = assembled(method, tiny_data)
    templates, context = parts.prepared.templates, parts.context
    at = replace(context.at(0, context.partition.clients[0]), down=templates.down)
    private = parts_of(privatise(context.guard, templates.upload, at))
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

"""Every registered method passes the public checker, and gives the same results on every engine."""

from typing import Any

import pytest

from protofed.registry import find_method, method_names
from protofed.testing import check_method

RESNET: dict[str, Any] = {"model": "resnet10", "model.width": 4}
NEEDS: dict[str, dict[str, Any]] = {
    "fedadapter": {**RESNET, "reduction": 4},
    "fedadapter_noprox": {**RESNET, "reduction": 4},
    "fedadapterproto": {**RESNET, "reduction": 4, "per_class": 2, "prototype_dim": 8},
    "fedprototypical": {**RESNET, "per_class": 2, "prototype_dim": 8},
    "fedmp_fewshot": {"plan": "2,1,1"},
}
"""Models that a method cannot do without, and settings without which it would take long."""

NAMES = [name for name in method_names() if not name.startswith("test_")]


@pytest.mark.parametrize("name", NAMES)
def test_contract(name: str) -> None:
    check_method(find_method(name), **NEEDS.get(name, {}))


@pytest.mark.parametrize("name", NAMES)
def test_workers_equal_the_loop(name: str, tiny_run: Any, same_results: Any) -> None:
    needs = NEEDS.get(name, {})
    settings = {key: value for key, value in needs.items() if key != "model"}
    options: dict[str, Any] = {"model": needs.get("model", "mlp"), "set": settings, "participation": 0.6}
    same_results(tiny_run(name, **options), tiny_run(name, engine="workers", workers=2, **options))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_contract_on_workers(name: str) -> None:
    check_method(find_method(name), engine="workers", **NEEDS.get(name, {}))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name not in NEEDS])
def test_contract_with_batch_normalisation(name: str) -> None:
    check_method(find_method(name), **RESNET)

"""Every registered method passes the public checker, and gives the same results on every engine."""

from typing import Any

import pytest

from protofed.errors import UserError
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
VECTORISED = [name for name in NAMES if not find_method(name).not_vectorised]
TOLERANCE = {"fraug": 1e-6}
"""Where rounding is amplified more than elsewhere."""


@pytest.mark.parametrize("name", NAMES)
def test_contract(name: str) -> None:
    check_method(find_method(name), **NEEDS.get(name, {}))


@pytest.mark.parametrize("name", NAMES)
def test_workers_equal_the_loop(name: str, tiny_run: Any, same_results: Any) -> None:
    needs = NEEDS.get(name, {})
    settings = {key: value for key, value in needs.items() if key != "model"}
    options: dict[str, Any] = {"model": needs.get("model", "mlp"), "set": settings, "participation": 0.6}
    same_results(tiny_run(name, **options), tiny_run(name, engine="workers", workers=2, **options))


@pytest.mark.parametrize("name", VECTORISED)
def test_vmap_equals_the_loop(name: str, make_data: Any, tiny_run: Any, close_results: Any) -> None:
    """In float64, also with trailing batches of several sizes, absent classes and clients that sit a round out."""
    needs = NEEDS.get(name, {})
    options: dict[str, Any] = {
        "data": make_data(absent={"a": [3], "b": [0]}, train={"a": 24, "b": 21, "c": 24}),
        "model": needs.get("model", "mlp"),
        "set": {key: value for key, value in needs.items() if key != "model"},
        "participation": 0.6,
        "dtype": "float64",
    }
    close_results(tiny_run(name, **options), tiny_run(name, engine="vmap", **options), TOLERANCE.get(name, 1e-9))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in VECTORISED if name not in NEEDS])
def test_vmap_equals_the_loop_with_batch_normalisation(name: str, tiny_run: Any, close_results: Any) -> None:
    settings = {"model.width": RESNET["model.width"]}
    options: dict[str, Any] = {"model": RESNET["model"], "set": settings, "dtype": "float64", "epochs": 2}
    close_results(tiny_run(name, **options), tiny_run(name, engine="vmap", **options), 1e-6)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in VECTORISED])
def test_vmap_refuses_the_others_with_the_reason(name: str, tiny_run: Any) -> None:
    with pytest.raises(UserError, match=find_method(name).not_vectorised):
        tiny_run(name, engine="vmap")


@pytest.mark.slow
@pytest.mark.parametrize("name", VECTORISED)
def test_contract_on_vmap(name: str) -> None:
    check_method(find_method(name), engine="vmap", **NEEDS.get(name, {}))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_contract_on_workers(name: str) -> None:
    check_method(find_method(name), engine="workers", **NEEDS.get(name, {}))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name not in NEEDS])
def test_contract_with_batch_normalisation(name: str) -> None:
    check_method(find_method(name), **RESNET)

"""Flower's inside is used in few places, which say with which version they were checked."""

import ast
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

import protofed

SOURCE = Path(protofed.__file__).parent
PUBLIC = ("flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.simulation")
INSIDE = ("deploy/flower.py", "deploy/superlink.py", "deploy/supernode.py", "guards/masking/crypto.py")
ALONE = ("deploy/superlink.py", "deploy/supernode.py")
"""Programs that run without protofed."""


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def test_nobody_else_uses_what_is_not_public() -> None:
    users = {
        str(path.relative_to(SOURCE))
        for path in SOURCE.rglob("*.py")
        if any(module.split(".")[0] == "flwr" and module not in PUBLIC for module in imports(path))
    }
    assert users == set(INSIDE)


@pytest.mark.parametrize("name", INSIDE)
def test_each_says_the_version_it_was_checked_with(name: str) -> None:
    pytest.importorskip("flwr")
    assert f"Flower {version('flwr')}" in (SOURCE / name).read_text()


@pytest.mark.parametrize("name", ALONE)
def test_programs_run_by_file_import_nothing_of_protofed(name: str) -> None:
    assert [module for module in imports(SOURCE / name) if module.split(".")[0] in ("protofed", "torch")] == []

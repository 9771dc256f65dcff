"""Federations for tests: in this process."""

from pathlib import Path

import pytest
from local_sites import Federation

from protofed.engines.flower import prepare_flower
from protofed.testing import toy_data


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    """Nobody yet; toy data for a, b and c lies ready."""
    pytest.importorskip("flwr")
    prepare_flower()
    return Federation(tmp_path, toy_data(tmp_path / "data", ("a", "b", "c")))


@pytest.fixture
def three(federation: Federation) -> Federation:
    """The sites a, b and c."""
    for name in ("a", "b", "c"):
        federation.add(name)
    return federation

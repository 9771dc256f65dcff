"""Benchmarks lie beside the tests, not in the package."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def benchmark(monkeypatch):
    """A benchmark by name; they lie beside the tests, not in the package."""
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: importlib.import_module(f"benchmarks.{name}")

"""From options to results: one run, and comparisons of many."""

from protofed.experiments.compare import Comparison, compare
from protofed.experiments.options import Options
from protofed.experiments.results import Run
from protofed.experiments.run import run

__all__ = ["Comparison", "Options", "Run", "compare", "run"]

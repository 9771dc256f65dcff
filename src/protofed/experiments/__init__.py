"""From options to results: one run, and comparisons of many."""

from protofed.experiments.compare import compare
from protofed.experiments.comparison import Comparison
from protofed.experiments.options import Options
from protofed.experiments.results import Run
from protofed.experiments.run import run
from protofed.experiments.sweep import Sweep, sweep

__all__ = ["Comparison", "Options", "Run", "Sweep", "compare", "run", "sweep"]

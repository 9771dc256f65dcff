"""Many runs: comparisons, sweeps and the papers' tables."""

from protofed.studies.compare import compare
from protofed.studies.comparison import Comparison
from protofed.studies.sweep import sweep
from protofed.studies.sweep_result import Sweep

__all__ = ["Comparison", "Sweep", "compare", "sweep"]

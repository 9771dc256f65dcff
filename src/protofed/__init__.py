"""Federated prototype learning: several sites train one model, or one each, without sharing their images."""

from importlib.metadata import version

from protofed.errors import UserError
from protofed.method import At, Method, Plan, Step, knob
from protofed.models.net import Net
from protofed.records import ClassTable, Each, Mean, Record, Sum, Weights
from protofed.registry import register
from protofed.runs import Run, read_config, run
from protofed.studies import Comparison, Sweep, compare, sweep

__version__ = version("protofed")

__all__ = [
    "At",
    "ClassTable",
    "Comparison",
    "Each",
    "Mean",
    "Method",
    "Net",
    "Plan",
    "Record",
    "Run",
    "Step",
    "Sum",
    "Sweep",
    "UserError",
    "Weights",
    "__version__",
    "compare",
    "knob",
    "read_config",
    "register",
    "run",
    "sweep",
]

"""Federated prototype learning: several sites train one model, or one each, without sharing their images."""

from protofed.errors import UserError
from protofed.method import At, Method, Plan, Step, knob
from protofed.registry import register
from protofed.runs import Run, run
from protofed.studies import Comparison, Sweep, compare, sweep

__all__ = [
    "At",
    "Comparison",
    "Method",
    "Plan",
    "Run",
    "Step",
    "Sweep",
    "UserError",
    "compare",
    "knob",
    "register",
    "run",
    "sweep",
]

"""Federated prototype learning: several sites train one model, or one each, without sharing their images."""

from protofed.errors import UserError
from protofed.experiments import Comparison, Run, Sweep, compare, run, sweep
from protofed.method import At, Method, Plan, Step, knob
from protofed.registry import register

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

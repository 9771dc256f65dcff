"""Where clients run. Every engine performs the same jobs with the same results."""

import os
import sys

from protofed.clients import Setting, Templates
from protofed.engines.flower import FlowerEngine, Recipe
from protofed.engines.grid import prepare_flower
from protofed.engines.loop import LoopEngine
from protofed.engines.workers import WorkersEngine
from protofed.errors import UserError
from protofed.federation.engine import Engine

ENGINES = ("auto", "loop", "workers", "flower")

CAN_FORK = sys.platform == "linux"


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def choose_engine(name: str, workers: int | None, clients: int, device: str) -> tuple[str, int]:
    """The engine and number of processes behind `auto`, or behind what the user asked for."""
    count = min(workers or cores(), clients)
    if name == "loop" or (name == "auto" and (count == 1 or device != "cpu" or not CAN_FORK)):
        return "loop", 1
    if name == "flower":
        prepare_flower()
        if device != "cpu":
            raise UserError(f"engine=flower computes on the CPU; leave out --device {device}, or take another engine")
        return "flower", count
    return "workers", count


def make_engine(name: str, workers: int, setting: Setting, templates: Templates, recipe: Recipe) -> Engine:
    """A running engine; close it when done. `recipe` is for engines whose processes share nothing with this one."""
    if name == "flower":
        return FlowerEngine(recipe, setting.partition.clients, workers)
    return LoopEngine(setting, templates) if name == "loop" else WorkersEngine(setting, templates, workers)

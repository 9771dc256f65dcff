"""Where clients run. Every engine performs the same jobs with the same results."""

import os
import sys

from protofed.clients import Setting, Templates
from protofed.engines.loop import LoopEngine
from protofed.engines.vmap import VmapEngine
from protofed.engines.workers import WorkersEngine
from protofed.federation.engine import Engine

ENGINES = ("auto", "loop", "workers", "vmap")

CAN_FORK = sys.platform == "linux"


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def choose_engine(name: str, workers: int | None, clients: int, device: str) -> tuple[str, int]:
    """The engine and number of processes behind `auto`, or behind what the user asked for."""
    count = min(workers or cores(), clients)
    if name == "loop" or (name == "auto" and (count == 1 or device != "cpu" or not CAN_FORK)):
        return "loop", 1
    return ("vmap", 1) if name == "vmap" else ("workers", count)


def make_engine(name: str, workers: int, setting: Setting, templates: Templates) -> Engine:
    """A running engine; close it when done."""
    if name == "workers":
        return WorkersEngine(setting, templates, workers)
    return VmapEngine(setting, templates) if name == "vmap" else LoopEngine(setting, templates)

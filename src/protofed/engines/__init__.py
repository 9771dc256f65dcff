"""Where clients run. Every engine does the same jobs with the same results: `vmap` to rounding, the others exactly."""

from protofed.clients import Setting, Templates
from protofed.engines.choice import CAN_FORK, Choice, choose_engine, cores
from protofed.engines.flower import FlowerEngine, Recipe
from protofed.engines.loop import LoopEngine
from protofed.engines.vmap import VmapEngine
from protofed.engines.workers import WorkersEngine
from protofed.federation.engine import Engine

ENGINES = ("auto", "loop", "workers", "vmap", "flower")

__all__ = ["CAN_FORK", "ENGINES", "Choice", "choose_engine", "cores", "make_engine"]


def make_engine(choice: Choice, setting: Setting, templates: Templates, recipe: Recipe) -> Engine:
    """A running engine; close it when done. `recipe` is for engines whose processes share nothing with this one."""
    if choice.name == "workers":
        return WorkersEngine(setting, templates, choice.workers)
    if choice.name == "flower":
        return FlowerEngine(recipe, setting.partition.clients, choice.workers)
    return VmapEngine(setting, templates) if choice.name == "vmap" else LoopEngine(setting, templates)

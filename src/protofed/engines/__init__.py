"""Where clients run. Every engine does the same jobs with the same results: `vmap` to rounding, the others exactly."""

from protofed.clients import Prepared
from protofed.engines.choice import EngineChoice, choose_engine
from protofed.engines.flower import FlowerEngine, Recipe
from protofed.engines.loop import LoopEngine
from protofed.engines.vmap import VmapEngine
from protofed.engines.workers import WorkersEngine
from protofed.federation.engine import Engine

ENGINES = ("auto", "loop", "workers", "vmap", "flower")

__all__ = ["ENGINES", "EngineChoice", "choose_engine", "make_engine"]


def make_engine(choice: EngineChoice, prepared: Prepared, recipe: Recipe) -> Engine:
    """A running engine; close it when done. `recipe` is for engines whose processes share nothing with this one."""
    if choice.name == "workers":
        return WorkersEngine(prepared, choice.workers)
    if choice.name == "flower":
        return FlowerEngine(recipe, prepared.context.partition.clients, choice.workers)
    return VmapEngine(prepared) if choice.name == "vmap" else LoopEngine(prepared)

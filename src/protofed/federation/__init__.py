"""The one round loop, what an engine is, evaluation, run folders."""

from protofed.federation.engine import Engine
from protofed.federation.federation import Federation, TooFew, Watch
from protofed.federation.folder import RunFolder, Store

__all__ = ["Engine", "Federation", "RunFolder", "Store", "TooFew", "Watch"]

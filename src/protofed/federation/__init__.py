"""The one round loop, what an engine is, evaluation, run folders."""

from protofed.federation.engine import Engine
from protofed.federation.federation import Federation, Watch
from protofed.federation.folder import RunFolder

__all__ = ["Engine", "Federation", "RunFolder", "Watch"]

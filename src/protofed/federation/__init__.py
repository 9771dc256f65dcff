"""The one round loop, what an engine is, evaluation, run folders."""

from protofed.federation.engine import Engine
from protofed.federation.federation import Diverged, Federation, RoundPolicy, TooFewClients
from protofed.federation.folder import RunFolder, Store

__all__ = ["Diverged", "Engine", "Federation", "RoundPolicy", "RunFolder", "Store", "TooFewClients"]

"""The one round loop, what an engine is, evaluation, run folders."""

from protofed.federation.engine import Engine
from protofed.federation.failures import Diverged, TooFewClients
from protofed.federation.federation import Federation
from protofed.federation.folder import RunFolder, Store
from protofed.federation.policy import RoundPolicy

__all__ = ["Diverged", "Engine", "Federation", "RoundPolicy", "RunFolder", "Store", "TooFewClients"]

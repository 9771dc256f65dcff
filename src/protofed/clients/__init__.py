"""What happens at a client, whatever engine runs it: samples, local training, evaluation, memory."""

from protofed.clients.client import ClientSide
from protofed.clients.jobs import (
    Evaluate,
    Failed,
    Job,
    Predict,
    Predicted,
    Project,
    Projected,
    Result,
    Score,
    Train,
    Trained,
)
from protofed.clients.rehearsal import GlobalModel, Templates, rehearse
from protofed.clients.setting import Setting
from protofed.clients.store import ClientState, ClientStore, Sources, write_atomically

__all__ = [
    "ClientSide",
    "ClientState",
    "ClientStore",
    "Evaluate",
    "Failed",
    "GlobalModel",
    "Job",
    "Predict",
    "Predicted",
    "Project",
    "Projected",
    "Result",
    "Score",
    "Setting",
    "Sources",
    "Templates",
    "Train",
    "Trained",
    "rehearse",
    "write_atomically",
]

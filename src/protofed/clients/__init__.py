"""What happens at a client, whatever engine runs it: samples, local training, evaluation, memory."""

from protofed.clients.client import ClientSide
from protofed.clients.features import FeatureStore
from protofed.clients.frozen import FROZEN, choose_frozen, feature_store
from protofed.clients.jobs import Evaluate, Failed, Job, Predict, Predicted, Result, Score, Train, Trained
from protofed.clients.rehearsal import GlobalModel, Templates, rehearse
from protofed.clients.setting import Setting
from protofed.clients.store import ClientState, ClientStore, plain_name, write_atomically

__all__ = [
    "FROZEN",
    "ClientSide",
    "ClientState",
    "ClientStore",
    "Evaluate",
    "Failed",
    "FeatureStore",
    "GlobalModel",
    "Job",
    "Predict",
    "Predicted",
    "Result",
    "Score",
    "Setting",
    "Templates",
    "Train",
    "Trained",
    "choose_frozen",
    "feature_store",
    "plain_name",
    "rehearse",
    "write_atomically",
]

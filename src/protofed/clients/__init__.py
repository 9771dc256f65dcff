"""What happens at a client, whatever engine runs it: samples, local training, evaluation, memory."""

from protofed.clients.client import ClientSide
from protofed.clients.jobs import Absent, Evaluate, Failed, Job, Predict, Predicted, Result, Score, Train, Trained
from protofed.clients.rehearsal import GlobalModel, Templates, rehearse
from protofed.clients.setting import Setting
from protofed.clients.store import ClientStore, write_atomically
from protofed.clients.wire import decode_job, decode_result, encode_job, encode_result, seal, unseal

__all__ = [
    "Absent",
    "ClientSide",
    "ClientStore",
    "Evaluate",
    "Failed",
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
    "decode_job",
    "decode_result",
    "encode_job",
    "encode_result",
    "rehearse",
    "seal",
    "unseal",
    "write_atomically",
]

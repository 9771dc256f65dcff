"""What happens at a client, whatever engine runs it: samples, local training, evaluation, memory."""

from protofed.clients.client import ClientSide
from protofed.clients.context import RunContext
from protofed.clients.features import FeatureStore
from protofed.clients.frozen import FROZEN, choose_frozen, feature_store
from protofed.clients.jobs import (
    Absent,
    DiskFailed,
    Evaluate,
    Failed,
    Job,
    MaskingCost,
    Predict,
    Predicted,
    Project,
    Projected,
    Result,
    Score,
    Summarise,
    Train,
    Trained,
    TrainedGroup,
    TrainGroup,
)
from protofed.clients.prepared import GlobalModel, Prepared, Templates, prepare
from protofed.clients.store import ClientState, ClientStore, Sources, plain_name
from protofed.clients.wire import (
    decode_job,
    decode_result,
    encode_job,
    encode_result,
    pack,
    refusal_in,
    unpack,
    unpack_answer,
)

__all__ = [
    "FROZEN",
    "Absent",
    "ClientSide",
    "ClientState",
    "ClientStore",
    "DiskFailed",
    "Evaluate",
    "Failed",
    "FeatureStore",
    "GlobalModel",
    "Job",
    "MaskingCost",
    "Predict",
    "Predicted",
    "Prepared",
    "Project",
    "Projected",
    "Result",
    "RunContext",
    "Score",
    "Sources",
    "Summarise",
    "Templates",
    "Train",
    "TrainGroup",
    "Trained",
    "TrainedGroup",
    "choose_frozen",
    "decode_job",
    "decode_result",
    "encode_job",
    "encode_result",
    "feature_store",
    "pack",
    "plain_name",
    "prepare",
    "refusal_in",
    "unpack",
    "unpack_answer",
]

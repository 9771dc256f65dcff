"""Flower's two ends of SecAgg+ in one process: `secaggplus_mod` at the clients, `SecAggPlusWorkflow` at the server.

Between them are a grid that hands messages over and a strategy that keeps the result. Imported only where secure
aggregation is used, since Flower is optional.

Checked with Flower 1.41.0. Beyond its public interface are used: the workflow's and SecAgg+'s record keys (other keys
end in a KeyError), the conversion of a FitRes to records, what the workflow calls of a Grid and a Strategy (a new call
ends in an AttributeError), and TaskIdentity, without which no message can be made. tests/guards/test_secure.py runs it.
"""

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.common import Code, FitIns, FitRes, Parameters, Status, ndarrays_to_parameters, parameters_to_ndarrays
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.compat.common.recorddict_compat import fitres_to_recorddict
from flwr.server.compat.legacy_context import LegacyContext
from flwr.server.workflow import SecAggPlusWorkflow
from flwr.server.workflow.constant import MAIN_CONFIGS_RECORD, MAIN_PARAMS_RECORD
from flwr.server.workflow.constant import Key as WorkflowKey
from flwr.supercore.task_identity import TaskIdentity
from numpy.typing import NDArray

_MODULUS = 2**32
_NOTHING = Parameters(tensors=[], tensor_type="")


def mean_by_secagg(
    vectors: Mapping[int, NDArray[Any] | None], shares: int, threshold: int, largest: float, levels: int
) -> NDArray[Any] | None:
    """The mean of the nodes' vectors, or None where too few nodes answer; a node without a vector drops out."""
    workflow = SecAggPlusWorkflow(
        shares,
        threshold,
        max_weight=1.0,
        clipping_range=largest,
        quantization_range=levels,
        modulus_range=_MODULUS,
    )
    state = RecordDict({MAIN_CONFIGS_RECORD: ConfigRecord({WorkflowKey.CURRENT_ROUND: 1})})
    state[MAIN_PARAMS_RECORD] = ArrayRecord()
    server = _context(0, state)
    # Both have what the workflow calls of a Grid and a Strategy, and nothing of what it does not.
    grid: Any = _InMemoryGrid(vectors)
    strategy: Any = _MeanKeepingStrategy(list(vectors))
    with _as_server():
        workflow(grid, LegacyContext(server, strategy=strategy))
    mean: NDArray[Any] | None = strategy.mean
    return mean


class _InMemoryGrid:
    """Every node runs Flower's client side of SecAgg+ on its vector; one without drops out when it is asked for it."""

    def __init__(self, vectors: Mapping[int, NDArray[Any] | None]) -> None:
        self._vectors = vectors
        self._contexts = {node: _context(node, RecordDict()) for node in vectors}

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        """What the nodes that are still there answer."""
        return [self._answer(message) for message in messages]

    def _answer(self, message: Message) -> Message:
        # The server gives the same content to several nodes, each of which takes out what it has read.
        message = deepcopy(message)
        node = message.metadata.dst_node_id
        stage = message.content.config_records[RECORD_KEY_CONFIGS][Key.STAGE]
        if self._vectors[node] is None and stage == Stage.COLLECT_MASKED_VECTORS:
            return Message(Error(code=0, reason="the client has dropped out"), reply_to=message)
        return secaggplus_mod(message, self._contexts[node], self._fit)

    def _fit(self, message: Message, context: Context) -> Message:
        """Instead of training, which has already happened."""
        vector = self._vectors[context.node_id]
        assert vector is not None
        result = FitRes(Status(Code.OK, ""), ndarrays_to_parameters([vector]), num_examples=1, metrics={})
        return Message(fitres_to_recorddict(result, keep_input=False), reply_to=message)


class _MeanKeepingStrategy:
    """Asks every node, and keeps the mean that comes out of the masks."""

    def __init__(self, nodes: list[int]) -> None:
        self._nodes = nodes
        self.mean: NDArray[Any] | None = None

    def configure_fit(self, server_round: int, parameters: Parameters, client_manager: Any) -> list[tuple[Any, FitIns]]:
        """An empty instruction for every node."""
        return [(SimpleNamespace(node_id=node, cid=str(node)), FitIns(_NOTHING, {})) for node in self._nodes]

    def aggregate_fit(self, server_round: int, results: list[Any], failures: list[Any]) -> tuple[None, dict[str, Any]]:
        """All results hold the same: the aggregate."""
        self.mean = np.asarray(parameters_to_ndarrays(results[0][1].parameters)[0])
        return None, {}


def _context(node: int, state: RecordDict) -> Context:
    return Context(run_id=0, node_id=node, node_config={}, state=state, run_config={})


@contextmanager
def _as_server() -> Iterator[None]:
    """Inside: messages may be made, which Flower allows only to a process with an identity; only errors are logged."""
    logger, level = logging.getLogger("flwr"), logging.getLogger("flwr").level
    before = TaskIdentity._task_id, TaskIdentity._run_id, TaskIdentity._node_id
    TaskIdentity._task_id, TaskIdentity._run_id, TaskIdentity._node_id = 1, 0, 0
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        TaskIdentity._task_id, TaskIdentity._run_id, TaskIdentity._node_id = before
        logger.setLevel(level)

"""Flower from the inside: all that a deployment takes from Flower beyond its public interface, in one place.

Public are `flwr.app`, `flwr.serverapp`, `flwr.clientapp`, `flwr.simulation` and the options of its programs. What is
used here is not, and may change with any release: everything was checked with Flower 1.41.0, the only version that
pyproject.toml allows, and each function says what stops working where Flower changes. Before another version is
allowed, go through this file and the few lines elsewhere that cannot be here: `superlink.py` and `supernode.py`, which
run without protofed, `prepare_flower` in engines/flower.py, and Shamir's shares in guards/masking/crypto.py.
tests/deploy/test_link.py and test_processes.py run all of it for real.
"""

import hashlib
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any, Literal

from protofed.deploy.superlink import SECRET_HEADER
from protofed.deploy.supernode import pull_eagerly
from protofed.engines.flower import envelope_in, to_record_dict

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from flwr.supercore.control import ControlHttpClient as ControlHttpClient
    from flwr.supercore.heartbeat import HeartbeatSender
    from flwr.supercore.runtime import RuntimeHttpClient as RuntimeHttpClient
    from flwr.superlink.grid import HttpGrid

ANSWER_SENT = "Sent successfully"
"""A SuperNode's log line for a reply that has left. Worded otherwise, a site with --once waits a minute to end."""
NOT_ACTIVATED = "Failed to activate SuperNode"
"""Its log line where its key is not registered. Worded otherwise, a stranger gets the log as the reason."""

_ONLINE, _UNREGISTERED = "online", "unregistered"
"""States of a node. If renamed, no site would count as connected, or revoked ones as members."""
_FINISHED = "finished"
"""State of a run. Renamed, the next run would try to stop runs that are over."""

_TAKEN = (409, 412)
"""HTTP's Conflict and Precondition Failed."""
_SKEW_SECONDS = 10.0


class KeyUsedBefore(Exception):
    """A key that was registered before and is not any more."""


# Sites run the protofed that is installed there; nothing that is sent is executed. Flower wants an app all the same.
_APP = """
[build-system]
requires = []
build-backend = "none"

[project]
name = "protofed-federation"
version = "1.0.0"
description = "a name for a run; the code is what the sites have installed"
license = { text = "Apache-2.0" }
dependencies = []

[tool.flwr.app]
publisher = "protofed"

[tool.flwr.app.components]
serverapp = "protofed_federation.app:app"
clientapp = "protofed_federation.app:app"

[tool.flwr.app.config]
"""


@dataclass(frozen=True)
class MemberNode:
    """A member of the federation as the SuperLink knows it."""

    name: str
    node_id: int
    public_key: bytes
    online: bool
    since: str


def public_key_bytes(key: "EllipticCurvePublicKey") -> bytes:
    """A public key as nodes are registered by it. With other bytes no site is let in."""
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    return public_key_to_bytes(key)


# The Control API: who may connect, and which runs there are


@contextmanager
def control_client(address: str, authority: bytes, secret: bytes) -> Iterator["ControlHttpClient"]:
    """A connection to the SuperLink's Control API; a ConnectionError if it does not answer.

    It depends on Flower's HTTP clients, which were gRPC before, and on their interceptors: without ours the secret is
    not sent, and superlink.py refuses every request.
    """
    import httpx
    from flwr.supercore.control import ControlHttpClient

    control = _connect(ControlHttpClient, address, authority, "protofed", _SecretInterceptor(secret))
    try:
        yield control
    except httpx.ConnectError as error:
        raise ConnectionError(address) from error
    finally:
        control.close()


class _SecretInterceptor:
    """Adds the administrator's secret to every request."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def intercept(self, context: Any, call_next: Any) -> Any:
        """Called by Flower's client before it sends."""
        context.request.headers[SECRET_HEADER] = self._secret.decode()
        return call_next(context)


def list_nodes(control: "ControlHttpClient") -> list[MemberNode]:
    """All nodes that are registered. Without it no site counts as connected, and no run begins."""
    from flwr.proto.control_pb2 import ListNodesRequest

    infos = control.ListNodes(ListNodesRequest()).nodes_info
    return [
        MemberNode(info.name, info.node_id, info.public_key, info.status == _ONLINE, info.last_activated_at)
        for info in infos
        if info.status != _UNREGISTERED
    ]


def register_node(control: "ControlHttpClient", name: str, public_key: bytes) -> None:
    """Admit the holder of the private key. Without it no site can connect.

    Flower remembers every key it was ever given, and takes none twice. Told by another status, the server does not
    start where a revoked key was put back.
    """
    import httpx
    from flwr.proto.control_pb2 import RegisterNodeRequest

    try:
        control.RegisterNode(RegisterNodeRequest(public_key=public_key, name=name))
    except httpx.HTTPStatusError as error:
        if error.response.status_code in _TAKEN:
            raise KeyUsedBefore(name) from error
        raise


def unregister_node(control: "ControlHttpClient", node_id: int) -> None:
    """Shut a node out. Without it a revoked key stays valid."""
    from flwr.proto.control_pb2 import UnregisterNodeRequest

    control.UnregisterNode(UnregisterNodeRequest(node_id=node_id))


def start_run(control: "ControlHttpClient") -> None:
    """Start a run of an app that contains nothing, as `flwr run` would. Another form of apps is refused here."""
    from flwr.cli.build import build_fab_from_files
    from flwr.common.serde import fab_to_proto
    from flwr.proto.control_pb2 import StartRunRequest
    from flwr.supercore.fab import Fab

    content, _ = build_fab_from_files({"pyproject.toml": _APP.encode(), "protofed_federation/app.py": b""})
    fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
    response = control.StartRun(StartRunRequest(fab=fab_to_proto(fab)))
    if not response.HasField("run_id"):
        raise RuntimeError("Flower does not start a run")


def stop_runs(control: "ControlHttpClient") -> None:
    """End what an earlier process, killed in the middle of a run, has left behind; else its task may be taken for ours.

    Used are the list of runs and its states.
    """
    from flwr.proto.control_pb2 import ListRunsRequest, StopRunRequest

    for run_id, run in control.ListRuns(ListRunsRequest()).run_dict.items():
        if run.status.status != _FINISHED:
            control.StopRun(StopRunRequest(run_id=run_id))


def clock_skew(address: str, authority: bytes) -> float | None:
    """Seconds by which this machine's clock is ahead of the server's; None where the server does not tell.

    Flower signs requests with the time and refuses those from the future, or five minutes old, without saying so.
    """
    import httpx

    context = ssl.create_default_context(cadata=authority.decode())
    try:
        response = httpx.get(f"https://{address}/health", verify=context, timeout=_SKEW_SECONDS)
        told = parsedate_to_datetime(response.headers["Date"])
    except (httpx.HTTPError, KeyError, ValueError, TypeError):
        return None
    return time.time() - told.timestamp()


# The Runtime API: tasks, which Flower would give to processes that it starts itself


def runtime_client(address: str, secret: bytes, authority: bytes | None) -> "RuntimeHttpClient":
    """A connection by which a process offers to do tasks, instead of Flower's SuperExec.

    It signs what SuperExec signs; where Flower signs otherwise, no task is given out.
    """
    from flwr.supercore.interceptors import SuperExecAuthHttpInterceptor
    from flwr.supercore.runtime import RuntimeHttpClient

    signature = SuperExecAuthHttpInterceptor(
        master_secret=secret, protected_methods=frozenset({"/flwr.proto.Runtime/AcquireTask"})
    )
    client: RuntimeHttpClient = _connect(RuntimeHttpClient, address, authority, "SuperExec", signature)
    return client


def acquire_task(client: "RuntimeHttpClient", app: Literal["server", "client"]) -> str | None:
    """The token of a task for such an app, if there is one; a ConnectionError where the request fails.

    Without it the server waits for its run, and a site for messages, in vain.
    """
    import httpx
    from flwr.proto.runtime_pb2 import AcquireTaskRequest
    from flwr.supercore.constant import TaskType

    task_type = TaskType.SERVER_APP if app == "server" else TaskType.CLIENT_APP
    try:
        response = client.AcquireTask(AcquireTaskRequest(supported_task_types=[task_type]))
    except httpx.HTTPError as error:
        raise ConnectionError(f"{type(error).__name__}: {error}") from error
    return str(response.token) if response.HasField("task") and response.token else None


@contextmanager
def server_app(address: str, authority: bytes, token: str, reachable: Callable[[], bool]) -> Iterator["HttpGrid"]:
    """Inside: this process is the server app of the task with this token, as `flwr-serverapp` would be.

    Of the grid two private attributes are used. Without `_runtime_client` no run begins; without `_retry_invoker` the
    end of a run whose SuperLink is gone takes as long as its retries. `TaskIdentity` is the sender of
    every message: unset, none can be made. The task's output is pushed only where the SuperLink is still `reachable`.
    """
    from flwr.common.serde import run_from_proto
    from flwr.proto.runtime_pb2 import PullTaskInputRequest, PushTaskOutputRequest
    from flwr.supercore.task_identity import TaskIdentity
    from flwr.superlink.grid import HttpGrid

    pull_eagerly()
    grid = HttpGrid(address, root_certificates=authority, token=token)
    client = grid._runtime_client
    heartbeat = _start_heartbeat(client)
    try:
        task = client.PullTaskInput(PullTaskInputRequest())
        TaskIdentity.task_id, TaskIdentity.run_id = task.task_id, task.run.run_id
        TaskIdentity.node_id = task.context.node_id
        grid.set_run(run_from_proto(task.run))
        yield grid
    finally:
        grid._retry_invoker.max_tries = 1
        heartbeat.stop()
        if reachable():
            client.PushTaskOutput(PushTaskOutputRequest(sub_status="completed", details=""))
        grid.close()


def answer_as_client_app(address: str, token: str, answer: Callable[[bytes], bytes]) -> None:
    """Do the task with this token, as `flwr-clientapp` would: pull its message, push the reply to its envelope.

    Three functions of Flower's own program are used. Where they change, sites do not answer, and say so in their log.
    """
    from flwr.app import Message
    from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor
    from flwr.supercore.runtime import RuntimeHttpClient
    from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message, push_task_output

    pull_eagerly()
    client = _connect(RuntimeHttpClient, address, None, "flwr-clientapp", RuntimeTokenHttpInterceptor(token))
    heartbeat = _start_heartbeat(client)
    try:
        message, context, _, _ = pull_task_input(client)
        reply = Message(to_record_dict(answer(envelope_in(message, "server"))), reply_to=message)
        push_message(client, reply, context)
        push_task_output(client, context, "completed", "")
    finally:
        heartbeat.stop()
        client.close()


def _start_heartbeat(client: "RuntimeHttpClient") -> "HeartbeatSender":
    """A thread that tells Flower we are alive; without it a task that takes long counts as failed."""
    from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http

    heartbeat = HeartbeatSender(make_task_heartbeat_fn_http(client))
    heartbeat.start()
    return heartbeat


def _connect(client_class: Any, address: str, authority: bytes | None, component: str, *interceptors: Any) -> Any:
    """One of Flower's HTTP clients; it must tell its version, or it is refused."""
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

    return client_class.from_server_address(
        address,
        insecure=authority is None,
        root_certificates=authority,
        interceptors=[RuntimeVersionHttpInterceptor(component_name=component), *interceptors],
    )

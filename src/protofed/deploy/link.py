"""The server's end of Flower: its SuperLink, who may connect to it, and the grid over which sites are reached."""

import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from protofed.deploy import superlink
from protofed.deploy.keys import ServerKeys, host_and_port, public_bytes
from protofed.deploy.programs import Program, Ready, flower_program, new_secret, wait_for
from protofed.engines.grid import prepare_flower
from protofed.errors import UserError

if TYPE_CHECKING:
    from flwr.supercore.control import ControlHttpClient
    from flwr.superlink.grid import HttpGrid

_START_SECONDS = 120.0
_TASK_SECONDS = 60.0
_ANYWHERE = ("0.0.0.0", "::")
_GONE = "unregistered"
_FINISHED = "finished"

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
class Node:
    """A member of the federation as the link knows it."""

    name: str
    node: int
    public_key: bytes
    online: bool
    since: str


class Link:
    """A running SuperLink, or the connection to one that another process runs."""

    def __init__(self, keys: ServerKeys, address: str) -> None:
        prepare_flower()
        self._keys = keys
        host, self._port = host_and_port(address)
        self._bind = host
        self._host = "127.0.0.1" if host in _ANYWHERE else host
        self._secret_file = keys.state / "secret"
        self._program: Program | None = None

    @property
    def _here(self) -> str:
        return f"{self._host}:{self._port}"

    def start(self) -> None:
        """Start the SuperLink; its nodes and messages are remembered from earlier starts."""
        if Ready(self._host, self._port)():
            raise UserError(f"something else answers at {self._here} already; end it, or give another --address")
        new_secret(self._secret_file)
        keys, state = self._keys, self._keys.state
        files = {
            "--ssl-ca-certfile": keys.authority,
            "--ssl-certfile": keys.certificate,
            "--ssl-keyfile": keys.private,
            "--database": state / "state.db",
            "--superexec-auth-secret-file": self._secret_file,
        }
        command = [*flower_program(superlink), str(self._secret_file)]
        command += ["--host", self._bind, "--port", str(self._port), "--enable-supernode-auth"]
        command += ["--isolation", "process", "--disable-runtime-dependency-installation"]
        command += [part for option, path in files.items() for part in (option, str(path.resolve()))]
        self._program = Program(command, state / "superlink.log", state)
        wait_for(self._program, Ready(self._host, self._port), _START_SECONDS, "Flower's SuperLink")
        self.admit_members()

    def end(self) -> None:
        """End the SuperLink."""
        if self._program is not None:
            self._program.end()

    # Who may take part

    def nodes(self) -> list[Node]:
        """All members, those whose keys were revoked left out."""
        from flwr.proto.control_pb2 import ListNodesRequest

        with self._administration() as control:
            infos = control.ListNodes(ListNodesRequest()).nodes_info
        return [
            Node(info.name, info.node_id, info.public_key, info.status == "online", info.last_activated_at)
            for info in infos
            if info.status != _GONE
        ]

    def admit_members(self) -> dict[str, int]:
        """Register every key of the server's folder, shut out all others; the members' nodes by name."""
        from flwr.proto.control_pb2 import RegisterNodeRequest, UnregisterNodeRequest

        wanted = {name: public_bytes(path) for name, path in self._keys.sites().items()}
        nodes = self.nodes()
        members = {node.name: node.public_key for node in nodes}
        if members != wanted:
            with self._administration() as control:
                for node in nodes:
                    if wanted.get(node.name) != node.public_key:
                        control.UnregisterNode(UnregisterNodeRequest(node_id=node.node))
                for name, key in wanted.items():
                    if members.get(name) != key:
                        control.RegisterNode(RegisterNodeRequest(public_key=key, name=name))
            nodes = self.nodes()
        return {node.name: node.node for node in nodes if wanted.get(node.name) == node.public_key}

    # A run

    @contextmanager
    def run(self) -> Iterator["HttpGrid"]:
        """Inside: a run of Flower, in which this process plays the server app."""
        from flwr.common.serde import run_from_proto
        from flwr.proto.runtime_pb2 import PullTaskInputRequest, PushTaskOutputRequest
        from flwr.supercore.heartbeat import HeartbeatSender, make_task_heartbeat_fn_http
        from flwr.supercore.task_identity import TaskIdentity
        from flwr.superlink.grid import HttpGrid

        self._stop_runs()
        self._start_run()
        grid = HttpGrid(self._here, root_certificates=self._authority, token=self._acquire())
        client = grid._runtime_client
        heart = HeartbeatSender(make_task_heartbeat_fn_http(client))
        heart.start()
        try:
            task = client.PullTaskInput(PullTaskInputRequest())
            TaskIdentity.task_id, TaskIdentity.run_id = task.task_id, task.run.run_id
            TaskIdentity.node_id = task.context.node_id
            grid.set_run(run_from_proto(task.run))
            yield grid
        finally:
            grid._retry_invoker.max_tries = 1
            heart.stop()
            if self._program is None or not self._program.ended:
                client.PushTaskOutput(PushTaskOutputRequest(sub_status="completed", details=""))
            grid.close()

    def _start_run(self) -> None:
        from flwr.cli.build import build_fab_from_files
        from flwr.common.serde import fab_to_proto
        from flwr.proto.control_pb2 import StartRunRequest
        from flwr.supercore.fab import Fab

        content, _ = build_fab_from_files({"pyproject.toml": _APP.encode(), "protofed_federation/app.py": b""})
        fab = Fab(hashlib.sha256(content).hexdigest(), content, {})
        with self._administration() as control:
            answer = control.StartRun(StartRunRequest(fab=fab_to_proto(fab)))
        if not answer.HasField("run_id"):
            raise RuntimeError("Flower does not start a run")

    def _stop_runs(self) -> None:
        """End what an earlier process, killed in the middle of a run, has left behind."""
        from flwr.proto.control_pb2 import ListRunsRequest, StopRunRequest

        with self._administration() as control:
            for run_id, run in control.ListRuns(ListRunsRequest()).run_dict.items():
                if run.status.status != _FINISHED:
                    control.StopRun(StopRunRequest(run_id=run_id))

    def _acquire(self) -> str:
        """The token of the task that our run has made."""
        from flwr.proto.runtime_pb2 import AcquireTaskRequest
        from flwr.supercore.constant import TaskType

        client = runtime_client(self._here, self._secret_file.read_bytes(), self._authority)
        deadline = time.monotonic() + _TASK_SECONDS
        try:
            while time.monotonic() < deadline:
                answer = client.AcquireTask(AcquireTaskRequest(supported_task_types=[TaskType.SERVER_APP]))
                if answer.HasField("task") and answer.token:
                    return str(answer.token)
                time.sleep(0.1)
        finally:
            client.close()
        raise RuntimeError("Flower gives out no task for its run")

    @property
    def _authority(self) -> bytes:
        return self._keys.authority.read_bytes()

    @contextmanager
    def _administration(self) -> Iterator["ControlHttpClient"]:
        import httpx
        from flwr.supercore.control import ControlHttpClient
        from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

        if not self._secret_file.exists():
            raise UserError(f"no server has been started with the keys in {self._keys.folder}")
        control = ControlHttpClient.from_server_address(
            self._here,
            insecure=False,
            root_certificates=self._authority,
            interceptors=[
                RuntimeVersionHttpInterceptor(component_name="protofed"),
                _Administrator(self._secret_file.read_bytes()),
            ],
        )
        try:
            yield control
        except httpx.ConnectError:
            raise UserError(f"no server answers at {self._here}; start one with protofed deploy server") from None
        finally:
            control.close()


class _Administrator:
    """Adds the secret to every request."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    def intercept(self, context: Any, call_next: Any) -> Any:
        """Before it is sent."""
        context.request.headers[superlink.SECRET_HEADER] = self._secret.decode()
        return call_next(context)


def runtime_client(address: str, secret: bytes, authority: bytes | None) -> Any:
    """A connection by which a process offers itself to do tasks."""
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor, SuperExecAuthHttpInterceptor
    from flwr.supercore.runtime import RuntimeHttpClient

    return RuntimeHttpClient.from_server_address(
        address,
        insecure=authority is None,
        root_certificates=authority,
        interceptors=[
            RuntimeVersionHttpInterceptor(component_name="SuperExec"),
            SuperExecAuthHttpInterceptor(
                master_secret=secret, protected_methods=frozenset({"/flwr.proto.Runtime/AcquireTask"})
            ),
        ],
    )

"""The server's end of Flower: its SuperLink, who may connect to it, and the grid over which sites are reached."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from protofed.deploy import flower, superlink
from protofed.deploy.keys import ServerKeys, host_and_port, public_bytes, public_key
from protofed.deploy.programs import Program, flower_program, is_listening, new_secret, wait_for
from protofed.engines.flower import prepare_flower
from protofed.errors import UserError
from protofed.system import FileLock, make_private

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from flwr.serverapp import Grid

log = logging.getLogger("protofed")

_START_SECONDS = 120.0
_TASK_SECONDS = 60.0
_TASK_PAUSE = 0.1
_ANYWHERE = ("0.0.0.0", "::")


class SuperLink:
    """A running SuperLink, or the connection to one that another process runs."""

    def __init__(self, keys: ServerKeys, address: str) -> None:
        prepare_flower()
        self._keys = keys
        host, self._port = host_and_port(address)
        self._bind = host
        self._host = "127.0.0.1" if host in _ANYWHERE else host
        self._secret_file = keys.state / "secret"
        self._program: Program | None = None
        self._spent_keys: set[str] = set()
        self._lock = FileLock(keys.state / ".lock")

    @property
    def _address(self) -> str:
        return f"{self._host}:{self._port}"

    @property
    def _authority(self) -> bytes:
        return self._keys.authority.read_bytes()

    def start(self) -> None:
        """Start the SuperLink; its nodes are remembered from earlier starts."""
        opened = make_private(self._keys.folder)
        self._keys.state.mkdir(mode=0o700, exist_ok=True)
        # Before the secret is made anew: a server that is running would be shut out of its own SuperLink.
        self._lock.acquire(f"another server is running with the keys in {self._keys.folder}; stop it first")
        if is_listening(self._host, self._port):
            self._lock.release()
            raise UserError(f"something else already answers at {self._address}; stop it, or give another --address")
        if opened:
            log.warning("%s was readable by others, and %d more; it is private now", opened[0], len(opened) - 1)
        new_secret(self._secret_file)
        keys, state = self._keys, self._keys.state
        files = {
            "--ssl-ca-certfile": keys.authority,
            "--ssl-certfile": keys.certificate,
            "--ssl-keyfile": keys.private,
            "--superexec-auth-secret-file": self._secret_file,
        }
        command = [*flower_program(superlink), str(self._secret_file), str(state / "nodes.json")]
        command += ["--host", self._bind, "--port", str(self._port), "--enable-supernode-auth"]
        command += ["--isolation", "process", "--disable-runtime-dependency-installation"]
        command += [part for option, path in files.items() for part in (option, str(path.resolve()))]
        self._program = Program(command, state / "superlink.log", state)
        wait_for(self._program, self._host, self._port, _START_SECONDS, "Flower's SuperLink")
        self.admit_members()

    def end(self) -> None:
        """End the SuperLink."""
        if self._program is not None:
            self._program.end()
        self._lock.release()

    def nodes(self) -> list[flower.MemberNode]:
        """All members, those whose keys were revoked left out."""
        with self._control() as control:
            return flower.list_nodes(control)

    def admit_members(self) -> dict[str, int]:
        """Register every key of the server's folder, shut out all others; the members' nodes by name."""
        wanted = {name: public_bytes(path) for name, path in self._keys.sites().items()}
        nodes = self.nodes()
        members = {node.name: node.public_key for node in nodes}
        if members != wanted:
            with self._control() as control:
                for node in nodes:
                    if wanted.get(node.name) != node.public_key:
                        flower.unregister_node(control, node.node_id)
                for name, key in wanted.items():
                    if members.get(name) != key and name not in self._spent_keys:
                        self._register(control, name, key)
            nodes = self.nodes()
        return {node.name: node.node_id for node in nodes if wanted.get(node.name) == node.public_key}

    def _register(self, control: "flower.ControlHttpClient", name: str, key: bytes) -> None:
        """Admit a site; a key that was revoked once stays out, and the others do not wait for it."""
        try:
            flower.register_node(control, name, key)
        except flower.KeyUsedBefore:
            self._spent_keys.add(name)
            log.warning(
                "%s is not admitted: its key was revoked before, and a revoked key stays out; remove %s and "
                "create another with protofed deploy keys",
                name,
                self._keys.sites()[name],
            )

    def identities(self) -> "dict[str, EllipticCurvePublicKey]":
        """The members' public keys, by which they sign."""
        return {name: public_key(path) for name, path in self._keys.sites().items()}

    @contextmanager
    def run(self) -> Iterator["Grid"]:
        """Inside: a run of Flower, in which this process plays the server app."""
        with self._control() as control:
            flower.stop_runs(control)
            flower.start_run(control)
        with flower.server_app(self._address, self._authority, self._acquire(), self._is_reachable) as grid:
            yield grid

    def _is_reachable(self) -> bool:
        return self._program is None or not self._program.ended

    def _acquire(self) -> str:
        """The token of the task that our run has made."""
        client = flower.runtime_client(self._address, self._secret_file.read_bytes(), self._authority)
        deadline = time.monotonic() + _TASK_SECONDS
        try:
            while time.monotonic() < deadline:
                token = flower.acquire_task(client, "server")
                if token is not None:
                    return token
                time.sleep(_TASK_PAUSE)
        finally:
            client.close()
        raise RuntimeError("Flower gives out no task for its run")

    @contextmanager
    def _control(self) -> Iterator["flower.ControlHttpClient"]:
        if not self._secret_file.exists():
            raise UserError(f"no server has been started with the keys in {self._keys.folder}")
        try:
            with flower.control_client(self._address, self._authority, self._secret_file.read_bytes()) as control:
                yield control
        except ConnectionError:
            raise UserError(f"no server answers at {self._address}; start one with protofed deploy server") from None

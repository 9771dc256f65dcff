"""Sites without machines: the server's and the sites' real code, joined by a grid that lives in this process."""

import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from protofed.deploy.engine import AcceptedRounds
from protofed.deploy.flower import MemberNode
from protofed.deploy.keys import ServerKeys, make_keys, public_key, site_keys
from protofed.deploy.policy import Policy
from protofed.deploy.server import WaitLimits, _Server
from protofed.deploy.site import Site, SiteData
from protofed.engines.flower import envelope_in, to_record_dict
from protofed.federation import RunFolder
from protofed.runs import Run
from protofed.runs.options import make_options
from protofed.system import one_thread

OPTIONS: dict[str, Any] = {"model": "mlp", "rounds": 2, "batch": 8, "set": {"model.hidden": 16}}

Answer = Callable[[bytes], bytes | None]


class Grid:
    """Delivers envelopes at once; a site that answers None never answers, one with a ConnectionError is away."""

    def __init__(self) -> None:
        from flwr.supercore.task_identity import TaskIdentity

        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1
        self.answers: dict[int, Answer] = {}
        self.carried: list[bytes] = []
        """All that sites have sent."""
        self.stuck: set[int] = set()
        """Nodes whose answers never come to an end: whoever pulls one is held up."""
        self._replies: dict[str, Any] = {}
        self._sent = 0

    def push_messages(self, messages: Iterable[Any]) -> list[str]:
        from flwr.app import Message

        identities = []
        for message in messages:
            self._sent += 1
            identity = str(self._sent)
            message.metadata.__dict__["_message_id"] = identity
            try:
                reply = self.answers[message.metadata.dst_node_id](envelope_in(message, "server"))
            except ConnectionError:
                identities.append("")
                continue
            if reply is not None:
                self.carried.append(reply)
                self._replies[identity] = Message(to_record_dict(reply), reply_to=message)
            identities.append(identity)
        return identities

    def pull_messages(self, identities: Iterable[str]) -> list[Any]:
        come = [identity for identity in identities if identity in self._replies]
        for identity in come:
            while self._replies[identity].metadata.src_node_id in self.stuck:
                time.sleep(0.05)
        return [self._replies.pop(identity) for identity in come]


@dataclass
class Federation:
    """Sites by name, what stands between them and the server, and runs over them."""

    folder: Path
    data: str
    grid: Grid = field(default_factory=Grid)
    sites: dict[str, Site] = field(default_factory=dict)
    members: list[str] = field(default_factory=list)
    online: set[str] = field(default_factory=set)

    def add(self, name: str, *, online: bool = True, policy: Policy | None = None, **options: Any) -> Site:
        own = self.folder / "own" / name
        own.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(self.data) / f"{name}.npz", own)
        self.sites[name] = self.site(name, policy, **options)
        self.members.append(name)
        self.grid.answers[self.node(name)] = lambda envelope: self.sites[name].answer(envelope)
        if online:
            self.online.add(name)
        return self.sites[name]

    def site(self, name: str, policy: Policy | None = None, **options: Any) -> Site:
        """A site as it is after a restart: nothing but its files."""
        data = SiteData(str(self.folder / "own" / name), options.pop("labels", None), options.pop("classes", None))
        options.setdefault("keys", self._keys(name))
        return Site(name, data, self.folder / "state" / name, policy or Policy(), **options)

    def _keys(self, name: str) -> Any:
        """The identity of a site; all sites know each other."""
        make_keys(self.folder / "keys", "127.0.0.1:9443", [name])
        return site_keys(self.folder / "keys" / "sites" / name)

    def node(self, name: str) -> int:
        return self.members.index(name) + 100 if name in self.members else len(self.members) + 100

    def between(self, name: str, change: Callable[[bytes, Answer], bytes | None]) -> None:
        """Put something between the server and a site: `change` gets the envelope and what would answer it."""
        self.grid.answers[self.node(name)] = lambda envelope: change(envelope, self.sites[name].answer)

    def run(self, method: str, out: str = "run", *, resume: bool = False, **options: Any) -> Run:
        limits = options.pop("limits", WaitLimits(round_timeout=0.3, wait=1.0))
        callbacks = options.pop("callbacks", [])
        given = {**OPTIONS, "method": method, **options}
        run_options = make_options({**given, "data": "sites", "protocol": "one-per-domain", "engine": "flower"})
        path = self.folder / out
        accepted = AcceptedRounds(path / "clients")
        folder = RunFolder(path, accepted)
        if resume:
            accepted.learn(folder.rounds())
        link: Any = SimpleNamespace(
            nodes=lambda: [MemberNode(name, self.node(name), b"", name in self.online, "") for name in self.members],
            admit_members=lambda: {name: self.node(name) for name in self.members},
            identities=lambda: {
                name: public_key(path) for name, path in ServerKeys.at(self.folder / "keys" / "server").sites().items()
            },
        )
        grid: Any = self.grid
        with one_thread():
            try:
                return _Server(link, grid, folder, accepted, run_options, limits).run(resume, callbacks)
            finally:
                folder.release()

    def states(self) -> dict[str, bytes]:
        """The clients' states at the sites, by file name."""
        return {
            path.name: path.read_bytes()
            for path in sorted((self.folder / "state").glob("*/runs/*/clients/*"))
            if path.suffix == ".safetensors"
        }

"""A run folder: what is written where, so that killing the process at any moment loses only the round in flight.

A round is committed by renaming `checkpoint/manifest.json` into place. The manifest says which round it is, which
clients trained in it and how long `rounds.jsonl` was; whatever lies beyond is put right when the run is resumed.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

from protofed.clients import ClientStore, plain_name
from protofed.errors import BadMessage, UserError
from protofed.federation.best import BEST, NOTE, BestRound
from protofed.federation.lock_holder import LOCK, LockHolder
from protofed.federation.required import ROUND_KEYS, require
from protofed.metrics import KeptPredictions
from protofed.records import Message, Record, decode_file, encode
from protofed.system import FileLock, write_atomically

BEST_MODEL = "model_best.safetensors"
PREDICTIONS = "predictions.npz"

_BEFORE_IT_BEGINS = {LOCK, "clients", "checkpoint"}
"""All that is left of a run killed before it had written run.json."""


class Store(Protocol):
    """Where clients' states are kept, as far as committing a round is concerned."""

    def withdraw(self, client: str, round: int) -> None:
        """Forget what a client proposed in a round."""

    def commit(self, clients: Iterable[str], round: int) -> None:
        """Make the proposals of a round the clients' states."""

    def withdraw_all(self) -> None:
        """Forget every proposal."""


class RunFolder:
    """The files of one run and their commit protocol; one process at a time."""

    def __init__(self, path: Path, store: "Store | None" = None) -> None:
        self.path = path
        self.store = store or ClientStore(path / "clients")
        self._checkpoint = path / "checkpoint"
        self._manifest = self._checkpoint / "manifest.json"
        self._rounds = path / "rounds.jsonl"
        self._messages = path / "messages"
        self._lock = FileLock(path / LOCK)

    @property
    def clients(self) -> Path:
        """Folder of the clients' states."""
        return self.path / "clients"

    def refuse_if_taken(self) -> None:
        """Refuse a path that holds anything but the remains of a run killed before it began."""
        if not self.path.exists():
            return
        if not self.path.is_dir() or any(path.name not in _BEFORE_IT_BEGINS for path in self.path.iterdir()):
            raise UserError(
                f"{self.path} already exists; give another --out, or use --resume to continue the run in it"
            )

    def create(self) -> None:
        """Make the folder and lock it."""
        self.refuse_if_taken()
        self.clients.mkdir(parents=True, exist_ok=True)
        self._checkpoint.mkdir(exist_ok=True)
        self.lock()

    def lock(self) -> None:
        """Refuse a second process on the same folder."""
        busy = f"another process is using {self.path}; wait for it or give another --out"
        self._lock.acquire(busy, note=LockHolder.here().note())

    def release(self) -> None:
        """Let other processes in."""
        self._lock.release()

    def discard(self) -> None:
        """Remove a folder in which nothing has happened yet."""
        self.release()
        shutil.rmtree(self.path, ignore_errors=True)

    def write_json(self, name: str, content: dict[str, Any]) -> None:
        """Write a JSON file of the contract."""
        write_atomically(self.path / name, json.dumps(content, indent=2, allow_nan=False).encode() + b"\n")

    def read_json(self, name: str) -> dict[str, Any]:
        """Read one back; a folder without it is not a run."""
        try:
            return _json_object((self.path / name).read_bytes(), self.path / name)
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise UserError(f"{self.path} is not a run folder: it has no {name}") from None

    def rounds(self) -> list[dict[str, Any]]:
        """The lines of rounds.jsonl; one that is being written now is not there yet."""
        if not self._rounds.exists():
            return []
        # What follows the last line break is being written now.
        lines = self._rounds.read_bytes().split(b"\n")[:-1]
        places = [(f"{self._rounds}, line {number}", line) for number, line in enumerate(lines, 1) if line]
        return [require(_json_object(line, where), ROUND_KEYS, where) for where, line in places]

    def commit_round(self, round: int, line: dict[str, Any], server: Message, clients: list[str]) -> None:
        """Make a finished round permanent; `server` is the server's new state, encoded."""
        with self._rounds.open("ab") as file:
            file.write(json.dumps(line, allow_nan=False).encode() + b"\n")
            length = file.tell()
        write_atomically(self._server(round), server.blob)
        manifest = {"round": round, "clients": clients, "rounds_jsonl_bytes": length}
        write_atomically(self._manifest, json.dumps(manifest).encode())
        self.store.commit(clients, round)
        self._remove_other_servers(round)

    def revise_round(self, round: int, line: dict[str, Any], server: Message, clients: list[str]) -> None:
        """Put another result in the place of that of the last round; killed at any moment, it is one or the other."""
        write_atomically(self._revised(round), server.blob)
        manifest = _json_object(self._manifest.read_bytes(), self._manifest)
        write_atomically(
            self._manifest, json.dumps({**manifest, "clients": clients, "revised": line}, allow_nan=False).encode()
        )
        self._finish_revision()
        self.store.commit(clients, round)

    def _finish_revision(self) -> None:
        """Carry out what the manifest says of a revision; to be done as often as one likes."""
        manifest = _json_object(self._manifest.read_bytes(), self._manifest)
        if (line := manifest.pop("revised", None)) is None:
            return
        round = int(manifest["round"])
        if self._revised(round).exists():
            self._revised(round).replace(self._server(round))
        lines = [*self._rounds.read_bytes().split(b"\n")[:round], json.dumps(line, allow_nan=False).encode(), b""]
        content = b"\n".join(lines)
        write_atomically(self._rounds, content)
        write_atomically(self._manifest, json.dumps({**manifest, "rounds_jsonl_bytes": len(content)}).encode())

    def remove_copies(self, client: str) -> None:
        """Remove what was kept of a client's uploads, and of results that it has a part in."""
        for message in self._messages.glob(f"round-*/{plain_name(client)}.safetensors"):
            message.unlink()
        shutil.rmtree(self.path / "snapshots", ignore_errors=True)
        self.forget_best()

    def recover(self, like: Record) -> tuple[int, Record] | None:
        """Put the folder into the state of its last committed round; that round and the server's state after it."""
        if not self._manifest.exists():
            self.store.withdraw_all()
            self._rounds.unlink(missing_ok=True)
            return None
        self._finish_revision()
        round, clients, length = self._read_manifest()
        try:
            server = decode_file(self._server(round), like, "checkpoint")
        except (OSError, BadMessage) as problem:
            raise UserError(f"{self.path} cannot be resumed: its checkpoint is damaged ({problem})") from None
        self.store.commit(clients, round)
        self.store.withdraw_all()
        os.truncate(self._rounds, length)
        self._remove_other_servers(round)
        return round, server

    def _read_manifest(self) -> tuple[int, list[str], int]:
        """The round, the clients that trained in it and the length of rounds.jsonl, before any of it is acted on."""
        manifest = _json_object(self._manifest.read_bytes(), self._manifest)
        round: Any = manifest.get("round")
        clients: Any = manifest.get("clients")
        length: Any = manifest.get("rounds_jsonl_bytes")
        written = self._rounds.stat().st_size if self._rounds.is_file() else -1
        numbers = type(round) is int and round >= 0 and type(length) is int and 0 <= length <= written
        if not numbers or not isinstance(clients, list) or not all(isinstance(name, str) for name in clients):
            raise UserError(f"{self.path} cannot be resumed: {self._manifest} is damaged")
        return round, [plain_name(client) for client in clients], length

    def committed_clients(self) -> list[str]:
        """Those whose uploads are in the result of the last committed round."""
        return self._read_manifest()[1]

    def keep_message(self, round: int, client: str, blob: bytes) -> None:
        """Keep an upload as it was sent."""
        folder = self._messages / f"round-{round + 1}"
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / f"{plain_name(client)}.safetensors", blob)

    def keep_predictions(self, content: bytes) -> None:
        """Keep what the last evaluation predicts for every test image, before its round is committed."""
        write_atomically(self.path / PREDICTIONS, content)

    def predictions(self) -> KeptPredictions | None:
        """What was kept; None for a run that has kept none."""
        path = self.path / PREDICTIONS
        return KeptPredictions.read(path) if path.is_file() else None

    def kept_messages(self, client: str) -> Iterator[bytes]:
        """What a client sent, the newest first; nothing where the run kept no messages."""
        rounds = sorted(self._messages.glob("round-*"), key=lambda path: (len(path.name), path.name), reverse=True)
        for folder in rounds:
            path = folder / f"{plain_name(client)}.safetensors"
            if path.is_file():
                yield path.read_bytes()

    def last_server(self, like: Record) -> tuple[int, Record]:
        """The last committed round and the server's state after it; nothing in the folder changes."""
        round = self._read_manifest()[0]
        return round, decode_file(self._server(round), like, "checkpoint")

    def snapshot(self, done: int) -> Path:
        """Folder of the snapshot after so many rounds."""
        return self.path / "snapshots" / f"round-{done}"

    def keep_snapshot(self, done: int, server: Record, write_results: Callable[[Path], None]) -> None:
        """Keep results, the server's state and the clients' as they are now; it is there as a whole or not at all."""
        target = self.snapshot(done)
        if not target.exists():
            self._copy_states(target, server, write_results).rename(target)

    @property
    def best(self) -> Path:
        """Folder of the best round, built like that of a snapshot."""
        return self.path / BEST

    def keep_best(self, best: BestRound, server: Record, write_results: Callable[[Path], None]) -> None:
        """Keep the states as they are now as those of the best round, instead of an earlier one."""
        draft = self._copy_states(self.best, server, write_results)
        write_atomically(draft / NOTE, best.note())
        shutil.rmtree(self.best, ignore_errors=True)
        draft.rename(self.best)

    def publish_best(self) -> None:
        """Put the best round's model beside the last one, where there is a global model."""
        if (self.best / "model.safetensors").exists():
            write_atomically(self.path / BEST_MODEL, (self.best / "model.safetensors").read_bytes())

    def forget_best(self) -> None:
        """Remove what was kept of an earlier round."""
        shutil.rmtree(self.best, ignore_errors=True)
        (self.path / BEST_MODEL).unlink(missing_ok=True)

    def _copy_states(self, target: Path, server: Record, write_results: Callable[[Path], None]) -> Path:
        """A folder beside `target` with results, the server's state and the clients' as they are now."""
        draft = target.with_name(f".{target.name}.{os.getpid()}")
        shutil.rmtree(draft, ignore_errors=True)
        (draft / "clients").mkdir(parents=True)
        write_results(draft)
        write_atomically(draft / "server.safetensors", encode(server, "server").blob)
        for state in self.clients.glob("*.safetensors"):
            # A client's file is only ever replaced, never changed, so the old one may be shared.
            try:
                os.link(state, draft / "clients" / state.name)
            except OSError:
                shutil.copyfile(state, draft / "clients" / state.name)
        return draft

    def server_after(self, done: int, like: Record) -> Record:
        """The server's state after so many rounds: of a snapshot, or of the last round."""
        for path in (self.snapshot(done) / "server.safetensors", self._server(done - 1)):
            if path.exists():
                return decode_file(path, like, "checkpoint")
        raise UserError(f"{self.path} has no snapshot of round {done}; run with --snapshot-rounds {done}")

    def snapshots(self) -> list[int]:
        """The rounds of which there is a snapshot."""
        folders = (self.path / "snapshots").glob("round-*")
        return sorted(int(path.name.removeprefix("round-")) for path in folders)

    def _server(self, round: int) -> Path:
        return self._checkpoint / f"server-{round}.safetensors"

    def _revised(self, round: int) -> Path:
        return self._checkpoint / f"server-{round}.revised"

    def _remove_other_servers(self, round: int) -> None:
        keep = {self._server(round), self._manifest}
        for path in self._checkpoint.iterdir():
            if path not in keep:
                path.unlink()


def _json_object(content: bytes, where: Path | str) -> dict[str, Any]:
    """A JSON object of a run folder; anything else is damage."""
    try:
        parsed = json.loads(content)
    except (ValueError, RecursionError):
        raise UserError(f"{where} is damaged: it is not JSON") from None
    if not isinstance(parsed, dict):
        raise UserError(f"{where} is damaged: it is not a JSON object")
    return parsed

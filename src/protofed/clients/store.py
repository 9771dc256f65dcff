"""What clients keep between rounds, one file each, changed only when a whole round is committed."""

import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from torch import Tensor

from protofed.clients.optimizers import older_state
from protofed.errors import BadMessage, UserError
from protofed.records import Record, Weights, decode_file, encode
from protofed.system import write_atomically


class ClientState(Record):
    """A client's model as its last local training left it, its memory, and its optimisers where they are kept."""

    model: Weights
    memory: Record
    optimizer: dict[str, Tensor]


class Sources(Record):
    """A client's part prototypes after projection, and the training images they are pieces of."""

    free_rows = frozenset({"vectors", "image", "row", "column", "pixels"})

    vectors: Tensor  # [m, D, s, s]
    image: Tensor  # [m], place among the client's training images; -1: no image of the class, so it was not moved
    row: Tensor  # [m], place of the patch in the feature map
    column: Tensor
    pixels: Tensor  # [m, C, H, W]


class ClientStore:
    """Files `CLIENT.safetensors`; a round in flight proposes `CLIENT.round-N`, which a commit renames.

    Killing the process at any moment therefore leaves every client either before or after a round, never between.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def read(self, client: str, round: int, like: ClientState) -> ClientState | None:
        """The newest state of a client: what it proposed in `round`, else what was committed, else None."""
        for path in (self._proposal(client, round), self._committed(client)):
            if path.exists():
                return _decoded(path, like, f"{client}'s stored state")
        return None

    def propose(self, client: str, round: int, state: ClientState) -> None:
        """Write a client's new state beside the committed one."""
        write_atomically(self._proposal(client, round), encode(state, client).blob)

    def keep_proposal(self, client: str, round: int, path: Path) -> None:
        """Keep a proposal also under another name, for `propose_again`."""
        _link(self._proposal(client, round), path)

    def propose_again(self, client: str, round: int, path: Path) -> None:
        """Propose what was kept, where it has been withdrawn since."""
        if not self._proposal(client, round).exists():
            _link(path, self._proposal(client, round))

    def is_proposed(self, client: str, round: int) -> bool:
        """Whether a round's training has left a state that is not committed yet."""
        return self._proposal(client, round).exists()

    def withdraw(self, client: str, round: int) -> None:
        """Forget the proposal of a client whose upload was refused."""
        self._proposal(client, round).unlink(missing_ok=True)

    def commit(self, clients: Iterable[str], round: int) -> None:
        """Make the proposals of a round the clients' states; idempotent."""
        for client in clients:
            with suppress(FileNotFoundError):
                self._proposal(client, round).replace(self._committed(client))

    def withdraw_all(self) -> None:
        """Forget every proposal: the round they belong to was never committed."""
        for path in self.folder.iterdir():
            if path.suffix != ".safetensors":
                path.unlink()

    def keep_sources(self, client: str, sources: Sources) -> None:
        """Write the result of a projection beside the client's state."""
        write_atomically(self._projection(client), encode(sources, client).blob)

    def sources(self, client: str, like: Sources) -> Sources | None:
        """The result of the client's last projection; None if there was none."""
        try:
            return decode_file(self._projection(client), like, f"{client}'s projection")
        except FileNotFoundError:
            return None

    def _projection(self, client: str) -> Path:
        return self.folder / f"{client}.projection.safetensors"

    def _committed(self, client: str) -> Path:
        return self.folder / f"{plain_name(client)}.safetensors"

    def _proposal(self, client: str, round: int) -> Path:
        return self.folder / f"{plain_name(client)}.round-{round}"


def _decoded(path: Path, like: ClientState, name: str) -> ClientState:
    """A stored state, maybe of an earlier version, whose optimisers kept less; the rest is as in the beginning."""
    try:
        return decode_file(path, like, name)
    except BadMessage:
        older = replace(like, optimizer=older_state(like.optimizer))
        if older.optimizer.keys() == like.optimizer.keys():
            raise
        try:
            state = decode_file(path, older, name)
        except BadMessage:
            pass  # so it is no older one, and the first complaint holds
        else:
            return replace(state, optimizer={**like.optimizer, **state.optimizer})
        raise


@lru_cache(maxsize=2**16)
def plain_name(client: str) -> str:
    """The client's name, once it is known to name a file of its folder and nothing outside."""
    if client in ("", "..") or Path(client).name != client or "\0" in client:
        raise UserError(f"a client cannot be named {client!r}: files are named after clients")
    return client


def _link(source: Path, target: Path) -> None:
    """Another name for a file that is only ever replaced, never changed; a copy where there are no links."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)

"""What an operator asks of a server that is at work, by files in its run folder: `requests/CLIENT.json`.

The server looks for them after every round and while it stays, and answers each with `requests/CLIENT.answer.json`.
"""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from protofed.clients import plain_name
from protofed.errors import UserError
from protofed.federation.lock_holder import LockHolder
from protofed.inference.changed import FORGOTTEN, now
from protofed.system import write_atomically

_FOLDER, _REQUEST, _ANSWER, _STATE = "requests", ".json", ".answer.json", ".safetensors"
_PAUSE = 0.2
_REFUSED = "refused"


def ask_to_forget(run: Path, client: str, state: Path | None = None) -> dict[str, Any]:
    """Have the server that is at work in a run folder take a site out of its result; its record, with the accuracy.

    It answers when the round in hand is over. `state` is the site's own, where it cannot be asked.
    """
    if LockHolder.of(run) is None:
        raise UserError(
            f"no server of this user on this machine is running in {run}; give --out for the result without {client}"
        )
    folder, name = run / _FOLDER, plain_name(client)
    folder.mkdir(exist_ok=True)
    answer, request, handed = (folder / f"{name}{suffix}" for suffix in (_ANSWER, _REQUEST, _STATE))
    answer.unlink(missing_ok=True)
    if state is not None:
        try:
            write_atomically(handed, state.read_bytes())
        except OSError as problem:
            raise UserError(f"cannot read {state}: {problem.strerror}") from None
    write_atomically(request, json.dumps({"forget": client, "date": now()}).encode())
    while not answer.exists():
        time.sleep(_PAUSE)
        if LockHolder.of(run) is None and not answer.exists():
            request.unlink(missing_ok=True)
            handed.unlink(missing_ok=True)
            raise UserError(
                f"the server ended without an answer; {run / FORGOTTEN} lists {client} if it was removed nevertheless"
            )
    content: dict[str, Any] = json.loads(answer.read_bytes())
    answer.unlink()
    if _REFUSED in content:
        raise UserError(str(content[_REFUSED]))
    return content


class OpenRequests:
    """The server's side: what is asked in its run folder."""

    def __init__(self, run: Path) -> None:
        self._folder = run / _FOLDER

    def clients(self) -> list[str]:
        """Those to be forgotten, in the order of their names."""
        names = (path.name for path in self._folder.glob(f"*{_REQUEST}"))
        return sorted(name.removesuffix(_REQUEST) for name in names if not name.endswith(_ANSWER))

    def state_of(self, client: str) -> Path | None:
        """The state that came with the request."""
        path = self._folder / f"{client}{_STATE}"
        return path if path.exists() else None

    def answer(self, client: str, content: Mapping[str, Any]) -> None:
        """What has become of a request."""
        write_atomically(self._folder / f"{client}{_ANSWER}", json.dumps(dict(content)).encode())
        for suffix in (_REQUEST, _STATE):
            (self._folder / f"{client}{suffix}").unlink(missing_ok=True)

    def refuse(self, client: str, reason: str) -> None:
        """Why it is not done."""
        self.answer(client, {_REFUSED: reason})

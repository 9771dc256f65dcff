"""Who has uploaded what in which round, as far as the run folder can tell: what epsilon is computed from.

A round that is begun again may bring other uploads than before, with other noise, and the earlier ones have been seen,
too. So every different upload counts, whether its round was closed with it or not. Those of the round in flight are
noted in `uploads.jsonl` as they come; a round that is closed has those that came more than once in its line.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

REPEATED = "repeated_uploads"
"""In the line of a round: clients that sent more than one different upload, and how many."""

_FILE = "uploads.jsonl"


class Spending:
    """The uploads of a run, by round and client."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / _FILE
        self._closed: list[dict[str, int]] = []
        self._open: dict[str, set[str]] = {}

    def resume(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Take over the rounds that are committed, and the uploads of the round after them."""
        self._closed = [{**dict.fromkeys(line["participants"], 1), **line.get(REPEATED, {})} for line in lines]
        self._open = {}
        for noted in self._noted():
            if noted.get("round") == len(lines) + 1:
                self._open.setdefault(str(noted.get("client")), set()).add(str(noted.get("sha256")))

    def note(self, client: str, round: int, blob: bytes) -> None:
        """An upload has come; it is on disk before anything is done with it."""
        digest = hashlib.sha256(blob).hexdigest()
        if digest not in self._open.setdefault(client, set()):
            self._open[client].add(digest)
            with self._path.open("a") as file:
                file.write(json.dumps({"round": round + 1, "client": client, "sha256": digest}) + "\n")

    def repeated(self) -> dict[str, int]:
        """Who has sent more than one different upload in the round in flight, and how many."""
        return {client: len(digests) for client, digests in self._open.items() if len(digests) > 1}

    def rounds(self, participants: Sequence[str] = ()) -> Iterator[tuple[int, list[str]]]:
        """Every round with the clients that sent something in it, once for each upload they sent.

        With participants the round in flight is one of them.
        """
        in_flight = {client: len(digests) for client, digests in self._open.items() if digests}
        uploads = [*self._closed, {**dict.fromkeys(participants, 1), **in_flight}]
        for round, of_round in enumerate(uploads):
            for number in range(max(of_round.values(), default=0)):
                yield round, [client for client, count in of_round.items() if count > number]

    def close(self, participants: Sequence[str]) -> None:
        """The round in flight is committed."""
        self._closed.append({**dict.fromkeys(participants, 1), **self.repeated()})
        self._open = {}
        self._path.unlink(missing_ok=True)

    def _noted(self) -> Iterator[dict[str, Any]]:
        """What was noted before the process ended, maybe in the middle of a line."""
        if not self._path.exists():
            return
        for line in self._path.read_bytes().splitlines():
            try:
                noted = json.loads(line)
            except ValueError:
                continue
            if isinstance(noted, dict):
                yield noted

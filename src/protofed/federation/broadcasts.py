"""What the server sends, encoded."""

from collections.abc import Callable

from protofed.records import Message, Record, encode


class BroadcastEncoder:
    """Encodes the broadcasts of a round, once where every client is sent the same record."""

    def __init__(self, broadcast: Callable[[int, str | None], Record], round: int) -> None:
        self._broadcast = broadcast
        self._round = round
        self._last: tuple[Record, Message] | None = None

    def message_to(self, client: str) -> Message:
        """What this client is sent."""
        record = self._broadcast(self._round, client)
        if self._last is None or self._last[0] is not record:
            self._last = (record, encode(record, "server"))
        return self._last[1]

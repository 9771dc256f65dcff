"""Rounds that cannot be committed."""


class TooFewClients(RuntimeError):
    """A round that cannot be closed, because too few clients have sent something that can be used."""


class Diverged(Exception):
    """A round that nobody's training survived: what came of it is not finite. The rounds before it are committed."""

    def __init__(self, round: int, what: str) -> None:
        super().__init__(f"in round {round} {what}")
        self.round = round
        """From 1, as in rounds.jsonl."""
        self.what = what
        """What is not finite, to be read after the round."""

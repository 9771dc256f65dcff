"""What the server asks of a site, beside jobs: the terms of a run, sent along with everything.

A site that was restarted, or that comes late, therefore needs nothing but the next message.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from protofed.clients import pack, unpack
from protofed.deploy.census import Census
from protofed.errors import BadMessage
from protofed.runs.options import Options, make_options

SITES = "sites"
"""The name of the data where every site holds its own."""

_RUN = re.compile(r"[0-9a-f]{32}")
_ASKS = ("hello", "begin", "job", "finish")
_OWN = ("data_root", "weights", "plugin", "device", "workers")
"""Options that every machine decides for itself."""


@dataclass(frozen=True)
class Terms:
    """What a run is: the same for all who take part."""

    run: str
    options: Mapping[str, Any]
    census: Census
    weights: str | None
    """A hash of the file with initial weights."""
    protofed: str
    """The server's version."""

    @classmethod
    def of(cls, run: str, options: Options, census: Census) -> "Terms":
        """The terms of a run that begins here."""
        shared = {name: value for name, value in options.model_dump().items() if name not in _OWN}
        return cls(run, shared, census, fingerprint(options.weights), version("protofed"))

    def as_dict(self) -> dict[str, Any]:
        """For the wire."""
        return {
            "run": self.run,
            "options": dict(self.options),
            "census": self.census.as_dict(),
            "weights": self.weights,
            "protofed": self.protofed,
        }

    @classmethod
    def read(cls, told: Any, sender: str) -> "Terms":
        """From what was sent."""
        if not isinstance(told, dict) or not _RUN.fullmatch(str(told.get("run"))):
            raise BadMessage(f"{sender}: the message does not say which run it belongs to")
        options, weights = told.get("options"), told.get("weights")
        if not isinstance(options, dict) or not (weights is None or isinstance(weights, str)):
            raise BadMessage(f"{sender}: the message does not say what is run")
        census = Census.read(told.get("census"), sender)
        return cls(told["run"], options, census, weights, str(told.get("protofed")))

    def options_here(self, **own: Any) -> Options:
        """The options with what this machine decides for itself."""
        return make_options({**{name: value for name, value in self.options.items() if name not in _OWN}, **own})


@dataclass(frozen=True)
class Question:
    """One message to a site."""

    ask: str
    terms: Terms | None = None
    accepted: int | None = None
    """The last round in which the server took this site's upload."""
    body: bytes = b""

    def packed(self) -> bytes:
        """As bytes."""
        terms = None if self.terms is None else self.terms.as_dict()
        return pack({"ask": self.ask, "terms": terms, "accepted": self.accepted}, self.body)

    @classmethod
    def read(cls, envelope: bytes) -> "Question":
        """From bytes."""
        header, body = unpack(envelope, "server")
        ask, accepted = header.get("ask"), header.get("accepted")
        if ask not in _ASKS or not (accepted is None or isinstance(accepted, int)):
            raise BadMessage(f"server: {ask!r} is nothing that a site is asked")
        terms = None if ask == "hello" else Terms.read(header.get("terms"), "server")
        return cls(ask, terms, accepted, body)


def fingerprint(file: str | None) -> str | None:
    """Of a file that all parties must have alike."""
    return None if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()

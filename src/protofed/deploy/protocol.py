"""What the server sends to a site: requests, each with the terms of the run.

A site that was restarted, or that comes late, therefore needs nothing but the next message.
"""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from protofed.clients import pack, unpack
from protofed.clients.wire import Count, checked
from protofed.deploy.census import Census
from protofed.deploy.known_tensors import TensorPart
from protofed.errors import BadMessage, UserError
from protofed.models.pretrained import pretrained_hash
from protofed.runs.network import NAMED_STARTS
from protofed.runs.options import Options, make_options

SITES = "sites"
"""The name of the data where every site holds its own."""

_RUN = re.compile(r"[0-9a-f]{32}")
_KINDS = ("hello", "begin", "job", "mask", "finish", "forgotten")
_OWN = ("data_root", "weights", "plugin", "device", "workers")
"""Options that every machine decides for itself; of weights those that come from a file."""


@dataclass(frozen=True)
class RunTerms:
    """What a run is, the same for all sites."""

    run: str
    options: Mapping[str, Any]
    census: Census
    weights: str | None
    """A hash of the initial weights, which are not sent: everybody has the file, or the package they come in."""
    protofed: str
    """The server's version."""

    @classmethod
    def of(cls, run: str, options: Options, census: Census) -> "RunTerms":
        """The terms of a run that begins here."""
        shared = {name: value for name, value in options.model_dump().items() if name not in _OWN}
        if options.weights in NAMED_STARTS:
            shared["weights"] = options.weights
        return cls(run, shared, census, fingerprint(options), version("protofed"))

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
    def read(cls, content: Any, sender: str) -> "RunTerms":
        """From what was sent."""
        if not isinstance(content, dict) or not _RUN.fullmatch(str(content.get("run"))):
            raise BadMessage(f"{sender}: the message does not say which run it belongs to")
        options, weights = content.get("options"), content.get("weights")
        if not isinstance(options, dict) or not (weights is None or isinstance(weights, str)):
            raise BadMessage(f"{sender}: the message does not say what is run")
        census = Census.read(content.get("census"), sender)
        return cls(content["run"], options, census, weights, str(content.get("protofed")))

    def options_here(self, **own: Any) -> Options:
        """The options with what this machine decides for itself; a file of the server's is never looked for here."""
        shared = {name: value for name, value in self.options.items() if name not in _OWN}
        if own.get("weights") is None and self.options.get("weights") in NAMED_STARTS:
            own = {**own, "weights": self.options["weights"]}
        return make_options({**shared, **own})


@dataclass(frozen=True)
class SiteRequest:
    """One message to a site."""

    kind: str
    """hello, begin, job, mask (a stage of a secure sum), finish, or forgotten (its part is out of the result)."""
    terms: RunTerms | None = None
    accepted: int | None = None
    """The last round in which the server took this site's upload."""
    body: bytes = b""
    tensors: tuple[TensorPart, ...] = ()
    """The large tensors of the body; those that the site has are not in it."""

    def to_bytes(self) -> bytes:
        """The envelope that is sent."""
        terms = None if self.terms is None else self.terms.as_dict()
        tensors = [astuple(part) for part in self.tensors]
        return pack({"ask": self.kind, "terms": terms, "accepted": self.accepted, "tensors": tensors}, self.body)

    @classmethod
    def from_bytes(cls, envelope: bytes) -> "SiteRequest":
        """From an envelope, checked."""
        header, body = unpack(envelope, "server")
        kind, accepted = header.get("ask"), header.get("accepted")
        if kind not in _KINDS or not (accepted is None or isinstance(accepted, int)):
            raise BadMessage(f"server: {kind!r} is not a request that a site answers")
        terms = None if kind == "hello" else RunTerms.read(header.get("terms"), "server")
        tensors = checked(_Tensors, {"parts": header.get("tensors", [])}, "server").parts
        return cls(kind, terms, accepted, body, tuple(TensorPart(*part) for part in tensors))


@dataclass(frozen=True)
class _Tensors:
    """The parts of a request as they are sent."""

    parts: tuple[tuple[Count, Count, str, bool], ...]


def fingerprint(options: Options) -> str | None:
    """The sha256 of the initial weights, which must be the same everywhere; None where there are none.

    That a package's file is what it should be is checked when it is read, so what it should be is compared here.
    """
    if options.weights is None or options.weights == "none":
        return None
    if options.weights == "imagenet":
        return ",".join(pretrained_hash(name) for name in (options.model or "").split(","))
    return hashlib.sha256(_content(Path(options.weights))).hexdigest()


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read the weights {path}: {error.strerror}") from None

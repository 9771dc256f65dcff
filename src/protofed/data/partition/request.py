"""A division among clients as a user asks for it: the protocol as written, and numbers as users write them."""

import math
from dataclasses import dataclass

from protofed.errors import UserError, unknown_name

_BY_LABEL = ("dirichlet", "iid", "shards")
_PROTOCOLS = ("domains", "equal", "one-per-domain", "leave-out", *_BY_LABEL)
_FORMS = "domains, equal=N, one-per-domain, leave-out=DOMAIN, dirichlet=ALPHA,clients=N, iid=N, shards=K,clients=N"


@dataclass(frozen=True)
class PartitionRequest:
    """A protocol: its text, its kind, the value after the first `=` and further settings; and what goes with it."""

    text: str
    kind: str
    value: str
    settings: dict[str, str]
    clients: str | int | None = None
    fraction: str | float | None = None
    samples_per_client: str | int | None = None
    seed: int = 0

    @property
    def by_label(self) -> bool:
        """Whether all domains are pooled and their images dealt out by label."""
        return self.kind in _BY_LABEL


def parse_protocol(text: str) -> PartitionRequest:
    """From text such as `domains` or `dirichlet=0.3,clients=10`."""
    first, *others = (part.strip() for part in text.split(","))
    kind, _, value = (piece.strip() for piece in first.partition("="))
    if kind not in _PROTOCOLS:
        raise UserError(f"{unknown_name('protocol', kind, _PROTOCOLS)}; protocols are {_FORMS}")
    takes_value = kind not in ("domains", "one-per-domain")
    if takes_value != bool(value):
        raise UserError(f"protocol {text!r} {'needs a' if takes_value else 'takes no'} value; protocols are {_FORMS}")
    allowed = {"dirichlet": ("clients", "min"), "shards": ("clients",), "iid": ()}.get(kind, ())
    settings: dict[str, str] = {}
    for part in others:
        key, _, setting = (piece.strip() for piece in part.partition("="))
        if key not in allowed or not setting:
            raise UserError(f"protocol {text!r}: {part!r} is not understood; protocols are {_FORMS}")
        settings[key] = setting
    return PartitionRequest(text, kind, value, settings)


def parse_number(raw: str | float, where: str, what: str) -> float:
    """A finite number; `where` and `what` say in the error what was asked for."""
    try:
        value = float(raw)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise UserError(f"{where}: {what}: {raw!r} is not a number")
    return value


def parse_whole(raw: str | float, where: str, what: str, least: int = 1) -> int:
    """A whole number of at least `least`."""
    value = parse_number(raw, where, what)
    if value != int(value) or value < least:
        raise UserError(f"{where}: {what}: {raw!r} is not a whole number of at least {least}")
    return int(value)


def fraction_of(raw: str | float, total: int, of: str) -> int:
    """int(fraction * total), as the papers count, safe from 0.29 * 100 being 28.999..."""
    value = parse_number(raw, "fraction", of)
    if not 0 < value <= 1:
        raise UserError(f"fraction {raw} for {of} is out of range; it must be above 0 and at most 1")
    share = int(value * total + 1e-9)
    if not share:
        raise UserError(
            f"fraction {raw} of {of} ({total} images) is less than one image; give at least {1 / total:.2g}"
        )
    return share

"""The messages of a secure sum as bytes: JSON of a fixed form, read strictly; masked numbers travel as they are."""

import hashlib
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from protofed.errors import BadMessage

_PROTOCOL = b"protofed secure sum 1"
_MOST_SITES = 10_000
_BYTES_PER_SITE = 2_000
"""More than any message has for one site."""

SiteName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$", max_length=200)]
_Key = Annotated[bytes, Field(min_length=32, max_length=32)]
_Hex16 = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
_Share = Annotated[bytes, Field(min_length=52, max_length=52)]
_Sealed = Annotated[bytes, Field(min_length=120, max_length=120)]
"""Two shares and the mark of authenticity."""

M = TypeVar("M", bound="_StrictMessage")


class _StrictMessage(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, ser_json_bytes="hex", val_json_bytes="hex")

    def to_bytes(self) -> bytes:
        """As it is sent."""
        return self.model_dump_json().encode()

    @classmethod
    def read(cls: type[M], content: bytes, sender: str) -> M:
        """From what was sent; anything else is refused in the name of the sender."""
        if len(content) > _BYTES_PER_SITE * _MOST_SITES:
            raise BadMessage(f"{sender}: a message of {len(content)} bytes does not belong to a secure sum")
        try:
            return cls.model_validate_json(content)
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"])[:100]
            raise BadMessage(f"{sender}: {first['msg'][:200]} in {where or 'its message'}") from None


class SumSession(_StrictMessage):
    """Which sum a message belongs to."""

    run: _Hex16
    round: Annotated[int, Field(ge=0)]
    attempt: _Hex16
    """New whenever the keys are."""

    def label(self, purpose: str, *names: str) -> bytes:
        """What a key or a signature is for, so that it is good for nothing else."""
        parts = (self.run, str(self.round), self.attempt, purpose, *names)
        return b"\0".join([_PROTOCOL, *(part.encode() for part in parts)])


class KeyAdvert(_StrictMessage):
    """The public keys of a site for one sum."""

    name: SiteName
    cipher_key: _Key
    mask_key: _Key
    seed_hash: _Key
    """A commitment to the seed of the site's own mask."""
    signature: Annotated[bytes, Field(max_length=200)]

    def signed_text(self, session: SumSession) -> bytes:
        """What the signature is for."""
        return session.label("advertise", self.name) + self.cipher_key + self.mask_key + self.seed_hash


class Roster(_StrictMessage):
    """Everybody who takes part in a sum, as the server lists them."""

    session: SumSession
    adverts: Annotated[tuple[KeyAdvert, ...], Field(strict=False, max_length=_MOST_SITES)]

    def digest(self) -> bytes:
        """The same at two sites where they were told the same."""
        return hashlib.sha256(self.to_bytes()).digest()


class ShareBundle(_StrictMessage):
    """A site's shares for the others, each readable for one of them."""

    sealed: dict[SiteName, _Sealed]


class ShareInbox(_StrictMessage):
    """The others' shares for a site."""

    session: SumSession
    sealed: dict[SiteName, _Sealed]


class Survivors(_StrictMessage):
    """Whose numbers have come."""

    session: SumSession
    names: Annotated[tuple[SiteName, ...], Field(strict=False, max_length=_MOST_SITES)]


class Reveal(_StrictMessage):
    """A site's shares of what is needed to take the masks off the sum."""

    seeds: dict[SiteName, _Share]
    """Of those whose numbers have come."""
    mask_keys: dict[SiteName, _Share]
    """Of those who have agreed on masks and sent no numbers."""

"""The stages of a secure sum as requests to a site and its answers; the sum itself is that of guards/masking."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from protofed.clients import pack, unpack
from protofed.errors import BadMessage
from protofed.guards.masking.messages import SiteName, SumSession

Stage = Literal["train", "share", "mask", "unmask"]
_Text = Annotated[str, Field(max_length=100)]
_FEW = 100


class StageRequest(BaseModel):
    """The header of a request; the body is a job, or a message of the sum."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    stage: Stage
    session: SumSession
    clients: Annotated[int, Field(ge=3)]
    """How many were invited, for whose sum the grid has room."""
    losses: Annotated[tuple[_Text, ...], Field(max_length=_FEW)] = ()
    """The terms of the loss to be added up with the upload."""
    scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    """By which losses times samples are divided."""

    def to_bytes(self, body: bytes) -> bytes:
        """As it is sent."""
        return pack(self.model_dump(), body)

    @classmethod
    def read(cls, content: bytes) -> tuple["StageRequest", bytes]:
        """Header and body."""
        header, body = unpack(content, "server")
        return _validated(cls, header, "server"), body


class TrainReport(BaseModel):
    """What travels in clear with a site's keys, once it has trained; its losses are in the sum."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    samples: Annotated[int, Field(ge=0, le=10**12)]
    losses: Annotated[tuple[_Text, ...], Field(max_length=_FEW)]
    """The names of the terms."""
    members: Annotated[tuple[SiteName, ...], Field(max_length=10_000)]
    """Whose public keys the site was given."""


def stage_reply(stage: Stage, body: bytes, report: TrainReport | None = None) -> bytes:
    """A site's answer."""
    return pack({"masked": stage, "report": None if report is None else report.model_dump()}, body)


def read_stage_reply(stage: Stage, content: bytes, sender: str) -> tuple[TrainReport | None, bytes]:
    """What is in a site's answer; a refusal is raised as a BadMessage, with the site it blames if it names one."""
    header, body = unpack(content, sender)
    if header.get("result") == "failed":
        raise SiteRefusal(str(header.get("reason"))[:500], header.get("blames"))
    if header.get("masked") != stage:
        raise BadMessage(f"{sender}: it answers another question")
    return (_validated(TrainReport, header.get("report"), sender) if stage == "train" else None), body


class SiteRefusal(BadMessage):
    """A site that does not go on, and whose fault it thinks this is."""

    def __init__(self, reason: str, blames: Any) -> None:
        super().__init__(reason)
        self.blames = blames if isinstance(blames, str) else None


def _validated(kind: type[Any], content: Any, sender: str) -> Any:
    try:
        return TypeAdapter(kind).validate_python(content)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        raise BadMessage(f"{sender}: {first['msg'][:200]} in a stage of a secure sum") from None

"""What a site allows: its own policy file, independent of the server.

methods = ["i2pfl", "fedavg"]     # nothing else is trained here
rounds = 200                      # most rounds of a run
total_rounds = 1000               # most rounds of all runs together
epsilon = 8.0                     # most that all runs together may cost; needs a guard with source=system
evaluations = 16                  # most scores in a round
message_bytes = 50_000_000        # largest message that leaves
guard = "clip=1.0,noise=0.5"      # at least this much is done to what leaves
secure_sites = 5                  # fewest sites among whom a masked upload hides
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from protofed.errors import UserError
from protofed.guards import parse_guard
from protofed.guards.masking import FEWEST


class Refused(Exception):
    """The site does not do this; the text says why."""


class Policy(BaseModel):
    """The limits; without one everything is allowed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    methods: tuple[str, ...] | None = None
    rounds: Annotated[int, Field(ge=1)] | None = None
    total_rounds: Annotated[int, Field(ge=1)] | None = None
    epsilon: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    evaluations: Annotated[int, Field(ge=0)] = 16
    message_bytes: Annotated[int, Field(ge=1)] | None = None
    guard: str | None = None
    secure_sites: Annotated[int, Field(ge=FEWEST)] | None = None

    @classmethod
    def read(cls, path: Path | None) -> "Policy":
        """From a TOML file."""
        if path is None:
            return cls()
        try:
            policy = cls(**tomllib.loads(path.read_text()))
            parse_guard(policy.guard)
        except OSError:
            raise UserError(f"there is no policy file {path}") from None
        except tomllib.TOMLDecodeError as error:
            raise UserError(f"the policy {path} cannot be read: {error}") from None
        except ValidationError as error:
            first = error.errors()[0]
            raise UserError(f"the policy {path}: {first['loc'][0]}: {first['msg']}") from None
        except UserError as error:
            raise UserError(f"the policy {path}: {error}") from None
        return policy

    def admit(self, method: str, rounds: int, guard: str | None) -> None:
        """Refuse a run that goes beyond it."""
        if self.methods is not None and method not in self.methods:
            raise Refused(f"its policy allows {', '.join(self.methods)}, not {method}")
        if self.rounds is not None and rounds > self.rounds:
            raise Refused(f"its policy allows {self.rounds} rounds, not {rounds}")
        if not parse_guard(guard).at_least(parse_guard(self.guard)):
            raise Refused(f"its policy requires the guard {self.guard}; the run has {guard or 'none'}")
        if self.epsilon is not None and not parse_guard(guard).promises:
            raise Refused(f"its policy has a budget of epsilon {self.epsilon:g}, but the run guarantees none")
        if self.epsilon is not None and parse_guard(guard).source != "system":
            raise Refused(
                "its policy has a budget of epsilon, but the server can compute noise from the seed: use source=system"
            )

    def check_size(self, size: int) -> None:
        """Refuse to send a message that is too large."""
        if self.message_bytes is not None and size > self.message_bytes:
            raise Refused(f"its policy allows messages of at most {self.message_bytes} bytes; this one has {size}")

    def as_dict(self) -> Mapping[str, Any]:
        """For display."""
        return self.model_dump(exclude_none=True, exclude_defaults=True)

"""What a guard is asked to do: one definition for `--guard`, for Python and for run.json."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from protofed.errors import UserError, unknown_name

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Level = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Guard(BaseModel):
    """The settings of `--guard`; the default guards nothing."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    unit: Literal["sample", "client"] = Field(
        "sample",
        description=(
            "whose contribution to the uploads is bounded: one sample's (or image's), or everything a client holds"
        ),
    )
    epsilon: _Positive | None = Field(
        None, description="privacy budget of the whole run; the noise follows from it, and clip defaults to 1"
    )
    clip: _Positive | None = Field(
        None, description="largest norm of a sample's gradient and features, or of a client's weight update"
    )
    noise: _Level = Field(0.0, description="Gaussian noise, as a multiple of what one unit can change")
    row_clip: _Positive | None = Field(None, description="the same as clip for feature rows and prototypes only")
    row_noise: _Positive | None = Field(None, description="the same as noise for feature rows and prototypes only")
    train: Literal["private", "plain"] = Field(
        "private", description="train with DP-SGD, or without: then nothing is guaranteed for one sample"
    )
    subsample: float = Field(
        1.0, gt=0, le=1, description=("fraction of its samples from which a client computes prototypes or banks")
    )
    quantise: int | None = Field(None, ge=1, le=8, description="bits per number that is sent")
    secure: bool = Field(False, description="the server learns only sums over clients, from masked numbers")
    secure_range: _Positive = Field(32.0, description="largest number that secure aggregation can carry")
    delta: float = Field(1e-5, gt=0, lt=1, description="the delta of (epsilon, delta)")
    accountant: Literal["rdp", "prv", "zcdp"] = Field(
        "rdp", description="how epsilon is computed; zcdp if epsilon is given and nothing is trained"
    )
    source: Literal["seed", "system"] = Field(
        "seed", description="noise from the run's seed, or from the operating system's secure source"
    )

    among: int = Field(1, ge=1, description="clients that share the noise on a secure sum; set by the run")

    @field_validator("unit", mode="before")
    @classmethod
    def _image_is_a_sample(cls, unit: Any) -> Any:
        return "sample" if unit == "image" else unit

    @property
    def effective_row_clip(self) -> float | None:
        """Largest norm of a feature row or prototype: row_clip, or clip where that is not given."""
        return self.row_clip if self.row_clip is not None else self.clip

    @property
    def effective_row_noise(self) -> float:
        """Noise on feature rows and prototypes: row_noise, or noise where that is not given."""
        return self.row_noise if self.row_noise is not None else self.noise

    @property
    def noisy(self) -> bool:
        """Whether anything is noised."""
        return self.noise > 0 or self.effective_row_noise > 0 or self.epsilon is not None

    @property
    def trains_privately(self) -> bool:
        """Whether gradients are clipped sample by sample and noised."""
        return self.unit == "sample" and self.train == "private" and self.noisy

    @property
    def promises(self) -> bool:
        """Whether there is an epsilon for everything that is uploaded."""
        return self.noisy and (self.unit == "client" or self.trains_privately)

    def at_least(self, other: "Guard") -> bool:
        """Whether it clips, noises and hides no less than another, in everything that the other does."""
        same_bounds = self.unit == other.unit and self.train in ("private", other.train)
        return (
            self._spends_no_more(other)
            and (same_bounds or other.effective_row_clip is None)
            and _no_looser(self.clip, other.clip)
            and _no_looser(self.effective_row_clip, other.effective_row_clip)
            and _no_looser(self.quantise, other.quantise)
            and self.noise >= other.noise
            and self.effective_row_noise >= other.effective_row_noise
            and (self.delta <= other.delta or not other.noisy)
            and self.subsample <= other.subsample
            and (self.secure or not other.secure)
            and (self.source == "system" or other.source == "seed")
        )

    def _spends_no_more(self, other: "Guard") -> bool:
        """Whether it keeps to the other's epsilon; noise that is shared under a secure sum is not each client's own."""
        if other.epsilon is None:
            return True
        own_noise = other.secure or not self.secure
        return self.epsilon is not None and self.epsilon <= other.epsilon and self.unit == other.unit and own_noise


def _no_looser(bound: float | None, other: float | None) -> bool:
    return other is None or (bound is not None and bound <= other)


UNGUARDED = Guard.model_validate({})


def parse_guard(text: str | None) -> Guard:
    """A guard from text such as `epsilon=3,delta=1e-5`, `clip=1.0,noise=0.5` or `unit=client,clip=1,noise=0.1`."""
    settings: dict[str, str] = {}
    known = Guard.model_fields.keys() - {"among"}
    for item in [] if text is None else text.split(","):
        key, equals, value = (part.strip() for part in item.partition("="))
        if not equals:
            raise UserError(f"guard={text} is not valid; use KEY=VALUE,..., for example clip=1.0,noise=0.5")
        if key not in known:
            raise unknown_name("setting of a guard", key, known)
        settings[key] = value
    try:
        guard = Guard.model_validate(settings)
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0])
        reason = first["msg"][0].lower() + first["msg"][1:]
        raise UserError(f"guard: {key}={settings[key]} is not valid: {reason}") from None
    if guard.epsilon is not None:
        return _with_budget(guard)
    if guard.noisy and (guard.clip is None or guard.noise == 0):
        raise UserError("guard: noise is a multiple of clip, so give both, for example clip=1.0,noise=0.5")
    return guard


def _with_budget(guard: Guard) -> Guard:
    """Of which epsilon is named."""
    if guard.noise or guard.row_noise is not None:
        raise UserError("guard: noise follows from epsilon; give only one of them")
    if guard.train == "plain":
        raise UserError("guard: train=plain guarantees nothing, so it has no epsilon; omit one of them")
    return guard if guard.clip is not None else guard.model_copy(update={"clip": 1.0})

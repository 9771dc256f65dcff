"""What clients are asked to do, and what they answer."""

from dataclasses import dataclass
from typing import Any, Literal

from numpy.typing import NDArray

from protofed.records import Bytes


@dataclass(frozen=True)
class Train:
    """Train one client for one round, starting from the broadcast that comes with the job."""

    round: int
    client: str


@dataclass(frozen=True)
class TrainGroup:
    """Train several clients that receive the same broadcast, one after the other, and add their uploads up.

    For methods that see nothing but sums; only engines whose clients share a machine are asked.
    """

    round: int
    clients: tuple[str, ...]


@dataclass(frozen=True)
class Evaluate:
    """Score one model on one test set.

    `global`: the server's model, which comes with the job, on a domain's test set. `personal`: what `client` would
    use now, the broadcast loaded over its private part. `local`: the client's model as its training left it.
    Without a domain the test set is the client's own hold-out, or what it keeps of its training data to validate on;
    several clients that would use the very same model are then scored together.
    """

    view: Literal["global", "personal", "local"]
    round: int
    client: str | None
    domain: str | None
    validates: bool = False
    alike: tuple[str, ...] = ()
    """Further clients with the same model, whose own test sets are scored as well."""
    probabilities: bool = False
    """Whether the class probabilities of every image are wanted (`Predicted`) rather than the score."""


@dataclass(frozen=True)
class Predict:
    """Class probabilities of the model that comes with the job on a domain's test set; ensembles are made of them."""

    round: int
    domain: str
    member: str
    """Whose model it is."""


@dataclass(frozen=True)
class Project:
    """Move a client's part prototypes onto its own nearest training patches; the result stays with the client.

    `domain` names the test set for the accuracy before and after, as in `Evaluate`.
    """

    round: int
    client: str
    domain: str | None


@dataclass(frozen=True)
class Summarise:
    """The class means of a client's features under the initial network, from which a head can start."""

    round: int
    client: str


Job = Train | TrainGroup | Summarise | Evaluate | Predict | Project


@dataclass(frozen=True)
class Trained:
    """A client's encoded upload, and what it reports beside it."""

    blob: bytes
    size: Bytes
    loss: dict[str, float]
    """Mean of each term of the loss over the samples seen."""
    samples: int
    """Samples trained on, each epoch counted."""


@dataclass(frozen=True)
class MaskingCost:
    """What it took to add uploads up without seeing them: keys, shares and lists beside the masked numbers."""

    up: int
    """Bytes."""
    down: int
    seconds: dict[str, float]
    """Of each stage."""


@dataclass(frozen=True)
class TrainedGroup:
    """The encoded sums of a group's uploads, and the result of each client, in the order of the job."""

    blob: bytes
    each: tuple["Trained | Failed", ...]
    """Without uploads of their own."""
    masking: MaskingCost | None = None
    """Where the uploads were masked; losses are then the mean over all clients."""


@dataclass(frozen=True)
class Score:
    """How many test samples were classified correctly."""

    correct: int
    total: int
    parts: tuple["Score", ...] = ()
    """Client by client, where the test sets are their own."""


@dataclass(frozen=True)
class Predicted:
    """Class probabilities, [n, C]; an array, because tensors cross process borders in ways of their own."""

    probabilities: NDArray[Any]


@dataclass(frozen=True)
class Failed:
    """A job that gave no result, and why; the trace is for debugging a method."""

    reason: str
    trace: str = ""
    not_finite: bool = False
    """Whether it failed because training ended in NaN or infinity."""


@dataclass(frozen=True)
class DiskFailed(Failed):
    """A job that could not write or read its files: no fault of its client, and no reason to go on without it."""


@dataclass(frozen=True)
class Absent(Failed):
    """A job whose site did not answer."""


@dataclass(frozen=True)
class Projected:
    """How a client's model scores around a projection."""

    before: Score
    """With its part prototypes as trained."""
    after: Score
    """With each of them at a patch of a training image."""


Result = Trained | TrainedGroup | Score | Predicted | Projected | Failed

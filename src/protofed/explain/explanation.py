"""What is said about one image: the prediction, and the evidence for and against it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protofed.explain.maps import COARSE, Box
from protofed.text import percent

FloatArray = NDArray[np.float32]


@dataclass(frozen=True)
class Evidence:
    """One prototype and what it says about one image."""

    prototype: int
    """Its number; for class prototypes that of the class."""
    label: int
    """The class it is of."""
    similarity: float
    contribution: float
    """Of part prototypes weight x similarity, which add up to the logit of the predicted class; of class prototypes
    the similarity beyond that of an average class."""
    lift: float
    """What its place adds to the decision, beyond an average place; negative: it speaks against it."""
    map: FloatArray
    """Similarity at every pixel, [H, W]."""
    box: Box | None
    """Around the peak of the map; None: the map is flat."""
    positions: tuple[int, int]
    """Size of the map before it was enlarged."""
    scattered: bool = False
    """Whether the map has other peaks far from the box."""

    @property
    def speaks_for(self) -> bool:
        """For the predicted class, or against it."""
        return self.lift > 0

    @property
    def coarse(self) -> bool:
        """Whether the map has too few positions for a meaningful box."""
        return min(self.positions) < COARSE

    @property
    def spoken(self) -> FloatArray:
        """Positive where a place speaks for the prediction, negative where it speaks against it.

        A place that is no more like the prototype than an average one says nothing.
        """
        above: FloatArray = np.maximum(self.map - self.map.mean(), 0)
        return above if self.speaks_for else -above

    def words(self, classes: Sequence[str]) -> str:
        """What it is, in few words."""
        return f"{classes[self.label]} #{self.prototype}"

    def as_dict(self, classes: Sequence[str]) -> dict[str, Any]:
        """As explanations.json has it."""
        return {
            "prototype": self.prototype,
            "class": classes[self.label],
            "similarity": self.similarity,
            "contribution": self.contribution,
            "lift": self.lift,
            "for": self.speaks_for,
            "box": None if self.box is None else list(self.box),
            "positions": list(self.positions),
            "scattered": self.scattered,
        }


@dataclass(frozen=True, repr=False)
class Explanation:
    """What one client's model says about one image, and why."""

    client: str
    probabilities: tuple[float, ...]
    evidence: tuple[Evidence, ...]
    """Those that spoke most; first the part that spoke most for the prediction, or the nearest class prototype."""

    @property
    def predicted(self) -> int:
        """The class."""
        return max(range(len(self.probabilities)), key=self.probabilities.__getitem__)

    @property
    def strongest(self) -> Evidence:
        """The part that spoke most for the prediction, or the nearest class prototype."""
        return self.evidence[0]

    def __repr__(self) -> str:
        best = self.probabilities[self.predicted]
        return f"<Explanation by {self.client}: class {self.predicted}, {percent(best)} %, {len(self.evidence)} parts>"

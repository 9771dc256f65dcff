"""Whether the boxed part of an image matters to the decision.

Deletion: the pixels of the box, most active first, are blurred away; the probability of the predicted class should
fall. Insertion: they are put into the blurred image; it should rise. Both are set beside random boxes of equal size.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from protofed.explain.evidence import has_parts, place_projected
from protofed.explain.explanation import Evidence, Explanation
from protofed.explain.maps import Box, random_box
from protofed.runs.opened import OpenRun

FRACTIONS = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Of the box's pixels."""

_BLUR = 0.15
"""Standard deviation of the blur, as a part of the image's side: lesions vanish, the illumination stays."""


@dataclass(frozen=True)
class Curves:
    """Mean probability of the predicted class as pixels are changed, in the order of `FRACTIONS`."""

    deletion: tuple[float, ...]
    deletion_random: tuple[float, ...]
    insertion: tuple[float, ...]
    insertion_random: tuple[float, ...]
    images: int
    deletion_wins: float
    """Share of images in which the box costs more than random ones do on average."""
    insertion_wins: float
    """Share of images in which the box brings more than random ones do on average."""

    @property
    def deletion_gap(self) -> float:
        """How much more the box costs than a random one of its size when it is blurred away."""
        return self.deletion_random[-1] - self.deletion[-1]

    @property
    def insertion_gap(self) -> float:
        """How much more the box brings than a random one of its size when it is put in."""
        return self.insertion[-1] - self.insertion_random[-1]

    def as_dict(self) -> dict[str, Any]:
        """As explanations.json has it."""
        curves = {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}
        return {**curves, "deletion_gap": self.deletion_gap, "insertion_gap": self.insertion_gap}


def faithfulness(
    opened: OpenRun,
    client: str,
    pixels: Tensor,
    explanations: Sequence[Explanation],
    rng: np.random.Generator,
    randoms: int = 4,
    projected: bool = False,
) -> Curves | None:
    """Curves over all images with a box; None where every map is flat."""
    net, at = opened.model_of(client)
    if projected and has_parts(net):
        place_projected(opened, client, net)
    probabilities: list[NDArray[np.float64]] = []
    for image, explanation in zip(pixels, explanations, strict=True):
        box = explanation.strongest.box
        if box is None:
            continue
        size = (image.shape[1], image.shape[2])
        boxes = [box, *(random_box(box, size, rng) for _ in range(randoms))]
        width = size[1]
        orders = [
            _by_activation(explanation.strongest, box),
            *(rng.permutation(_places(each, width)) for each in boxes[1:]),
        ]
        versions = _versions(image.float(), orders)
        x = opened.normalised(versions / 255)
        with torch.no_grad(), net.eval():
            probability = opened.method.predict(net, x, at)[:, explanation.predicted]
        probabilities.append(probability.double().numpy().reshape(2, len(boxes), len(FRACTIONS)))
    if not probabilities:
        return None
    curves = np.stack(probabilities)  # [images, deletion or insertion, box or random ones, fractions]
    boxed, chance = curves[:, :, 0], curves[:, :, 1:].mean(2)
    ahead = boxed[:, :, -1] - chance[:, :, -1]
    return Curves(
        deletion=tuple(boxed[:, 0].mean(0).tolist()),
        deletion_random=tuple(chance[:, 0].mean(0).tolist()),
        insertion=tuple(boxed[:, 1].mean(0).tolist()),
        insertion_random=tuple(chance[:, 1].mean(0).tolist()),
        images=len(probabilities),
        deletion_wins=float((ahead[:, 0] < 0).mean()),
        insertion_wins=float((ahead[:, 1] > 0).mean()),
    )


def _by_activation(evidence: Evidence, box: Box) -> NDArray[np.int64]:
    """The places in the box, flat, most active first."""
    places = _places(box, evidence.map.shape[1])
    return places[np.argsort(-evidence.map.ravel()[places], kind="stable")]


def _places(box: Box, width: int) -> NDArray[np.int64]:
    rows, columns = np.mgrid[box.top : box.bottom, box.left : box.right]
    return np.asarray(rows * width + columns).ravel()


def _versions(image: Tensor, orders: Sequence[NDArray[np.int64]]) -> Tensor:
    """All images to be looked at, [2 x boxes x fractions, C, H, W]: with pixels blurred away, then put in."""
    flat, blurred = image.flatten(1), blur(image).flatten(1)
    made = []
    for start, source in ((flat, blurred), (blurred, flat)):
        for order in orders:
            for fraction in FRACTIONS:
                changed = torch.from_numpy(order[: round(fraction * len(order))])
                version = start.clone()
                version[:, changed] = source[:, changed]
                made.append(version)
    return torch.stack(made).view(-1, *image.shape)


def blur(image: Tensor) -> Tensor:
    """A Gaussian blur of [C, H, W], wide enough that small things vanish."""
    height, width = image.shape[1:]
    down, across = (_spread(side, max(height, width) * _BLUR).to(image.dtype) for side in (height, width))
    return down @ image @ across.T


def _spread(side: int, sigma: float) -> Tensor:
    distance = torch.arange(side)[:, None] - torch.arange(side)
    return F.normalize(torch.exp(-(distance**2) / (2 * sigma**2)), p=1, dim=1)

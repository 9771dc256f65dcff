"""Exact evidence: where a linear head reads the mean over patches, every logit is a sum over patches.

    logit_c = sum over patches p of w_c' f_p / (P |phi(x)|) + b_c

with P patches, phi(x) their mean, and |phi(x)| = 1 where features are not scaled to length 1; behind a random
projection R it is w_c' R f_p and |R phi(x)|. So a map is no estimate of what mattered: its values add up to the logit.

Finer maps come from copies of the image that are shifted by parts of a patch. Each copy has exact maps of its own;
their mean, every value at the place it was taken from, adds up to the mean of the copies' logits, which is near the
image's own logit but not equal to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from protofed.errors import UserError
from protofed.explain.explanation import Evidence, Explanation, FloatArray
from protofed.explain.maps import enlarged, peak_of
from protofed.method import At, Method
from protofed.models.freezing import unwrapped
from protofed.models.net import Net
from protofed.models.unit_length import RandomProjection, UnitLength

LARGEST_GAP = 1e-5
"""By which a map and its bias may miss their logit, in parts of the logit (or of 1 where that is smaller)."""

_LEAST_PEAK = 0.1
"""Of a map's largest value in size."""


@dataclass(frozen=True)
class LogitEvidence(Evidence):
    """What every patch adds to the logit of a class, or to its lead over another class."""

    rival: int | None = None
    """The class over which it leads; None: the logit itself."""
    patches: FloatArray = None  # type: ignore[assignment]
    """[h, w], at the network's own resolution: they add up to `contribution`, and with the bias to `logit`."""
    bias: float = 0.0
    logit: float = 0.0
    """The network's own, or its lead over the rival's."""
    is_prediction: bool = True
    shifted_logit: float | None = None
    """The mean over shifted copies, which is what `map` adds up to; None: there were none."""

    @property
    def spoken(self) -> FloatArray:
        """Positive where a place speaks for the prediction."""
        return self.map if self.is_prediction else -self.map

    def words(self, classes: Sequence[str]) -> str:
        """What it is evidence for, in few words."""
        if self.rival is not None:
            return f"{classes[self.label]}, not {classes[self.rival]}"
        return f"{classes[self.label]} alone"

    def as_dict(self, classes: Sequence[str]) -> dict[str, Any]:
        """As explanations.json has it."""
        return super().as_dict(classes) | {
            "rival": None if self.rival is None else classes[self.rival],
            "bias": self.bias,
            "logit": self.logit,
            "shifted_logit": self.shifted_logit,
            "map": self.patches.tolist(),
        }


@dataclass(frozen=True)
class PooledHead:
    """A linear head that reads the mean over the patches of a stage."""

    stage: str
    weight: Tensor
    """[C, channels of a patch], a projection included."""
    bias: Tensor
    projection: Tensor | None
    unit: bool
    """Whether features have length 1."""

    def maps(self, patches: Tensor) -> Tensor:
        """What every place adds to every logit, [n, C, h, w] from [n, channels, h, w], in float64."""
        wide = patches.double()
        mean = wide.mean((2, 3))
        if self.projection is not None:
            mean = mean @ self.projection.T
        length = mean.norm(dim=1).clamp(min=1e-12) if self.unit else mean.new_ones(len(mean))
        share = 1 / (length * patches.shape[2] * patches.shape[3])
        return torch.einsum("cd,ndhw->nchw", self.weight, wide) * share[:, None, None, None]


def pooled_head(net: Net) -> PooledHead | None:
    """The linear head on pooled patches that a network ends in; None where it ends in something else."""
    stages = {name: unwrapped(stage) for name, stage in net.model.stages().items()}
    names = list(stages)
    linear = stages[names.pop()]
    if not isinstance(linear, nn.Linear):
        return None
    unit = isinstance(stages[names[-1]], UnitLength)
    if unit:
        names.pop()
    projection = None
    if isinstance(last := stages[names[-1]], RandomProjection):
        projection = last.matrix.detach().double()
        names.pop()
    if len(names) < 2 or not _averages(stages[names.pop()]):
        return None
    weight = linear.weight.detach().double()
    bias = weight.new_zeros(len(weight)) if linear.bias is None else linear.bias.detach().double()
    return PooledHead(names[-1], weight if projection is None else weight @ projection, bias, projection, unit)


def _averages(stage: nn.Module) -> bool:
    """Whether a stage is the mean over all places and nothing else."""
    layers = list(stage) if isinstance(stage, nn.Sequential) else [stage]
    if not isinstance(layers[0], nn.AdaptiveAvgPool2d):
        return False
    return layers[0].output_size in (1, (1, 1)) and all(isinstance(layer, nn.Flatten) for layer in layers[1:])


def decides_by_patches(net: Net, method: Method) -> bool:
    """Whether a prediction is the softmax of logits that are sums over patches."""
    return method.predicts_alike and pooled_head(net) is not None


@torch.no_grad()
def explain_exactly(
    net: Net, method: Method, at: At, client: str, x: Tensor, top: int, shifts: int = 1
) -> list[Explanation]:
    """Of every image: why its class and not the runner-up; the class alone; then the others, most probable first."""
    head = pooled_head(net)
    assert head is not None, "asked for beforehand"
    with net.eval():
        probabilities = method.predict(net, x, at)
        maps = head.maps(net.features(x, head.stage))
        logits = net(x).double()
        _refuse_gap(maps.sum((2, 3)) + head.bias, logits)
        fine, shifted = (None, None) if shifts == 1 else _over_shifts(net, head, x, shifts)
    explanations = []
    for i in range(len(x)):
        picture = enlarged(maps[i], (x.shape[2], x.shape[3])) if fine is None else fine[i]
        of_image = _Logits(maps[i], picture, head.bias, logits[i], None if shifted is None else shifted[i], shifts)
        ranked = probabilities[i].argsort(descending=True, stable=True).tolist()
        views = [of_image.evidence(label, ranked[0]) for label in ranked[: max(1, top - 1)]]
        if len(ranked) > 1:
            views = [of_image.lead(ranked[0], ranked[1]), *views]
        explanations.append(Explanation(client, tuple(probabilities[i].tolist()), tuple(views[:top])))
    return explanations


def _refuse_gap(sums: Tensor, logits: Tensor) -> None:
    gap = ((sums - logits).abs() / logits.abs().clamp(min=1)).max().item()
    if gap > LARGEST_GAP:
        raise UserError(f"the maps miss the logits by {gap:.1e}: this network's head uses more than its patches")


@dataclass(frozen=True)
class _Logits:
    """One image: the maps of all classes."""

    maps: Tensor
    pictures: Tensor
    bias: Tensor
    logits: Tensor
    shifted: Tensor | None
    shifts: int

    def evidence(self, label: int, predicted: int) -> LogitEvidence:
        """A class by itself."""
        made = self._made(torch.eye(len(self.logits), dtype=self.maps.dtype)[label], label)
        if label == predicted:
            return made
        return replace(made, is_prediction=False, lift=-made.lift)

    def lead(self, label: int, rival: int) -> LogitEvidence:
        """A class against another."""
        identity = torch.eye(len(self.logits), dtype=self.maps.dtype)
        return replace(self._made(identity[label] - identity[rival], label), rival=rival)

    def _made(self, sign: Tensor, label: int) -> LogitEvidence:
        """The logits times `sign`, added up."""
        patches, picture = (torch.einsum("c,chw->hw", sign, each) for each in (self.maps, self.pictures))
        values = picture.float().numpy()
        # Where no place speaks for the class, the least negative one is no peak.
        peak = peak_of(values) if values.max() > _LEAST_PEAK * np.abs(values).max() else None
        return LogitEvidence(
            prototype=label,
            label=label,
            similarity=float(sign @ self.logits),
            contribution=float(patches.sum()),
            lift=float(patches.sum()),
            map=values,
            box=None if peak is None else peak.box,
            positions=(patches.shape[0] * self.shifts, patches.shape[1] * self.shifts),
            scattered=peak is not None and peak.scattered,
            patches=patches.numpy(),
            bias=float(sign @ self.bias),
            logit=float(sign @ self.logits),
            shifted_logit=None if self.shifted is None else float(sign @ self.shifted),
        )


def _over_shifts(net: Net, head: PooledHead, x: Tensor, shifts: int) -> tuple[Tensor, Tensor]:
    """Maps by pixel, [n, C, H, W], and logits, [n, C]: the means over shifts x shifts copies of the images."""
    size = (x.shape[2], x.shape[3])
    _, *places = net.model.feature_shape((x.shape[1], *size), head.stage)
    across_and_down = [_steps(side, number, shifts) for side, number in zip(size, places, strict=True)]
    pixels = x.new_zeros(len(x), len(head.bias), *size, dtype=torch.float64)
    logits = pixels.new_zeros(len(x), len(head.bias))
    for down, right in product(*across_and_down):
        maps = head.maps(net.features(_shifted(x, down, right), head.stage))
        rows, columns = _spread(size[0], places[0], down), _spread(size[1], places[1], right)
        pixels += torch.einsum("yh,nchw,xw->ncyx", rows, maps, columns)
        logits += maps.sum((2, 3)) + head.bias
    return pixels / shifts**2, logits / shifts**2


def _steps(side: int, places: int, shifts: int) -> list[int]:
    """By how many pixels copies are shifted: parts of a patch, to both sides."""
    return [round((part - (shifts - 1) / 2) * side / places / shifts) for part in range(shifts)]


def _shifted(x: Tensor, down: int, right: int) -> Tensor:
    """The image seen from a place further down and right, its edge repeated where there is nothing."""
    height, width = x.shape[2:]
    margin = (abs(right), abs(right), abs(down), abs(down))
    wide = functional.pad(x, margin, mode="replicate")
    top, left = abs(down) + down, abs(right) + right
    return wide[:, :, top : top + height, left : left + width]


@cache
def _spread(side: int, places: int, shift: int) -> Tensor:
    """[side, places]: how the value of each place is spread over the pixels it stands for, inside the image."""
    pixel = np.arange(side)[:, None]
    edges = np.arange(places + 1) * side / places + shift
    low, high = edges[:-1].clip(0, side), edges[1:].clip(0, side)
    share = np.clip(np.minimum(pixel + 1, high) - np.maximum(pixel, low), 0, None)
    return torch.from_numpy(share / share.sum(0, keepdims=True))

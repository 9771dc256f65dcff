"""Features for the Fréchet distance: Inception-v3 if its weights are available, else a small fixed network."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from protofed.audit.inception import Inception
from protofed.audit.metrics import frechet_distance
from protofed.data.images import to_channels
from protofed.errors import UserError
from protofed.models import build_model, read_weights
from protofed.seeding import stable_seed

_FIXED_WIDTH = 8


@dataclass(frozen=True)
class Extractor:
    """A network that never changes, and what distances by its features are called."""

    label: str
    name: str
    features: Callable[[Tensor], Tensor]

    @torch.no_grad()
    def distance(self, x: Tensor, y: Tensor, batch: int = 64) -> float | None:
        """The Fréchet distance of two sets of images; None for fewer than two."""
        if min(len(x), len(y)) < 2:
            return None
        features = [
            torch.cat([self.features(to_channels(part, 3)) for part in torch.split(each, batch)]) for each in (x, y)
        ]
        return float(frechet_distance(*features))


def make_extractor(inception: Path | None = None) -> Extractor:
    """Inception-v3 at the weights of a file, or the fixed network."""
    if inception is None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(stable_seed(0, "audit extractor"))
            fixed = build_model("resnet10", (3, 32, 32), 2, {"width": str(_FIXED_WIDTH)}).eval()
        return Extractor("FID-like", f"untrained resnet10 of width {_FIXED_WIDTH}, fixed seed", fixed.features)
    network = Inception()
    stored = read_weights(inception)
    own = network.state_dict()
    wanted = {name: tensor for name, tensor in own.items() if tensor.is_floating_point()}
    lacking = [name for name, tensor in wanted.items() if name not in stored or stored[name].shape != tensor.shape]
    if lacking:
        raise UserError(f"{inception} is not Inception-v3: {lacking[0]} is missing or has another shape")
    network.load_state_dict({**own, **{name: stored[name] for name in wanted}})
    return Extractor("FID", f"Inception-v3 ({inception.name})", network.eval())

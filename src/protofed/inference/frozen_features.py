"""What frozen stages make of any images, for a finished run: as in training on ONNX Runtime, all cores and kept."""

from collections.abc import Iterator
from contextlib import contextmanager
from math import prod

import torch
from torch import Tensor

from protofed.clients import RunContext
from protofed.clients.features import MEMORY_LIMIT
from protofed.clients.frozen import Backbone, frozen_prefix
from protofed.clients.samples import ClientSamples, SampleBatch, SampleSet
from protofed.data import Augment
from protofed.data.images import Images
from protofed.data.pixels import Pixels
from protofed.method import At
from protofed.models.net import Net, Shortcut
from protofed.runs.opened import batches
from protofed.system import cores

_TOGETHER = 512
"""Images whose features are looked up at once."""


class FrozenFeatures:
    """Lets the models of a run predict; what they have in common is computed once for each image."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._backbones: dict[int, Backbone | None] = {}
        self._kept: dict[tuple[int, int], tuple[Pixels, Tensor]] = {}

    @torch.no_grad()
    def probabilities(self, net: Net, at: At, pixels: Pixels, batch: int, architecture: int = 0) -> Tensor:
        """Class probabilities of images; by torch alone where nothing is frozen."""
        method, normalise, dtype = self._context.method, self._context.dataset.normalise, self._context.dtype
        with net.eval():
            if self.backbone(architecture) is None:
                return torch.cat([method.predict(net, normalise(x, dtype), at) for x in batches(pixels, batch)])
            unlabelled = Images(pixels, torch.zeros(len(pixels), dtype=torch.int64))
            samples = ClientSamples(
                unlabelled, normalise, Augment(), dtype, torch.device("cpu"), key=SampleSet("test", "")
            )
            with self._looking_up(net, samples, pixels, architecture):
                return torch.cat([method.predict(net, x, at) for x, _ in samples.batches(_TOGETHER)])

    def backbone(self, architecture: int = 0) -> Backbone | None:
        """The frozen stages of a network, where all clients have the same; None where there are none."""
        if architecture not in self._backbones:
            context = self._context
            stages = frozen_prefix(context, architecture)
            self._backbones[architecture] = Backbone(stages, context, cores()) if stages else None
        return self._backbones[architecture]

    @contextmanager
    def _looking_up(self, net: Net, samples: ClientSamples, pixels: Pixels, architecture: int) -> Iterator[None]:
        """Inside: the net skips its frozen stages for batches of these samples."""
        part = self._context.frozen[architecture]

        def lookup(x: Tensor) -> Tensor | None:
            source = x.source if isinstance(x, SampleBatch) else None
            if source is None:
                return None
            return self._features(samples, pixels, source[1], architecture).view(-1, *part.shape)

        before = net.shortcut
        net.shortcut = Shortcut({}, len(part.prefix), lookup)
        try:
            yield
        finally:
            net.shortcut = before

    def _features(self, samples: ClientSamples, pixels: Pixels, rows: Tensor, architecture: int) -> Tensor:
        """Of some rows; of all at once, for the next model, where they fit into memory."""
        backbone, part = self.backbone(architecture), self._context.frozen[architecture]
        assert backbone is not None, "asked for only where there is one"
        if len(pixels) * prod(part.shape) * self._context.dtype.itemsize > MEMORY_LIMIT:
            return backbone.features(samples, rows)
        key = (id(pixels), architecture)
        if key not in self._kept:
            parts = torch.split(torch.arange(len(pixels)), _TOGETHER)
            self._kept[key] = (pixels, torch.cat([backbone.features(samples, each) for each in parts]))
        return self._kept[key][1][rows]

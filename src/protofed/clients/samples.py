"""One client's training images as its training loop sees them."""

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from protofed.data import Augment, Images, Normalise


class SampleSet(NamedTuple):
    """Samples that are always read together and in one order."""

    kind: Literal["train", "validation", "holdout", "test"]
    owner: str
    """The client, or the domain of a test set."""


class SampleBatch(Tensor):
    """Clean images that know which samples they are, so that what was computed for those samples can be looked up.

    Whatever is computed from them is a plain tensor that knows nothing: a method that changes its images has others.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]
    _source: tuple[SampleSet, Tensor, int]

    @classmethod
    def of(cls, x: Tensor, samples: SampleSet, rows: Tensor) -> "SampleBatch":
        """The images `x`, which are these rows of a sample set."""
        batch = x.as_subclass(cls)
        batch._source = samples, rows, batch._version
        return batch

    @property
    def source(self) -> tuple[SampleSet, Tensor] | None:
        """The sample set and the rows of it; None once the images were changed in place."""
        samples, rows, version = self._source
        return (samples, rows) if self._version == version else None


class ClientSamples:
    """Batches of normalised images: clean ones in order, or shuffled and augmented ones for an epoch of training."""

    def __init__(
        self,
        images: Images,
        normalise: Normalise,
        augment: Augment,
        dtype: torch.dtype,
        device: torch.device,
        balanced: bool = False,
        validation: "ClientSamples | None" = None,
        key: SampleSet | None = None,
    ) -> None:
        self.validation = validation
        self._balanced = balanced
        self.y = to_device(images.y, device)
        self._pixels = to_device(images.x, device)
        self._normalise = normalise
        self._augment = augment
        self._dtype = dtype
        self._key = key
        self._clean: Tensor | None = None

    def __len__(self) -> int:
        return len(self.y)

    def batches(self, size: int = 256) -> Iterator[tuple[Tensor, Tensor]]:
        """Every sample once, clean and in order."""
        for start in range(0, len(self), size):
            part = slice(start, start + size)
            yield self._keyed(self.clean(part), torch.arange(start, min(start + size, len(self)))), self.y[part]

    def clean(self, part: slice) -> Tensor:
        """Some samples as they are, normalised."""
        return self._normalise(self._pixels[part], self._dtype) if self._clean is None else self._clean[part]

    def pixels(self, chosen: Tensor) -> Tensor:
        """Some images as they came, uint8 on the CPU."""
        return self._pixels[chosen.to(self._pixels.device)].cpu()

    def epoch(self, size: int, order: torch.Generator, chance: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """Every sample once, shuffled by `order` and augmented by `chance`.

        Balanced: as many samples, drawn with replacement so that every class is equally likely.
        """
        if self._clean is None and not self._augment:
            # Without augmentation a sample looks the same in every epoch, so the work is done once.
            self._clean = self._normalise(self._pixels, self._dtype)
        for chosen in torch.split(self._shuffled(order).to(self.y.device), size):
            yield self._training_batch(chosen, chance)

    def drawn(self, chosen: Tensor, chance: torch.Generator) -> tuple[Tensor, Tensor]:
        """The chosen samples, augmented by `chance`."""
        return self._training_batch(chosen.to(self.y.device), chance)

    def _training_batch(self, chosen: Tensor, chance: torch.Generator) -> tuple[Tensor, Tensor]:
        if self._clean is None:
            return self._normalise(self._augment(self._pixels[chosen], chance), self._dtype), self.y[chosen]
        return self._keyed(self._clean[chosen], chosen), self.y[chosen]

    def _keyed(self, x: Tensor, rows: Tensor) -> Tensor:
        return x if self._key is None else SampleBatch.of(x, self._key, rows)

    def _shuffled(self, order: torch.Generator) -> Tensor:
        if not self._balanced:
            return torch.randperm(len(self), generator=order)
        labels = self.y.cpu()
        return torch.multinomial(1 / torch.bincount(labels)[labels], len(self), replacement=True, generator=order)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor there; a graphics card reads it from pinned memory while the processor goes on."""
    pinned = tensor.pin_memory() if device.type == "cuda" and tensor.device.type == "cpu" else tensor
    return pinned.to(device, non_blocking=pinned is not tensor)

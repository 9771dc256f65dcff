"""One client's training images as its training loop sees them."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from protofed.clients.transfer import to_device
from protofed.data import Augment, Images, Normalise


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
    ) -> None:
        self.validation = validation
        self._balanced = balanced
        self.y = to_device(images.y, device)
        self._pixels = to_device(images.x, device)
        self._normalise = normalise
        self._augment = augment
        self._dtype = dtype
        self._clean: Tensor | None = None
        self.on_batch: Callable[[Tensor, Tensor], None] | None = None
        """Told of every clean batch and of the samples in it, just before it is handed out."""

    def __len__(self) -> int:
        return len(self.y)

    def batches(self, size: int = 256) -> Iterator[tuple[Tensor, Tensor]]:
        """Every sample once, clean and in order."""
        for start in range(0, len(self), size):
            part = slice(start, start + size)
            yield self._announced(self.clean(part), torch.arange(start, min(start + size, len(self)))), self.y[part]

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
        return self._announced(self._clean[chosen], chosen), self.y[chosen]

    def _announced(self, x: Tensor, chosen: Tensor) -> Tensor:
        if self.on_batch is not None:
            self.on_batch(x, chosen)
        return x

    def _shuffled(self, order: torch.Generator) -> Tensor:
        if not self._balanced:
            return torch.randperm(len(self), generator=order)
        labels = self.y.cpu()
        return torch.multinomial(1 / torch.bincount(labels)[labels], len(self), replacement=True, generator=order)

"""One client's training images as its training loop sees them."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from hashlib import blake2b
from math import prod
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from protofed.data import Augment, Images, Normalise
from protofed.data.pixels import StoredPixels, digest_of
from protofed.models.passed import DESCRIPTIONS
from protofed.seeding import generator

KEPT_NORMALISED = 256 * 2**20
"""Bytes of normalised images that a client keeps from batch to batch."""

SampleKind = Literal["train", "validation", "holdout", "test"]


class SampleSet(NamedTuple):
    """Samples that are always read together and in one order."""

    kind: SampleKind
    owner: str
    """The client, or the domain of a test set."""


class SampleBatch(Tensor):
    """Images that know which samples they are, so that what was computed for those samples can be looked up.

    They are made when something is computed from them, which gives a plain tensor that knows nothing: a method that
    changes its images has others. Only samples that a tensor of indices chooses, and batches put one after the other,
    are such batches again. A network whose first stages are frozen never asks for the images.
    """

    @staticmethod
    def __new__(cls, like: Tensor, rows: Tensor, samples: SampleSet, make: Callable[[Tensor], Tensor]) -> "SampleBatch":
        """A batch of images such as `like`, an empty batch."""
        shape = (len(rows), *like.shape[1:])
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=like.dtype, device=like.device)

    def __init__(self, like: Tensor, rows: Tensor, samples: SampleSet, make: Callable[[Tensor], Tensor]) -> None:
        self._like = like
        self._rows = rows
        self._samples = samples
        self._make = make
        self._images: Tensor | None = None
        self._version_made = 0

    @property
    def source(self) -> tuple[SampleSet, Tensor] | None:
        """The sample set and the rows of it; None once the images were changed in place."""
        changed = self._images is not None and self._images._version != self._version_made
        return None if changed else (self._samples, self._rows)

    def images(self) -> Tensor:
        """The images themselves."""
        if self._images is None:
            self._images = self._make(self._rows)
            self._version_made = self._images._version
        return self._images

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Shape and the like are known; everything else is asked of the images."""
        if func in DESCRIPTIONS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        rearranged = _REARRANGED[func](*args) if func in _REARRANGED and not kwargs else None
        return _with_images(func, args, kwargs) if rearranged is None else rearranged

    def chosen(self, rows: Tensor) -> "SampleBatch":
        """Other samples of the same set."""
        return SampleBatch(self._like, rows, self._samples, self._make)

    def alike(self, other: "SampleBatch") -> bool:
        """Whether both are made in the same way of samples of one set."""
        return (self._samples, self._make) == (other._samples, other._make)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """For what reaches torch without its Python interface."""
        return _with_images(func, args, kwargs)


def _indexed(batch: Any, index: Any) -> SampleBatch | None:
    """The samples that a tensor of indices, or a mask, chooses; None for anything else: a slice is a view of images."""
    if not isinstance(batch, SampleBatch) or not isinstance(index, Tensor) or batch.source is None:
        return None
    rows = batch.source[1]
    return batch.chosen(rows[index.to(rows.device)]) if index.ndim == 1 and index.dtype in _INDICES else None


def _joined(batches: Any, *dimension: int) -> SampleBatch | None:
    """Batches of one sample set one after the other; None where they are something else, or put side by side."""
    first = batches[0]
    if dimension not in ((), (0,)) or not isinstance(first, SampleBatch):
        return None
    sources = [batch.source if isinstance(batch, SampleBatch) and batch.alike(first) else None for batch in batches]
    known = [source[1] for source in sources if source is not None]
    return first.chosen(torch.cat(known)) if len(known) == len(sources) else None


_INDICES = (torch.bool, torch.int64)
_REARRANGED: dict[Any, Callable[..., SampleBatch | None]] = {Tensor.__getitem__: _indexed, torch.cat: _joined}
"""What copies samples without changing them, and so gives samples again where it can."""


def _with_images(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> Any:
    plain, named = tree_map(
        lambda each: each.images() if isinstance(each, SampleBatch) else each, (args, dict(kwargs or {}))
    )
    return func(*plain, **named)


class ClientSamples:
    """Batches of normalised images: clean ones in order, or shuffled and augmented ones for an epoch of training.

    With `views` every image has that many looks that never change: the first is the image as it is, the others are
    augmented by a generator keyed by the image. An epoch of training then takes one of them of each image. Rows count
    through the images of the first view, then of the second, and so on.
    """

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
        views: int = 1,
    ) -> None:
        self.validation = validation
        self._balanced = balanced
        self.y = to_device(images.y, device)
        self._device = device
        # What is not in memory stays where it is until a batch of it is wanted.
        self._pixels = images.x if isinstance(images.x, StoredPixels) else to_device(images.x, device)
        self._normalise = normalise
        self._augment = augment
        self._dtype = dtype
        self._key = key
        self._views = views
        self._clean: Tensor | None = None
        self._like = torch.empty(0, *images.x.shape[1:], dtype=dtype, device=device)

    def __len__(self) -> int:
        return len(self.y)

    @property
    def rows(self) -> int:
        """Images and their views."""
        return len(self) * self._views

    def batches(self, size: int = 256) -> Iterator[tuple[Tensor, Tensor]]:
        """Every sample once, clean and in order."""
        for start in range(0, len(self), size):
            part = slice(start, start + size)
            rows = torch.arange(start, min(start + size, len(self)))
            yield self.clean(part) if self._key is None else self._batch(rows, self.clean), self.y[part]

    def clean(self, part: slice | Tensor) -> Tensor:
        """Some samples as they are, normalised."""
        return self._normalise(self._look(part), self._dtype) if self._clean is None else self._clean[part]

    def pixels(self, indices: Tensor) -> Tensor:
        """Some images as they came, uint8 on the CPU."""
        return self._look(indices).cpu()

    def render(self, rows: Tensor) -> Tensor:
        """The images of some rows as their views show them, normalised."""
        return self._normalise(torch.stack([self._view(row) for row in rows.tolist()]), self._dtype)

    def digest(self, row: int) -> bytes:
        """Hash of everything the image of a row depends on; the same at every client."""
        view, index = divmod(row, len(self))
        about = f"{self._normalise} {tuple(self._like.shape)}" + (f" {view} {self._augment}" if view else "")
        return blake2b(digest_of(self._pixels, index) + about.encode(), digest_size=16).digest()

    def _look(self, chosen: int | slice | Tensor) -> Tensor:
        """Some images as they came, on the device."""
        if isinstance(self._pixels, StoredPixels):
            return to_device(self._pixels[chosen.cpu() if isinstance(chosen, Tensor) else chosen], self._device)
        return self._pixels[chosen.to(self._device) if isinstance(chosen, Tensor) else chosen]

    def _view(self, row: int) -> Tensor:
        view, index = divmod(row, len(self))
        image = self._look(index)
        if not view:
            return image
        content = blake2b(image.cpu().contiguous().numpy().tobytes(), digest_size=8).hexdigest()
        return self._augment(image[None], generator(view, "view", content))[0]

    def epoch(self, size: int, order: torch.Generator, rng: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """Every sample once, shuffled by `order` and augmented by `rng`.

        Balanced: as many samples, drawn with replacement so that every class is equally likely.
        """
        for indices in torch.split(self._shuffled(order).to(self.y.device), size):
            yield self._training_batch(indices, rng)

    def drawn(self, indices: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """The samples at these indices, augmented by `rng`."""
        return self._training_batch(indices.to(self.y.device), rng)

    def _training_batch(self, indices: Tensor, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        if self._views > 1:
            views = torch.randint(self._views, (len(indices),), generator=rng).to(indices.device)
            return self._batch(views * len(self) + indices, self.render), self.y[indices]
        if self._augment:
            return self._normalise(self._augment(self._look(indices), rng), self._dtype), self.y[indices]
        return self._batch(indices, self._unchanging), self.y[indices]

    def _unchanging(self, indices: Tensor) -> Tensor:
        """Without augmentation a sample looks the same in every epoch, so few are normalised once."""
        if len(self) * prod(self._like.shape[1:]) * self._dtype.itemsize > KEPT_NORMALISED:
            return self._normalise(self._look(indices), self._dtype)
        if self._clean is None:
            self._clean = self._normalise(self._look(slice(None)), self._dtype)
        return self._clean[indices]

    def _batch(self, rows: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
        return make(rows) if self._key is None else SampleBatch(self._like, rows, self._key, make)

    def _shuffled(self, order: torch.Generator) -> Tensor:
        if not self._balanced:
            return torch.randperm(len(self), generator=order)
        labels = self.y.cpu()
        return torch.multinomial(1 / torch.bincount(labels)[labels], len(self), replacement=True, generator=order)


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """The tensor there; a graphics card reads it from pinned memory while the processor goes on."""
    pinned = tensor.pin_memory() if device.type == "cuda" and tensor.device.type == "cpu" else tensor
    return pinned.to(device, non_blocking=pinned is not tensor)

"""Labelled images, grouped by domain, and brought to one shape."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from protofed.data.names import check_site_name
from protofed.data.normalise import Normalise
from protofed.data.pixels import Pixels, StoredPixels, empty_pixels, filled, join, pieces, select
from protofed.errors import UserError

Indices = Tensor | np.ndarray | Sequence[int]

LUMINANCE = (0.299, 0.587, 0.114)


@dataclass(frozen=True, eq=False)
class Images:
    """Pixels `x`, uint8 [N, C, H, W], and labels `y`, int64 [N].

    Large sets of pixels are not in memory but read on demand: `x[...]` is a tensor in any case.
    """

    x: Pixels
    y: Tensor

    def __post_init__(self) -> None:
        if self.x.dtype != torch.uint8 or self.x.ndim != 4:
            raise ValueError(f"images must be uint8 [N, C, H, W], not {self.x.dtype} {list(self.x.shape)}")
        if self.y.dtype != torch.int64 or self.y.shape != self.x.shape[:1]:
            raise ValueError(f"labels must be int64 [{len(self.x)}], not {self.y.dtype} {list(self.y.shape)}")

    def __len__(self) -> int:
        return len(self.y)

    def take(self, indices: Indices) -> "Images":
        """The images at `indices`, in that order."""
        positions = torch.as_tensor(indices, dtype=torch.int64)
        return Images(select(self.x, positions), self.y[positions])

    @property
    def channels(self) -> int:
        """1 for grey, 3 for colour."""
        return self.x.shape[1]

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        return self.x.shape[2], self.x.shape[3]


@dataclass(frozen=True, eq=False)
class Domain:
    """One source of images (a scanner, a style, a hospital) with its own training and test part."""

    name: str
    train: Images
    test: Images
    validation: Images | None = None
    """What the site has set aside to validate on, where it has; never trained on."""

    def mapped(self, change: Callable[[Images, str], Images]) -> "Domain":
        """The same with every part changed; `change` also gets the part's name."""
        validation = None if self.validation is None else change(self.validation, "validation")
        return Domain(self.name, change(self.train, "train"), change(self.test, "test"), validation)


@dataclass(frozen=True)
class DataPlace:
    """Where data was read, and how, so that it is found again and not taken for other data of the same name."""

    path: str | None = None
    """The folder, manifest or archive, absolute; None for data by name."""
    root: str | None = None
    """The data root, absolute, in which the name was found."""
    fingerprint: str = ""
    """Changes with the files, or with classes and numbers of images where there are none; not with their place."""
    reading: Mapping[str, Any] = field(default_factory=dict)
    """How every site was divided into training and test images, and what was asked for."""


@dataclass(frozen=True, eq=False)
class RawData:
    """What a reader or a registered loader returns: domains as they are, whose shapes may still differ."""

    classes: tuple[str, ...]
    domains: Mapping[str, Domain]
    source: str = ""
    licence: str = ""
    warnings: tuple[str, ...] = ()
    fingerprint: str = ""
    """Of the files it was read from; empty where there are none."""
    reading: Mapping[str, Any] = field(default_factory=dict)
    """How sites were divided into training and test images, where that was not given."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """Domains that share classes, channels and image size, ready to be distributed to clients."""

    name: str
    classes: tuple[str, ...]
    domains: dict[str, Domain]
    normalise: Normalise
    source: str = ""
    warnings: tuple[str, ...] = ()
    licence: str = field(default="", kw_only=True)
    place: DataPlace | None = field(default=None, kw_only=True)
    """Where it was read; None where the images are elsewhere, or were made."""

    def __post_init__(self) -> None:
        # Clients and their files are named after domains, results are keyed by them.
        for name in self.domains:
            check_site_name(name)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Channels, height, width: the same in every domain."""
        channels, height, width = next(iter(self.domains.values())).train.x.shape[1:]
        return channels, height, width

    @property
    def channels(self) -> int:
        """1 for grey, 3 for colour."""
        return self.image_shape[0]

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width."""
        return self.image_shape[1:]

    @property
    def offsets(self) -> dict[str, range]:
        """Where each domain's training images lie in the pooled training set."""
        where: dict[str, range] = {}
        start = 0
        for name, domain in self.domains.items():
            where[name] = range(start, start + len(domain.train))
            start += len(domain.train)
        return where

    @property
    def validation_offsets(self) -> dict[str, range]:
        """Where the sites' validation images lie: behind the pooled training set."""
        where: dict[str, range] = {}
        start = sum(map(len, self.offsets.values()))
        for name, domain in self.domains.items():
            if domain.validation is not None:
                where[name] = range(start, start + len(domain.validation))
                start += len(domain.validation)
        return where

    def pooled_train(self) -> Images:
        """The training images of all domains, in the order of the domains; partitions index into this."""
        return Images(join([domain.train.x for domain in self.domains.values()]), self.pooled_labels())

    def take_train(self, indices: Indices) -> Images:
        """Training images by their index in the pooled training set, in that order; the rest is not read.

        Images to validate on follow them, at the places in `validation_offsets`.
        """
        positions = torch.as_tensor(indices, dtype=torch.int64)
        parts = self._parts()
        missing = int(((positions < 0) | (positions >= sum(len(part) for part in parts))).sum())
        if missing:
            raise IndexError(f"{missing} of {len(positions)} positions are outside the training set")
        if any(isinstance(part.x, StoredPixels) for part in parts):
            return self.unread_train().take(positions)
        # A client's images have one memory layout, however they were read and whoever else is there: otherwise
        # augmentation would round differently.
        x = torch.empty(len(positions), *self.image_shape, dtype=torch.uint8)
        y = torch.empty_like(positions)
        start = 0
        for part in parts:
            here = (positions >= start) & (positions < start + len(part))
            if bool(here.all()):
                whole = part.take(positions - start)
                return Images(whole.x[:].contiguous(), whole.y)
            taken = part.take(positions[here] - start)
            x[here], y[here] = taken.x[:], taken.y
            start += len(part)
        return Images(x, y)

    def unread_train(self) -> Images:
        """The source of `take_train`, not copied: its `take` returns images that are read on demand."""
        parts = self._parts()
        return Images(StoredPixels.joined([part.x for part in parts]), torch.cat([part.y for part in parts]))

    def _parts(self) -> list[Images]:
        """The training images of every domain, then those to validate on."""
        kept = [domain.validation for domain in self.domains.values() if domain.validation is not None]
        return [*(domain.train for domain in self.domains.values()), *kept]

    def with_tests_in_training(self) -> "Dataset":
        """The same with every domain's test images appended to its training images, and no test set."""
        domains = {name: _all_in_training(domain) for name, domain in self.domains.items()}
        return replace(self, domains=domains)

    def resized(self, side: int) -> "Dataset":
        """The same images, square and of this side."""
        return replace(self, domains=unify(self.domains, image_size=side))

    def normalised(self, normalise: Normalise) -> "Dataset":
        """The same images with another normalisation."""
        return replace(self, normalise=normalise)

    def pooled_labels(self) -> Tensor:
        """The labels of the pooled training set, without a copy of its pixels."""
        return torch.cat([domain.train.y for domain in self.domains.values()])


def _all_in_training(domain: Domain) -> Domain:
    train, test = domain.train, domain.test
    merged = Images(join([train.x, test.x]), torch.cat([train.y, test.y]))
    return Domain(domain.name, merged, test.take([]), domain.validation)


def to_channels(x: Tensor, channels: int) -> Tensor:
    """Grey repeated to three channels, or colour reduced to its luminance; uint8 in and out."""
    if x.shape[1] == channels:
        return x
    if x.shape[1] == 1 and channels == 3:
        return x.repeat(1, 3, 1, 1)
    if x.shape[1] == 3 and channels == 1:
        weights = torch.tensor(LUMINANCE).view(1, 3, 1, 1)
        return torch.cat([_to_uint8((part.float() * weights).sum(1, keepdim=True)) for part in pieces(x)])
    raise UserError(f"images with {x.shape[1]} channels cannot become {channels}; channels must be 1 or 3")


def to_size(x: Tensor, size: tuple[int, int]) -> Tensor:
    """Bilinear resize that averages over the source area when it shrinks; uint8 in and out."""
    if x.shape[2:] == size:
        return x
    # Resizing goes through float32; pieces bound what that costs in memory.
    resized = [_to_uint8(F.interpolate(part.float(), size=size, mode="bilinear", antialias=True)) for part in pieces(x)]
    return torch.cat(resized)


def unify(
    domains: Mapping[str, Domain],
    channels: int | None = None,
    image_size: int | tuple[int, int] | None = None,
) -> dict[str, Domain]:
    """All domains with the same channels and size.

    Without a wish, domains that differ in channels become colour, and domains that differ in size become as high as
    the highest and as wide as the widest, so that no domain loses detail.
    """
    if channels not in (None, 1, 3):
        raise UserError(f"channels must be 1 or 3, not {channels}")
    parts = [
        part
        for domain in domains.values()
        for part in (domain.train, domain.test, domain.validation)
        if part is not None
    ]
    wanted_channels = channels or max(part.channels for part in parts)
    heights, widths = zip(*(part.size for part in parts), strict=True)
    wanted_size = square(image_size) or (max(heights), max(widths))

    shape = (wanted_channels, *wanted_size)
    total = sum(map(len, parts)) * prod(shape)

    def shaped(images: Images, _part: str) -> Images:
        return Images(to_shape(images.x, shape, total), images.y)

    return {name: domain.mapped(shaped) for name, domain in domains.items()}


def to_shape(x: Pixels, shape: tuple[int, int, int], total: int | None = None) -> Pixels:
    """Images of these channels, height and width; `total` are the bytes of the data set, of which `x` may be a part."""
    if x.shape[1:] == shape:
        return x
    channels, height, width = shape
    array = empty_pixels((len(x), *shape), len(x) * prod(shape) if total is None else total)
    start = 0
    for part in pieces(x):
        array[start : start + len(part)] = to_size(to_channels(part, channels), (height, width)).numpy()
        start += len(part)
    return filled(array)


def square(image_size: int | tuple[int, int] | None) -> tuple[int, int] | None:
    """Height and width from what a user gives as image size: one side of a square, or both."""
    if image_size is None:
        return None
    height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
    if min(height, width) < 4:
        raise UserError(f"image size must be at least 4 pixels, not {min(height, width)}")
    return height, width


def _to_uint8(x: Tensor) -> Tensor:
    return x.round_().clamp_(0, 255).to(torch.uint8)

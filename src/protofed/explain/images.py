"""Which images are explained: files of the user, or test images of the run's data set."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from protofed.data.decoding import IMAGE_KINDS, is_image
from protofed.data.files import read_images
from protofed.data.images import to_channels
from protofed.data.labels import class_number
from protofed.errors import UserError, unknown_name
from protofed.runs.opened import OpenRun


@dataclass(frozen=True)
class SelectedImages:
    """Images of the run's shape, by name, with their class where it is known (-1: it is not)."""

    pixels: Tensor
    names: tuple[str, ...]
    labels: tuple[int, ...]
    places: tuple[int, ...] = ()
    """Of test images: their number in the domain's test set."""


def from_files(opened: OpenRun, path: Path, count: int | None = None) -> SelectedImages:
    """The images of a folder and the folders in it, or a single file; a folder named like a class gives the class."""
    if not path.exists():
        raise UserError(f"there is no {path}; --images takes a folder of images or one image file")
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file() and is_image(file))
    if not files:
        raise UserError(f"{path} holds no images ({IMAGE_KINDS})")
    files = files[:count]
    channels, height, width = opened.context.dataset.image_shape
    pixels, _ = read_images(files, (height, width))
    classes = opened.classes
    labels = tuple(classes.index(file.parent.name) if file.parent.name in classes else -1 for file in files)
    names = tuple(file.name if path.is_file() else file.relative_to(path).as_posix() for file in files)
    return SelectedImages(to_channels(pixels[:], channels), names, labels)


def from_domain(opened: OpenRun, domain: str, count: int | None = None, label: str | None = None) -> SelectedImages:
    """Test images of a domain, of every class in turn, or of one class."""
    if domain not in opened.context.dataset.domains:
        raise unknown_name("domain", domain, opened.context.dataset.domains)
    wanted = None if label is None else class_number_of(opened, label)
    test = opened.context.dataset.domains[domain].test
    every = _in_turn(test.y, len(opened.classes)) if wanted is None else (test.y == wanted).nonzero()[:, 0].tolist()
    picked = every[:count]
    if not picked:
        raise UserError(f"{domain} has no test images of class {label}")
    selected = test.take(picked)
    names = tuple(f"{domain} image {i}" for i in picked)
    return SelectedImages(selected.x[:], names, tuple(selected.y.tolist()), tuple(picked))


def class_number_of(opened: OpenRun, label: str) -> int:
    """The class that a user names, or gives the number of."""
    number = class_number(label, opened.classes)
    if number is None:
        raise unknown_name("class", label, opened.classes)
    return number


def _in_turn(y: Tensor, classes: int) -> list[int]:
    """Places ordered so that classes alternate."""
    rank = torch.zeros_like(y)
    for k in range(classes):
        rank[y == k] = torch.arange(int((y == k).sum()))
    return sorted(range(len(y)), key=lambda i: (int(rank[i]), int(y[i])))

"""Published image files: who is trained on and who is tested on, and reading them at a bounded size."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from protofed.data.decoding import Picture, is_image
from protofed.data.files import DecodedImages, LabelledFile, decode_images, majority_labels, read_domains, read_images
from protofed.data.fundus import circle_crop
from protofed.data.images import RawData, to_channels, to_size
from protofed.data.pixels import empty_pixels, filled
from protofed.data.sources.source import Size
from protofed.errors import UserError
from protofed.seeding import numpy_generator

# Photographs are brought to this size while they are read, unless the user gives another: memory stays bounded.
PHOTO_SIZE = (64, 64)
EIGHTY_TWENTY = "none official; 80/20 of every class at random with a fixed seed (42)"
EVERY_TENTH = "in the order of classes and files, positions ending in 8 or 9 are test images (FPL's rule)"
_SPLIT_SEED = 42


@dataclass(frozen=True)
class GroupedFile:
    """An image file, its class, and its group (a patient): files of one group stay on one side of a split."""

    path: Path
    label: str
    group: str = ""


def images_in(folder: Path) -> list[Path]:
    """The image files directly in a folder, sorted."""
    if not folder.is_dir():
        raise UserError(f"the folder {folder} does not exist; complete the original files")
    return sorted(path for path in folder.iterdir() if path.is_file() and is_image(path))


def class_folders(folder: Path, classes: Sequence[str] | None = None) -> list[GroupedFile]:
    """The images of a folder of class folders, in the order of classes and files."""
    names = classes or sorted(path.name for path in folder.iterdir() if path.is_dir() and path.name[0] not in "._")
    return [GroupedFile(path, name) for name in names for path in images_in(folder / name)]


def split_80_20(domain: str, files: Sequence[GroupedFile]) -> list[LabelledFile]:
    """Of every class four fifths of the groups, rounded down, are trained on; the others are tested on.

    A file without a group is one by itself. A group counts for the class most of its files have. A class with one group
    is trained on.
    """
    groups = [file.group or str(file.path) for file in files]
    classes: dict[str, list[str]] = {}
    for group, label in sorted(majority_labels(groups, [file.label for file in files]).items()):
        classes.setdefault(label, []).append(group)
    trained: set[str] = set()
    for label, members in classes.items():
        order = numpy_generator(_SPLIT_SEED, "original files", domain, label).permutation(len(members))
        trained.update(members[position] for position in order[: max(1, len(members) * 4 // 5)])
    return [
        LabelledFile(file.path, file.label, "train" if group in trained else "test")
        for file, group in zip(files, groups, strict=True)
    ]


def split_every_tenth(files: Iterable[GroupedFile]) -> list[LabelledFile]:
    """FPL's rule: position mod 10 in {8, 9} is tested on."""
    return [
        LabelledFile(file.path, file.label, "test" if position % 10 >= 8 else "train")
        for position, file in enumerate(files)
    ]


def read_files(
    files: Mapping[str, Sequence[LabelledFile]], classes: Sequence[str], size: Size, *, crop: bool = False
) -> RawData:
    """Domains of image files; with `crop` each is cut to the disc of a fundus photograph."""
    for file in (file for members in files.values() for file in members):
        if file.label not in classes:
            raise UserError(f"{file.path}: class {file.label!r} is not one of {', '.join(classes)}")
    return read_domains(files, classes, size, _read_cropped if crop else decode_images)


def _read_cropped(paths: Sequence[Picture], size: Size, together: int) -> DecodedImages:
    target = size or PHOTO_SIZE
    shape = (len(paths), 3, *target)
    array = empty_pixels(shape, together * prod(shape[1:]))
    failed = 0
    for position, path in enumerate(paths):
        photograph = to_channels(read_images([path])[0][:], 3)
        disc = _disc(photograph, target)
        failed += disc is None
        array[position] = (to_size(photograph, target)[0] if disc is None else disc).numpy()
    notes = [f"no circle was found in {failed} images, which were resized as a whole"] if failed else []
    return DecodedImages(filled(array), range(len(paths)), notes)


def _disc(photograph: Tensor, size: tuple[int, int]) -> Tensor | None:
    cropped = circle_crop(photograph[0].permute(1, 2, 0).contiguous().numpy(), size)
    return None if cropped is None else torch.from_numpy(cropped).permute(2, 0, 1)

"""Published image files: who is trained on and who is tested on, and reading them at a bounded size."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from protofed.data.files import LabelledFile, is_image, read_domain, read_images
from protofed.data.fundus import circle_crop
from protofed.data.images import Domain, Images, RawData, to_channels, to_size
from protofed.data.sources.source import Size
from protofed.errors import UserError
from protofed.seeding import numpy_generator

# Photographs are brought to this size while they are read, unless the user gives another: memory stays bounded.
PHOTO_SIZE = (64, 64)
EIGHTY_TWENTY = "none official; 80/20 of every class at random with a fixed seed (42)"
EVERY_TENTH = "in the order of classes and files, positions ending in 8 or 9 are tested (FPL's rule)"
_SPLIT_SEED = 42


@dataclass(frozen=True)
class Picture:
    """An image file, its class, and whose it is: pictures of one owner never end up on both sides of a split."""

    path: Path
    label: str
    owner: str = ""


def images_in(folder: Path) -> list[Path]:
    """The image files directly in a folder, sorted."""
    if not folder.is_dir():
        raise UserError(f"the folder {folder} does not exist; complete the original files")
    return sorted(path for path in folder.iterdir() if path.is_file() and is_image(path))


def class_folders(folder: Path, classes: Sequence[str] | None = None) -> list[Picture]:
    """The images of a folder of class folders, in the order of classes and files."""
    names = classes or sorted(path.name for path in folder.iterdir() if path.is_dir() and path.name[0] not in "._")
    return [Picture(path, name) for name in names for path in images_in(folder / name)]


def eighty_twenty(domain: str, pictures: Sequence[Picture]) -> list[LabelledFile]:
    """Of every class four fifths of the owners, rounded down, are trained on; the others are tested on.

    An owner counts for the class most of its pictures have. A class with one owner is trained on.
    """
    labels: dict[str, Counter[str]] = {}
    for picture in pictures:
        labels.setdefault(picture.owner or str(picture.path), Counter())[picture.label] += 1
    classes: dict[str, list[str]] = {}
    for owner in sorted(labels):
        typical = min(labels[owner], key=lambda label: (-labels[owner][label], label))
        classes.setdefault(typical, []).append(owner)
    trained: set[str] = set()
    for label, owners in classes.items():
        order = numpy_generator(_SPLIT_SEED, "original files", domain, label).permutation(len(owners))
        trained.update(owners[position] for position in order[: max(1, len(owners) * 4 // 5)])
    return [
        LabelledFile(one.path, one.label, "train" if (one.owner or str(one.path)) in trained else "test")
        for one in pictures
    ]


def every_tenth(pictures: Iterable[Picture]) -> list[LabelledFile]:
    """FPL's rule: position mod 10 in {8, 9} is tested on."""
    return [
        LabelledFile(picture.path, picture.label, "test" if position % 10 >= 8 else "train")
        for position, picture in enumerate(pictures)
    ]


def read_pictures(
    files: Mapping[str, Sequence[LabelledFile]], classes: Sequence[str], size: Size, *, crop: bool = False
) -> RawData:
    """Domains of image files; with `crop` each is cut to the disc of a fundus photograph."""
    index = {name: number for number, name in enumerate(classes)}
    domains: dict[str, Domain] = {}
    warnings: list[str] = []
    for name, found in files.items():
        unknown = next((file for file in found if file.label not in index), None)
        if unknown:
            raise UserError(f"{unknown.path}: class {unknown.label!r} is none of {', '.join(classes)}")
        reader = _read_cropped if crop else read_domain
        domains[name], notes = reader(name, found, index, size)
        warnings += notes
    return RawData(tuple(classes), domains, warnings=tuple(warnings))


def _read_cropped(
    name: str, files: Sequence[LabelledFile], index: Mapping[str, int], size: Size
) -> tuple[Domain, list[str]]:
    target = size or PHOTO_SIZE
    x = torch.empty(len(files), 3, *target, dtype=torch.uint8)
    failed = 0
    for position, file in enumerate(files):
        photograph = to_channels(read_images([file.path])[0], 3)
        disc = _disc(photograph, target)
        failed += disc is None
        x[position] = to_size(photograph, target)[0] if disc is None else disc
    y = torch.tensor([index[file.label] for file in files], dtype=torch.int64)
    parts = {part: [at for at, file in enumerate(files) if file.part == part] for part in ("train", "test")}
    for part, chosen in parts.items():
        if not chosen:
            raise UserError(f"domain {name} has no {part} images; complete the original files")
    notes = [f"domain {name}: no circle was found in {failed} images, which were resized whole"] if failed else []
    whole = Images(x, y)
    return Domain(name, whole.take(parts["train"]), whole.take(parts["test"])), notes


def _disc(photograph: Tensor, size: tuple[int, int]) -> Tensor | None:
    cropped = circle_crop(photograph[0].permute(1, 2, 0).contiguous().numpy(), size)
    return None if cropped is None else torch.from_numpy(cropped).permute(2, 0, 1)

"""npz files of arrays, one per domain, as labelled images."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np
import torch
from numpy.typing import NDArray

from protofed.data.files import depth, shallow_note
from protofed.data.images import Domain, Images, RawData
from protofed.data.names import one_form
from protofed.data.npz import READ_ERRORS, ArrayRows, ObjectArrayError, read_arrays, unpacked_bytes
from protofed.data.pixels import Pixels, empty_pixels, filled
from protofed.data.problems import error, refuse
from protofed.errors import UserError

# A label such as 70000 is far more likely a patient number than a class.
_MOST_CLASSES = 10_000


def npz_files(folder: Path) -> list[Path]:
    """The domains of a folder that are npz files, sorted."""
    return sorted(path for path in folder.glob("*.npz") if not path.name.startswith("."))


def read_npz(archives: list[Path], source: str) -> RawData:
    """One domain per npz file. Classes are joined by name where files name them, and are numbers where none does.

    What is wrong with any of the files is told at once.
    """
    read: dict[Path, _Archive] = {}
    wrong: list[UserError] = []
    total = sum(map(unpacked_bytes, archives))
    for path in archives:
        try:
            read[path] = _read_archive(path, total)
        except UserError as problem:
            wrong.append(problem)
    refuse([error("unreadable", "", str(problem)) for problem in wrong], archives[0].parent)
    classes = _joined_classes(archive.classes for archive in read.values())
    if not classes:
        classes = _numbered_classes([archive.domain for archive in read.values()])
    domains = {archive.domain.name: _relabelled(path, archive, classes) for path, archive in read.items()}
    return RawData(
        classes,
        domains,
        source="; ".join([source, *dict.fromkeys(text for archive in read.values() for text in archive.origins)]),
        licence="; ".join(dict.fromkeys(text for archive in read.values() for text in archive.licences)),
        warnings=tuple(text for archive in read.values() for text in archive.warnings),
        fingerprint=_fingerprint(archives),
    )


@dataclass(frozen=True)
class _Archive:
    domain: Domain
    classes: tuple[str, ...]
    """Their names; empty where it names none."""
    origins: list[str]
    licences: list[str]
    warnings: list[str]


def _read_archive(path: Path, total: int) -> _Archive:
    arrays, packed = _load_arrays(path)
    name = one_form(path.stem)
    bits = _depth(path, packed)
    warnings = [f"domain {name}: {shallow_note(bits)}"] if 8 < bits < 16 else []
    parts = {part: _part(path, packed[f"x_{part}"], arrays, part, bits, total) for part in ("train", "test")}
    if "x_val" in packed and "y_val" in arrays:
        parts["validation"] = _part(path, packed["x_val"], arrays, "val", bits, total)
    return _Archive(
        Domain(name, **parts),
        _class_names(path, arrays["classes"]) if "classes" in arrays else (),
        _texts(arrays, "source"),
        _texts(arrays, "license") or _texts(arrays, "licence"),
        warnings,
    )


def _joined_classes(lists: Iterable[tuple[str, ...]]) -> tuple[str, ...]:
    """The classes of all files, in the order of the first; others follow as they come."""
    return tuple(dict.fromkeys(name for names in lists for name in names))


def _relabelled(path: Path, archive: _Archive, classes: tuple[str, ...]) -> Domain:
    """Labels that count through the classes of all files, checked against the file's own list."""
    own = archive.classes or classes
    _check_labels(path, archive.domain, len(own))
    if own == classes[: len(own)]:
        return archive.domain
    places = torch.tensor([classes.index(name) for name in own])
    return archive.domain.mapped(lambda images, _: Images(images.x, places[images.y]))


def _fingerprint(archives: list[Path]) -> str:
    """From the checksums that the archives hold of their arrays."""
    digest = blake2b(digest_size=16)
    for path in archives:
        with ZipFile(path) as archive:
            entries = sorted((entry.filename, entry.file_size, entry.CRC) for entry in archive.infolist())
        digest.update(f"{one_form(path.stem)}{entries}".encode())
    return digest.hexdigest()


def _load_arrays(path: Path) -> tuple[dict[str, NDArray[np.generic]], dict[str, ArrayRows]]:
    """All but the images, and the images, which are not unpacked yet."""
    images, needed = ("x_train", "x_test", "x_val"), ("x_train", "y_train", "x_test", "y_test")
    try:
        arrays = read_arrays(path, needed, images)
        there = ("x_train", "x_test", *(["x_val"] if "y_val" in arrays else []))
        return arrays, {key: ArrayRows(path, key) for key in there}
    except ObjectArrayError:
        raise UserError(f"{path} holds Python objects; save plain arrays of numbers and text instead") from None
    except READ_ERRORS as problem:
        if isinstance(problem, KeyError) and set(str(problem.args[0]).split(", ")) <= set(needed):
            raise UserError(f"{path} lacks {problem.args[0]}; it must hold {', '.join(needed)}") from None
        raise _broken(path, problem) from None


def _broken(path: Path, problem: BaseException) -> UserError:
    reason = str(problem).strip("'\"").partition("\n")[0] or type(problem).__name__
    return UserError(f"{path} is not a readable npz file ({reason}); write it again with numpy.savez_compressed")


def _pieces(path: Path, values: ArrayRows) -> Iterator[NDArray[Any]]:
    try:
        yield from values.pieces()
    except READ_ERRORS as problem:
        raise _broken(path, problem) from None


def _depth(path: Path, packed: Mapping[str, ArrayRows]) -> int:
    """The bits in use, over both parts, so that training and test images are scaled alike."""
    deep = [values for values in packed.values() if values.dtype == np.uint16 and 0 not in values.shape]
    peaks = [int(piece.astype(np.uint16).max()) for values in deep for piece in _pieces(path, values)]
    return depth(max(peaks)) if peaks else 8


def _part(
    path: Path, packed: ArrayRows, arrays: Mapping[str, NDArray[np.generic]], part: str, bits: int, total: int
) -> Images:
    x = _pixels(path, f"x_{part}", packed, bits, total)
    y = _labels(path, f"y_{part}", arrays[f"y_{part}"])
    if len(x) != len(y):
        raise UserError(f"{path}: x_{part} holds {len(x)} images and y_{part} {len(y)} labels; the numbers must match")
    if not len(x):
        raise UserError(f"{path}: x_{part} holds no images; a domain needs at least one {part} image")
    return Images(x, torch.from_numpy(y))


def _pixels(path: Path, key: str, values: ArrayRows, bits: int, total: int) -> Pixels:
    """Any reasonable array of images as uint8 [N, C, H, W]."""
    where = f"{path}: {key}"
    if len(values.shape) not in (3, 4):
        raise UserError(f"{where} has {len(values.shape)} dimensions; images are N x H x W or N x H x W x C")
    shape = values.shape if len(values.shape) == 4 else (*values.shape, 1)
    count, height, width, channels = shape
    if channels not in (1, 3):
        swapped = height in (1, 3)
        advice = "move the channels to the end" if swapped else "images are N x H x W x C with C of 1 or 3"
        raise UserError(f"{where} has shape {'x'.join(map(str, values.shape))}; {advice}")
    if 0 in shape[1:]:
        raise UserError(f"{where} has images without pixels; images are N x H x W or N x H x W x C")
    array = empty_pixels((count, channels, height, width), total)
    start = 0
    for piece in _pieces(path, values):
        rows = _eight_bit(where, piece.reshape(-1, *shape[1:]), bits)
        array[start : start + len(rows)] = rows.transpose(0, 3, 1, 2)
        start += len(rows)
    return filled(array)


def _eight_bit(where: str, values: NDArray[np.generic], bits: int) -> NDArray[np.uint8]:
    if values.dtype == np.uint8:
        return values.astype(np.uint8, copy=False)
    if not values.size:
        return np.empty(values.shape, dtype=np.uint8)
    if np.issubdtype(values.dtype, np.floating):
        numbers = values.astype(np.float32)
        if not np.isfinite(numbers).all():
            raise UserError(f"{where} holds NaN or infinite values; save images as uint8")
        low, high = float(numbers.min()), float(numbers.max())
        if low < 0 or high > 1:
            raise UserError(
                f"{where} holds floats from {low:g} to {high:g}; save images as uint8, or floats between 0 and 1"
            )
        return np.asarray(np.rint(numbers * 255), dtype=np.uint8)
    if np.issubdtype(values.dtype, np.integer):
        integers = values.astype(np.int64)
        low, high = int(integers.min()), int(integers.max())
        if values.dtype == np.uint16:
            return np.asarray(np.rint(integers * (255 / (2**bits - 1))), dtype=np.uint8)
        if low < 0 or high > 255:
            raise UserError(f"{where} holds integers from {low} to {high}; save images as uint8, 0 to 255")
        return integers.astype(np.uint8)
    raise UserError(f"{where} is of type {values.dtype}; save images as uint8")


def _labels(path: Path, key: str, values: NDArray[np.generic]) -> NDArray[np.int64]:
    if values.ndim == 2 and values.shape[1] == 1:
        values = values[:, 0]
    if values.ndim != 1:
        raise UserError(f"{path}: {key} has {values.ndim} dimensions; labels are one integer per image")
    if not np.issubdtype(values.dtype, np.integer):
        raise UserError(f"{path}: {key} is of type {values.dtype}; labels must be integers from 0 up")
    labels = values.astype(np.int64)
    if len(labels) and labels.min() < 0:
        raise UserError(f"{path}: {key} holds the label {labels.min()}; labels must be integers from 0 up")
    if len(labels) and labels.max() >= _MOST_CLASSES:
        raise UserError(f"{path}: {key} holds the label {labels.max()}, out of range; number the classes from 0 up")
    return labels


def _class_names(path: Path, values: NDArray[np.generic]) -> tuple[str, ...]:
    names = tuple(one_form(str(value)) for value in np.ravel(values))
    if not names or len(set(names)) < len(names):
        raise UserError(f"{path}: classes must be a list of different names, one per label")
    return names


def _texts(arrays: Mapping[str, NDArray[np.generic]], key: str) -> list[str]:
    return [str(value) for value in np.ravel(arrays[key])] if key in arrays else []


def _numbered_classes(domains: Sequence[Domain]) -> tuple[str, ...]:
    highest = max(int(part.y.max()) for domain in domains for part in (domain.train, domain.test))
    return tuple(str(label) for label in range(highest + 1))


def _check_labels(path: Path, domain: Domain, classes: int) -> None:
    for part, images in (("train", domain.train), ("test", domain.test)):
        highest = int(images.y.max())
        if highest >= classes:
            raise UserError(
                f"{path}: y_{part} holds the label {highest}, but there are {classes} classes; "
                f"labels must lie between 0 and {classes - 1}"
            )

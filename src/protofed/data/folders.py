"""Reads a folder of your own: one `DOMAIN.npz` per domain, or `DOMAIN/train/CLASS/*.png` and `DOMAIN/test/CLASS/*`."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from protofed.data.files import IMAGE_SUFFIXES, LabelledFile, class_order, depth, is_image, read_domains, shallow_note
from protofed.data.images import Domain, Images, RawData
from protofed.data.npz import READ_ERRORS, ArrayRows, ObjectArrayError, read_arrays, unpacked_bytes
from protofed.data.pixels import Pixels, empty_pixels, filled
from protofed.errors import UserError

FOLDER_LAYOUT = (
    "a folder holds one DOMAIN.npz per domain (x_train, y_train, x_test, y_test), "
    "or images as DOMAIN/train/CLASS/*.png and DOMAIN/test/CLASS/*.png"
)

# A label such as 70000 is far more likely a patient number than a class.
_MOST_CLASSES = 10_000


def read_folder(folder: Path, image_size: tuple[int, int] | None = None) -> RawData:
    """The domains of a folder; npz files win where there are both forms. Image files are read at `image_size`."""
    if not folder.exists():
        raise UserError(f"folder {folder} does not exist; {FOLDER_LAYOUT}")
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; {FOLDER_LAYOUT}")
    archives = npz_files(folder)
    if archives:
        return read_npz(archives, source=f"folder {folder.name} (npz)")
    domains = visible_folders(folder)
    if not domains:
        raise UserError(f"folder {folder} is empty of data; {FOLDER_LAYOUT}")
    if {"train", "test"} <= {domain.name for domain in domains}:
        raise UserError(f"{folder} holds train and test itself; move them into {folder}/DOMAIN, one folder per domain")
    return _read_image_folders(folder, domains, image_size)


def npz_files(folder: Path) -> list[Path]:
    """The domains of a folder that are npz files, sorted."""
    return sorted(path for path in folder.glob("*.npz") if not path.name.startswith("."))


def visible_folders(folder: Path) -> list[Path]:
    """Sub-folders, sorted, without hidden ones and what archivers leave behind."""
    return sorted(path for path in folder.iterdir() if path.is_dir() and path.name[0] not in "._")


def _read_image_folders(folder: Path, domains: list[Path], image_size: tuple[int, int] | None) -> RawData:
    files = {domain.name: _files_of_domain(domain) for domain in domains}
    classes = class_order(file.label for members in files.values() for file in members)
    return replace(read_domains(files, classes, image_size), source=f"folder {folder.name} (image files)")


def _files_of_domain(domain: Path) -> list[LabelledFile]:
    files: list[LabelledFile] = []
    for part in ("train", "test"):
        if not (domain / part).is_dir():
            raise UserError(f"{domain} has no folder {part}; images go into {domain.name}/{part}/CLASS/")
        before = len(files)
        for label in visible_folders(domain / part):
            images = sorted(path for path in label.iterdir() if path.is_file() and is_image(path))
            files += [LabelledFile(path, label.name, part) for path in images]
        if len(files) == before:
            kinds = ", ".join(suffix[1:] for suffix in IMAGE_SUFFIXES)
            raise UserError(f"{domain / part} holds no images; images ({kinds}) go into {domain.name}/{part}/CLASS/")
    return files


def read_npz(archives: list[Path], source: str) -> RawData:
    """One domain per npz file; their `classes` must agree, and without any the labels are numbered."""
    domains: dict[str, Domain] = {}
    named: dict[Path, tuple[str, ...]] = {}
    origins: list[str] = []
    licences: list[str] = []
    warnings: list[str] = []
    total = sum(map(unpacked_bytes, archives))
    for path in archives:
        arrays, packed = _load_arrays(path)
        bits = _depth(path, packed)
        if 8 < bits < 16:
            warnings.append(f"domain {path.stem}: {shallow_note(bits)}")
        train, test = (_part(path, packed[f"x_{part}"], arrays, part, bits, total) for part in ("train", "test"))
        domains[path.stem] = Domain(path.stem, train, test)
        if "classes" in arrays:
            named[path] = _class_names(path, arrays["classes"])
        origins += _texts(arrays, "source")
        licences += _texts(arrays, "license") or _texts(arrays, "licence")
    classes = _agreed_classes(named) or _numbered_classes(domains)
    for path in archives:
        _check_labels(path, domains[path.stem], len(classes))
    return RawData(
        classes,
        domains,
        source="; ".join([source, *dict.fromkeys(origins)]),
        licence="; ".join(dict.fromkeys(licences)),
        warnings=tuple(warnings),
    )


def _load_arrays(path: Path) -> tuple[dict[str, NDArray[np.generic]], dict[str, ArrayRows]]:
    """All but the images, and the images, which are not unpacked yet."""
    images, needed = ("x_train", "x_test"), ("x_train", "y_train", "x_test", "y_test")
    try:
        return read_arrays(path, needed, images), {key: ArrayRows(path, key) for key in images}
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
        raise UserError(f"{path}: x_{part} holds {len(x)} images and y_{part} {len(y)} labels; they must be as many")
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
    names = tuple(str(value) for value in np.ravel(values))
    if not names or len(set(names)) < len(names):
        raise UserError(f"{path}: classes must be a list of different names, one per label")
    return names


def _texts(arrays: Mapping[str, NDArray[np.generic]], key: str) -> list[str]:
    return [str(value) for value in np.ravel(arrays[key])] if key in arrays else []


def _agreed_classes(named: Mapping[Path, tuple[str, ...]]) -> tuple[str, ...]:
    if not named:
        return ()
    (first, classes), *others = named.items()
    for path, names in others:
        if names != classes:
            raise UserError(
                f"{path} and {first.name} have different classes ({', '.join(names)}; {', '.join(classes)}); "
                "all domains need the same classes in the same order"
            )
    return classes


def _numbered_classes(domains: Mapping[str, Domain]) -> tuple[str, ...]:
    highest = max(int(part.y.max()) for domain in domains.values() for part in (domain.train, domain.test))
    return tuple(str(label) for label in range(highest + 1))


def _check_labels(path: Path, domain: Domain, classes: int) -> None:
    for part, images in (("train", domain.train), ("test", domain.test)):
        highest = int(images.y.max())
        if highest >= classes:
            raise UserError(
                f"{path}: y_{part} holds the label {highest}, but there are {classes} classes; "
                f"labels must lie between 0 and {classes - 1}"
            )

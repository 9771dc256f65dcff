"""Image files on disk as arrays of one shape: 8 and 16 bit, grey and colour, mixed sizes."""

import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from protofed.data.images import Domain, Images, RawData
from protofed.data.pixels import Pixels, empty_pixels, filled
from protofed.errors import UserError
from protofed.system import cores

IMAGE_SUFFIXES = (".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp")
# Images of mixed sizes are brought to their median size, but never larger than this: a folder of photographs should
# not fill the memory because nobody gave an image size.
LARGEST_DEFAULT_SIDE = 256

G = TypeVar("G", bound=Hashable)
PixelReader = Callable[[Sequence[Path], tuple[int, int] | None, int], tuple[Pixels, list[str]]]
"""Pixels uint8 [N, C, H, W] of image files, which belong to a data set of so many, and warnings."""

_WORTH_THREADS = 16
_GREY_MODES = ("1", "L", "LA", "La")
_DEEP_MODES = ("I", "I;16", "I;16L", "I;16B", "I;16N")


@dataclass(frozen=True)
class LabelledFile:
    """One image file, the name of its class, and the part it belongs to."""

    path: Path
    label: str
    part: str


def class_order(names: Iterable[str]) -> tuple[str, ...]:
    """Class names sorted; as numbers where all of them are, so that 10 comes after 9."""
    distinct = set(names)
    if all(name.isdecimal() for name in distinct):
        return tuple(sorted(distinct, key=lambda name: (int(name), name)))
    return tuple(sorted(distinct))


def is_image(path: Path) -> bool:
    """Whether a file is to be read as an image; a DICOM file is refused, anything else is passed over."""
    if path.name.startswith("."):
        return False
    suffix = path.suffix.lower()
    if suffix in (".dcm", ".dicom") or (suffix not in IMAGE_SUFFIXES and _has_dicom_mark(path)):
        raise UserError(f"{path}: DICOM files are not read; convert them to 8- or 16-bit PNG or TIFF first")
    return suffix in IMAGE_SUFFIXES


def majority_labels(groups: Sequence[G], labels: Sequence[str]) -> dict[G, str]:
    """The most frequent label of each group of samples; of equally frequent ones the first in the alphabet."""
    counts: dict[G, Counter[str]] = {}
    for group, label in zip(groups, labels, strict=True):
        counts.setdefault(group, Counter())[label] += 1
    return {group: min(count, key=lambda label: (-count[label], label)) for group, count in counts.items()}


def read_images(
    paths: Sequence[Path], size: tuple[int, int] | None = None, together: int = 0
) -> tuple[Pixels, list[str]]:
    """Pixels uint8 [N, C, H, W] and warnings: colour if any image is, and of one size.

    Without `size`, images that all agree keep theirs; otherwise they get the median height and width, at most
    256 pixels on the longer side. Deep images are scaled together, by the smallest of 8, 10, 12, 14 and 16 bits that
    holds all their values, so that their relative brightness stays and a 12-bit scan does not turn out black.
    `together` is how many images the data set has of which these are a part.
    """
    with _decoder_warnings():
        return _read_images(paths, size, max(together, len(paths)))


def _read_images(paths: Sequence[Path], size: tuple[int, int] | None, together: int) -> tuple[Pixels, list[str]]:
    headers = [_header(path) for path in paths]
    notes: list[str] = []
    if size is None:
        size = _common_size([header.size for header in headers])
        if any(header.size != size for header in headers):
            notes.append(f"images of different sizes were resized to {size[0]}x{size[1]}; --image-size sets another")
    colour = any(header.colour for header in headers)
    shape = (len(paths), 3 if colour else 1, *size)
    pixels = empty_pixels(shape, together * prod(shape[1:]))
    places = {position: place for place, position in enumerate(p for p, header in enumerate(headers) if header.deep)}
    deep_shape = (len(places), 1, *size)
    deep = empty_pixels(deep_shape, 4 * prod(deep_shape), np.float32)

    def decode(position: int) -> float:
        """Into its place; the largest value of a deep image."""
        header = headers[position]
        values = _decode(paths[position], size, header)
        if not header.deep:
            pixels[position] = values
            return 0.0
        deep[places[position]] = values
        return float(values.max())

    peaks = _in_threads(decode, len(paths))
    if places:
        bits = depth(max(peaks))
        for position, place in places.items():
            pixels[position] = np.clip(np.rint(deep[place] * (255 / (2**bits - 1))), 0, 255)
        if bits < 16:
            notes.append(shallow_note(bits))
    return filled(pixels), notes


def _in_threads(work: Callable[[int], float], count: int) -> list[float]:
    """What the work gives for 0, 1, 2 ..., on all cores: decoders leave the interpreter to others while they run.

    No more is under way than there are cores. The first to fail ends it all.
    """
    if count < _WORTH_THREADS:
        return [work(number) for number in range(count)]
    with ThreadPoolExecutor(cores()) as pool:
        return list(pool.map(work, range(count)))


def read_domains(
    files: Mapping[str, Sequence[LabelledFile]],
    classes: Sequence[str],
    size: tuple[int, int] | None,
    read: PixelReader = read_images,
) -> RawData:
    """The files of each domain as images, with warnings; every image gets `size`, or one common to its domain."""
    index = {name: number for number, name in enumerate(classes)}
    domains: dict[str, Domain] = {}
    warnings: list[str] = []
    together = sum(map(len, files.values()))
    for name, members in files.items():
        x, notes = read([file.path for file in members], size, together)
        domains[name] = _make_domain(name, members, index, x)
        warnings += [f"domain {name}: {note}" for note in notes]
    return RawData(tuple(classes), domains, warnings=tuple(warnings))


def _make_domain(name: str, files: Sequence[LabelledFile], class_index: Mapping[str, int], x: Pixels) -> Domain:
    y = torch.tensor([class_index[file.label] for file in files], dtype=torch.int64)
    parts: dict[str, Images] = {}
    for part in ("train", "test"):
        positions = [position for position, file in enumerate(files) if file.part == part]
        if not positions:
            raise UserError(f"domain {name} has no {part} images; put at least one image of it into {part}")
        parts[part] = Images(x, y).take(positions)
    return Domain(name, parts["train"], parts["test"])


def depth(peak: float) -> int:
    """How many bits the values of 16-bit images really use: the smallest common depth that holds the largest one."""
    return next((bits for bits in (8, 10, 12, 14) if peak < 2**bits), 16)


def shallow_note(bits: int) -> str:
    """The warning for 16-bit images that do not use their 16 bits."""
    return f"the 16-bit images use {bits} bits only and were scaled by that"


@dataclass(frozen=True)
class _Header:
    size: tuple[int, int]
    colour: bool
    deep: bool


def _header(path: Path) -> _Header:
    """What an image is, without decoding its pixels."""
    with _opened(path) as image:
        return _describe(path, image)


def _describe(path: Path, image: Image.Image) -> _Header:
    mode, size = image.mode, (image.height, image.width)
    if mode == "F":
        raise UserError(f"{path}: images of floating-point numbers are not read; save it as an 8- or 16-bit image")
    deep = mode in _DEEP_MODES
    return _Header(size, not deep and mode not in _GREY_MODES, deep)


def _common_size(sizes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    if len(set(sizes)) == 1:
        return sizes[0]
    height, width = (median(sides) for sides in zip(*sizes, strict=True))
    shrink = min(1.0, LARGEST_DEFAULT_SIDE / max(height, width))
    return max(4, round(height * shrink)), max(4, round(width * shrink))


def _decode(path: Path, size: tuple[int, int], header: _Header) -> NDArray[Any]:
    """Pixels [C, H, W] of one file at `size`, in the file's own range of values."""
    with _opened(path) as opened:
        if _describe(path, opened) != header:
            raise UserError(f"{path} was changed while it was read; start again when nobody writes to the folder")
        image = ImageOps.exif_transpose(opened)
        image = image.convert("F" if header.deep else "RGB" if header.colour else "L")
        if (image.height, image.width) != size:
            image = image.resize((size[1], size[0]), Image.Resampling.BILINEAR)
        values = np.asarray(image)
    if header.deep and (values.min() < 0 or values.max() > 65535):
        raise UserError(f"{path}: pixel values must lie between 0 and 65535; save it as an 8- or 16-bit image")
    return values.transpose(2, 0, 1) if values.ndim == 3 else values[None]


@contextmanager
def _decoder_warnings() -> Iterator[None]:
    """Inside: what decoders warn of is passed over, but an image of absurd size is an error.

    Filters of warnings belong to the process: they are set here once, and not by the threads that decode.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("error", Image.DecompressionBombWarning)
        yield


@contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    """An opened image file; whatever its decoder raises becomes a UserError of one line."""
    try:
        with Image.open(path) as image:
            yield image
    except UserError:
        raise
    except Exception as problem:
        # Damage can surface anywhere in a decoder, as any exception.
        unknown = isinstance(problem, UnidentifiedImageError)
        reason = "not an image" if unknown else str(problem).partition("\n")[0] or type(problem).__name__
        raise UserError(f"{path}: the image cannot be read ({reason}); replace or remove the file") from None


def _has_dicom_mark(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(132)[128:] == b"DICM"
    except OSError:
        return False

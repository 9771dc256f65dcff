"""Image files on disk as arrays of one shape: 8 and 16 bit, grey and colour, mixed sizes."""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from protofed.data.decoding import BadImage, ImageHeader, Picture, changed, decode, decoder_warnings, header_of
from protofed.data.images import Domain, Images, RawData
from protofed.data.known_images import KnownImages, file_mark
from protofed.data.pixels import (
    Pixels,
    StoredPixels,
    UndecodedPixels,
    empty_pixels,
    filled,
    fits_in_memory,
    pixel_digest,
    select,
)
from protofed.data.problems import Problem, refuse
from protofed.errors import UserError
from protofed.system import cores

# Images of mixed sizes are brought to their median size, but never larger than this: a folder of photographs should
# not fill the memory because nobody gave an image size.
LARGEST_DEFAULT_SIDE = 256

G = TypeVar("G", bound=Hashable)
R = TypeVar("R")

_WORTH_THREADS = 16
_AT_ONCE = 8
"""Items that a thread takes together."""
_NO_PIXELS = torch.zeros(0, 1, 4, 4, dtype=torch.uint8)


class LabelledFile(NamedTuple):
    """One image file, or a page of one, the name of its class, and the part it belongs to."""

    path: Path | str
    label: str
    part: str
    page: int = 0
    header: ImageHeader | None = None

    @property
    def picture(self) -> Picture:
        """Where its pixels are."""
        return Picture(Path(self.path), self.page, self.header)


@dataclass(frozen=True, eq=False)
class DecodedImages:
    """What became of some image files: pixels uint8 [N, C, H, W] of those that can be read, and which these are."""

    pixels: Pixels
    kept: Sequence[int]
    notes: Sequence[str] = ()
    problems: Sequence[Problem] = ()


PixelReader = Callable[[Sequence[Picture], tuple[int, int] | None, int], DecodedImages]
"""Reads image files, which belong to a data set of so many, at a size or at one that they have in common."""


def class_order(names: Iterable[str]) -> tuple[str, ...]:
    """Class names sorted; as numbers where all of them are, so that 10 comes after 9."""
    distinct = set(names)
    if all(name.isdecimal() for name in distinct):
        return tuple(sorted(distinct, key=lambda name: (int(name), name)))
    return tuple(sorted(distinct))


def majority_labels(groups: Sequence[G], labels: Sequence[str]) -> dict[G, str]:
    """The most frequent label of each group of samples; of equally frequent ones the first in the alphabet."""
    counts: defaultdict[G, Counter[str]] = defaultdict(Counter)
    for group, label in zip(groups, labels, strict=True):
        counts[group][label] += 1
    return {group: min(count, key=lambda label: (-count[label], label)) for group, count in counts.items()}


def read_images(
    files: Sequence[Path | Picture], size: tuple[int, int] | None = None, together: int = 0
) -> tuple[Pixels, list[str]]:
    """Pixels uint8 [N, C, H, W] and warnings: colour if any image is, and of one size.

    Without `size`, images that all agree keep theirs; otherwise they get the median height and width, at most
    256 pixels on the longer side. Deep images are scaled together, by the smallest of 8, 10, 12, 14 and 16 bits that
    holds all their values, so that their relative brightness stays and a 12-bit scan does not turn out black.
    `together` is how many images the data set has of which these are a part.
    """
    pictures = [file if isinstance(file, Picture) else Picture(file) for file in files]
    read = decode_images(pictures, size, together)
    refuse([replace(problem, severity="error") for problem in read.problems], "the data")
    return read.pixels, list(read.notes)


def decode_images(pictures: Sequence[Picture], size: tuple[int, int] | None = None, together: int = 0) -> DecodedImages:
    """As `read_images`, but files that cannot be read are left out, and told all together."""
    problems: dict[int, Problem] = {}
    with decoder_warnings():
        headers = {p: header for p, picture in enumerate(pictures) if (header := _known(picture, p, problems))}
        if not headers:
            return DecodedImages(_NO_PIXELS, [], problems=list(problems.values()))
        return _decode_known(pictures, headers, size, max(together, len(pictures)), problems)


def recognise_images(
    pictures: Sequence[Picture], size: tuple[int, int] | None = None, together: int = 0
) -> DecodedImages:
    """As `decode_images`, but where all files are known from an earlier run, none is decoded before it is asked for.

    What is deep is scaled together, how DICOM is decoded depends on what is installed, and many images go to a file:
    all these are decoded.
    """
    headers = [picture.header for picture in pictures]
    flat = [header for header in headers if header is not None and not header.deep and header.format != "DICOM"]
    if not flat or len(flat) < len(pictures):
        return decode_images(pictures, size, together)
    chosen = size or common_size([header.size for header in flat])
    shape = (len(flat), 3 if any(header.colour for header in flat) else 1, *chosen)
    if not fits_in_memory(shape, max(together, len(flat)) * prod(shape[1:])):
        return decode_images(pictures, size, together)
    known = KnownImages()
    try:
        marks = in_threads(lambda picture: file_mark(picture, shape[1:]), pictures)
    except OSError:
        return decode_images(pictures, size, together)
    digests = known.read(marks)
    if any(mark not in digests for mark in marks):
        read = decode_images(pictures, size, together)
        new = in_threads(lambda row: pixel_digest(read.pixels[row].numpy()), range(len(read.kept)))
        known.write({marks[position]: digest for position, digest in zip(read.kept, new, strict=True)})
        return read
    unread = UndecodedPixels(shape, [digests[mark] for mark in marks], partial(_decode_again, pictures, chosen))
    notes = size_notes(flat, chosen) if size is None else []
    return DecodedImages(StoredPixels([unread]), range(len(pictures)), notes)


def _decode_again(pictures: Sequence[Picture], size: tuple[int, int], rows: Sequence[int]) -> Sequence[NDArray[Any]]:
    """The pixels of some pictures that could be decoded before."""

    def again(row: int) -> NDArray[Any]:
        try:
            header, values = decode(pictures[row], size)
        except BadImage as bad:
            raise UserError(str(bad.problem)) from None
        expected = pictures[row].header
        if expected is None or not header.looks_like(expected):
            raise UserError(str(changed(pictures[row].path)))
        return values

    with decoder_warnings():
        return in_threads(again, rows)


def size_notes(headers: Sequence[ImageHeader], size: tuple[int, int]) -> list[str]:
    """What is said where images did not have the size that they were brought to."""
    if all(header.size == size for header in headers):
        return []
    return [f"images of different sizes were resized to {size[0]}x{size[1]}; --image-size sets another"]


def _known(picture: Picture, position: int, problems: dict[int, Problem]) -> ImageHeader | None:
    try:
        return header_of(picture)
    except BadImage as bad:
        problems[position] = bad.problem
        return None


def _decode_known(
    pictures: Sequence[Picture],
    headers: Mapping[int, ImageHeader],
    size: tuple[int, int] | None,
    together: int,
    problems: dict[int, Problem],
) -> DecodedImages:
    notes: list[str] = []
    if size is None:
        size = common_size([header.size for header in headers.values()])
        notes += size_notes(list(headers.values()), size)
    rows = {position: row for row, position in enumerate(headers)}
    shape = (len(rows), 3 if any(header.colour for header in headers.values()) else 1, *size)
    pixels = empty_pixels(shape, together * prod(shape[1:]))
    places = {p: place for place, p in enumerate(p for p, header in headers.items() if header.deep)}
    deep_shape = (len(places), 1, *size)
    deep = empty_pixels(deep_shape, 4 * prod(deep_shape), np.float32)

    def place(position: int) -> float | Problem:
        """Into its place; the largest value of a deep image."""
        try:
            header, values = decode(pictures[position], size)
            if not header.looks_like(headers[position]):
                return changed(pictures[position].path)
        except BadImage as bad:
            return bad.problem
        if not header.deep:
            pixels[rows[position]] = values
            return 0.0
        deep[places[position]] = values
        return float(values.max())

    results = dict(zip(rows, in_threads(place, list(rows)), strict=True))
    problems |= {position: found for position, found in results.items() if isinstance(found, Problem)}
    if places:
        bits = depth(max((peak for peak in map(results.get, places) if isinstance(peak, float)), default=0.0))
        for position, row in ((p, rows[p]) for p in places if p not in problems):
            pixels[row] = np.clip(np.rint(deep[places[position]] * (255 / (2**bits - 1))), 0, 255)
        if bits < 16:
            notes.append(shallow_note(bits))
    kept = [position for position in rows if position not in problems]
    read = filled(pixels)
    if len(kept) < len(rows):
        read = select(read, torch.tensor([rows[position] for position in kept], dtype=torch.int64))
    return DecodedImages(read, kept, notes, [problems[position] for position in sorted(problems)])


def in_threads(work: Callable[[G], R], items: Sequence[G]) -> list[R]:
    """What the work gives for each, on all cores: decoders leave the interpreter to others while they run.

    No more is under way than there are cores. The first to raise ends it all.
    """
    if len(items) < _WORTH_THREADS:
        return [work(item) for item in items]
    # To hand over a single item takes as long as the quickest work on it.
    parts = [items[start : start + _AT_ONCE] for start in range(0, len(items), _AT_ONCE)]
    with ThreadPoolExecutor(cores()) as pool:
        return [result for results in pool.map(lambda part: list(map(work, part)), parts) for result in results]


def read_domains(
    files: Mapping[str, Sequence[LabelledFile]],
    classes: Sequence[str],
    size: tuple[int, int] | None,
    read: PixelReader = decode_images,
    skip: bool = False,
    where: object = "the data",
) -> RawData:
    """The files of each domain as images, with warnings; every image gets `size`, or one common to its domain.

    Files that cannot be read are refused, all in one error, or left out with `skip`, each with a warning.
    """
    index = {name: number for number, name in enumerate(classes)}
    read_ones: dict[str, tuple[list[LabelledFile], Pixels]] = {}
    warnings: list[str] = []
    problems: list[Problem] = []
    together = sum(map(len, files.values()))
    for name, members in files.items():
        found = read([file.picture for file in members], size, together)
        read_ones[name] = [members[position] for position in found.kept], found.pixels
        warnings += [f"domain {name}: {note}" for note in found.notes]
        problems += found.problems
    if not skip:
        refuse([replace(problem, severity="error") for problem in problems], where)
    warnings += [f"{problem.file} is left out: {problem.text}" for problem in problems]
    domains = {name: _make_domain(name, members, index, x) for name, (members, x) in read_ones.items()}
    return RawData(tuple(classes), domains, warnings=tuple(warnings))


def _make_domain(name: str, files: Sequence[LabelledFile], class_index: Mapping[str, int], x: Pixels) -> Domain:
    y = torch.tensor([class_index[file.label] for file in files], dtype=torch.int64)
    parts: dict[str, Images] = {}
    for part in ("train", "test", "validation"):
        positions = [position for position, file in enumerate(files) if file.part == part]
        if positions:
            parts[part] = Images(x, y).take(positions)
        elif part != "validation":
            raise UserError(f"domain {name} has no {part} images; put at least one image of it into {part}")
    return Domain(name, parts["train"], parts["test"], parts.get("validation"))


def depth(peak: float) -> int:
    """How many bits the values of 16-bit images really use: the smallest common depth that holds the largest one."""
    return next((bits for bits in (8, 10, 12, 14) if peak < 2**bits), 16)


def shallow_note(bits: int) -> str:
    """The warning for 16-bit images that do not use their 16 bits."""
    return f"the 16-bit images use only {bits} bits and were scaled accordingly"


def common_size(sizes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The size that images are brought to where nobody asks for one."""
    if len(set(sizes)) == 1:
        return sizes[0]
    height, width = (median(sides) for sides in zip(*sizes, strict=True))
    shrink = min(1.0, LARGEST_DEFAULT_SIDE / max(height, width))
    return max(4, round(height * shrink)), max(4, round(width * shrink))

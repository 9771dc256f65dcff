"""Class probabilities for images without labels."""

import csv
import io
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from protofed.data.decoding import IMAGE_KINDS, Picture, is_image
from protofed.data.files import decode_images, read_images
from protofed.data.images import to_shape
from protofed.data.listing import read_headers
from protofed.data.pixels import Pixels
from protofed.data.problems import Problem, refuse
from protofed.data.walk import image_listing
from protofed.errors import UserError
from protofed.inference.classifier import Classifier
from protofed.system import one_thread, write_atomically

log = logging.getLogger("protofed")


def predict(classifier: Classifier, images: str | Path, out: str | Path) -> dict[str, int]:
    """Write a csv file with a line per image below a folder: file, class, probability of every class.

    Images are converted to the size and channels of the run; unreadable ones are skipped, each with a warning.
    A file with pages has a line for each, FILE#2 for the second. Returns the number of images per class.
    """
    paths, problems = _listed(Path(images))
    pictures, damaged = _pictures(paths)
    read = decode_images(pictures, classifier.image_shape[1:])
    skipped = [*damaged, *read.problems]
    if not read.kept:
        refuse([replace(problem, severity="error") for problem in skipped], images)
    for problem in (*problems, *skipped):
        log.warning("skipped %s", problem)
    with one_thread():
        probabilities = classifier.probabilities(to_shape(read.pixels, classifier.image_shape))
    predicted = probabilities.argmax(1).tolist()
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(["file", "predicted", *map(_as_text, classifier.classes)])
    root = Path(images) if Path(images).is_dir() else Path(images).parent
    for position, label, row in zip(read.kept, predicted, probabilities.tolist(), strict=True):
        names = (Path(pictures[position].name).relative_to(root).as_posix(), classifier.classes[label])
        writer.writerow([*map(_as_text, names), *(f"{p:.6f}" for p in row)])
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    write_atomically(Path(out), table.getvalue().encode())
    return {name: predicted.count(index) for index, name in enumerate(classifier.classes)}


def _as_text(name: str) -> str:
    """A name that no spreadsheet takes for a formula: files and classes are named by others."""
    return f"'{name}" if name.startswith(("=", "+", "-", "@", "\t", "\r")) else name


def image_files(place: Path) -> list[Path]:
    """The image files below a folder, sorted, or one file."""
    return _listed(place)[0]


def _listed(place: Path) -> tuple[list[Path], list[Problem]]:
    """The image files below a folder, or one file, and what there is besides."""
    if place.is_file():
        paths, problems = ([place] if is_image(place) else []), list[Problem]()
    elif place.is_dir():
        paths, problems = image_listing(place)
    else:
        raise UserError(f"there is no folder {place}; give one with images")
    if not paths:
        raise UserError(f"{place} contains no images; supported are {IMAGE_KINDS} files, also in subfolders")
    return paths, problems


def _pictures(paths: Sequence[Path]) -> tuple[list[Picture], list[Problem]]:
    """Every page of every file, and the files that cannot be opened."""
    pictures: list[Picture] = []
    problems: list[Problem] = []
    for path, found in zip(paths, read_headers(paths), strict=True):
        if isinstance(found, Problem):
            problems.append(found)
        else:
            pictures += [Picture(path, page, header) for page, header in enumerate(found)]
    return pictures, problems


def pixels_for(classifier: Classifier, paths: list[Path]) -> Pixels:
    """Image files as the run would read them."""
    pixels, _ = read_images(paths, classifier.image_shape[1:])
    return to_shape(pixels, classifier.image_shape)

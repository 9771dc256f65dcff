"""Class probabilities for images without labels."""

import csv
import io
from pathlib import Path

from protofed.data.decoding import IMAGE_SUFFIXES, is_image
from protofed.data.files import read_images
from protofed.data.images import to_shape
from protofed.data.pixels import Pixels
from protofed.errors import UserError
from protofed.inference.classifier import Classifier
from protofed.system import one_thread, write_atomically


def predict(classifier: Classifier, images: str | Path, out: str | Path) -> dict[str, int]:
    """Write a csv file with a line per image below a folder: file, class, probability of every class.

    Images are brought to the size and channels of the run. Returns how many fell to each class.
    """
    paths = image_files(Path(images))
    pixels = pixels_for(classifier, paths)
    with one_thread():
        probabilities = classifier.probabilities(pixels)
    predicted = probabilities.argmax(1).tolist()
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    writer.writerow(["file", "predicted", *classifier.classes])
    root = Path(images) if Path(images).is_dir() else Path(images).parent
    for path, label, row in zip(paths, predicted, probabilities.tolist(), strict=True):
        writer.writerow([path.relative_to(root).as_posix(), classifier.classes[label], *(f"{p:.6f}" for p in row)])
    Path(out).parent.mkdir(parents=True, exist_ok=True)
    write_atomically(Path(out), table.getvalue().encode())
    return {name: predicted.count(index) for index, name in enumerate(classifier.classes)}


def image_files(place: Path) -> list[Path]:
    """The image files below a folder, sorted, or one file."""
    if place.is_file():
        paths = [place] if is_image(place) else []
    elif place.is_dir():
        paths = sorted(path for path in place.rglob("*") if path.is_file() and is_image(path))
    else:
        raise UserError(f"there is no folder {place}; give one with images")
    if not paths:
        kinds = ", ".join(suffix[1:] for suffix in IMAGE_SUFFIXES)
        raise UserError(f"{place} holds no images; they are {kinds} files, also in folders below it")
    return paths


def pixels_for(classifier: Classifier, paths: list[Path]) -> Pixels:
    """Image files as the run would read them."""
    pixels, _ = read_images(paths, classifier.image_shape[1:])
    return to_shape(pixels, classifier.image_shape)

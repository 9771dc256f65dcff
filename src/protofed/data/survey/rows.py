"""The table that findings are made from: a row for every image, of files or of arrays."""

from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protofed.data.decoding import ImageHeader
from protofed.data.images import Dataset, to_channels, to_size
from protofed.data.listing import Listing, SettledFiles
from protofed.data.pixels import pieces
from protofed.data.survey.findings import ImageTable
from protofed.data.survey.looks import THUMBNAIL, Look


def table_of_files(listing: Listing, settled: SettledFiles, looks: Mapping[str, Look]) -> ImageTable:
    """A row for every image, or page of one."""
    keys = {file.path: file.key for file in listing.files}
    rows = [(site, file, looks[str(file.path)]) for site, files in settled.files.items() for file in files]
    blank = bytes(THUMBNAIL[0] * THUMBNAIL[1])
    thumbnails = b"".join(blank if file.page else look.thumbnail for _, file, look in rows)
    headers = [file.header or ImageHeader((0, 0), False, False) for _, file, _ in rows]
    return ImageTable(
        names=[keys[str(file.path)] + (f"#{file.page + 1}" if file.page else "") for _, file, _ in rows],
        site=_column([site for site, _, _ in rows]),
        part=_column([file.part for _, file, _ in rows]),
        label=_column([file.label for _, file, _ in rows]),
        digest=_column([look.digest + bytes([file.page % 256]) for _, file, look in rows]),
        thumbnail=np.frombuffer(thumbnails, dtype=np.uint8).reshape(-1, *THUMBNAIL),
        seen=np.array([not file.page for _, file, _ in rows], dtype=bool),
        mean=np.array([look.mean for _, _, look in rows], dtype=np.float64),
        std=np.array([look.std for _, _, look in rows], dtype=np.float64),
        kind=_column([_kind(header) for header in headers]),
        size=_column([f"{header.size[0]}x{header.size[1]}" for header in headers]),
    )


def table_of_arrays(dataset: Dataset) -> ImageTable:
    """A row for every image of arrays."""
    names: list[str] = []
    columns: dict[str, list[Any]] = {key: [] for key in ("site", "part", "label", "digest", "mean", "std")}
    thumbnails: list[NDArray[np.uint8]] = []
    for site, domain in dataset.domains.items():
        parts = {"train": domain.train, "test": domain.test, "validation": domain.validation}
        for part, images in ((part, images) for part, images in parts.items() if images is not None):
            names += [f"{site} {part} {number}" for number in range(len(images))]
            columns["site"] += [site] * len(images)
            columns["part"] += [part] * len(images)
            columns["label"] += [dataset.classes[label] for label in images.y.tolist()]
            for x in pieces(images.x):
                small = to_size(to_channels(x, 1), THUMBNAIL)
                thumbnails.append(small[:, 0].numpy())
                columns["mean"] += x.float().mean((1, 2, 3)).tolist()
                columns["std"] += x.float().flatten(1).std(1).tolist()
                columns["digest"] += [blake2b(picture.tobytes(), digest_size=16).digest() for picture in x.numpy()]
    shape = dataset.image_shape
    count = len(names)
    header = ImageHeader(shape[1:], shape[0] == 3, False, 8, "array")
    return ImageTable(
        names,
        site=_column(columns["site"]),
        part=_column(columns["part"]),
        label=_column(columns["label"]),
        digest=_column(columns["digest"]),
        thumbnail=np.concatenate(thumbnails),
        seen=np.ones(count, dtype=bool),
        mean=np.array(columns["mean"]),
        std=np.array(columns["std"]),
        kind=_column([_kind(header)] * count),
        size=_column([f"{shape[1]}x{shape[2]}"] * count),
    )


def _column(values: Sequence[Any]) -> NDArray[np.object_]:
    column = np.empty(len(values), dtype=object)
    column[:] = values
    return column


def _kind(header: ImageHeader) -> str:
    return f"{'colour' if header.colour else 'grey'}, {header.bits} bits, {header.format}"

"""FEMNIST as LEAF writes it: json files with the characters of each writer."""

import json
import string
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import Field

from protofed.data.images import Domain, Images, RawData
from protofed.data.pixels import join
from protofed.data.sources.arrays import damaged, from_unit, make_domain, make_images
from protofed.data.sources.source import Size
from protofed.errors import UserError

CLASSES = tuple(string.digits + string.ascii_uppercase + string.ascii_lowercase)
Domains = Annotated[Literal["pooled", "writers"], "all writers as one domain, or a domain for each writer"]
Writers = Annotated[int, Field(ge=0), "use only this many writers, in the order of their names; 0 for all"]
_SIDE = 28


def read_femnist(
    folder: Path, _: Size, *, femnist_domains: Domains = "pooled", femnist_writers: Writers = 0
) -> RawData:
    """The 62 characters of LEAF, with LEAF's own division into training and test samples."""
    train, test = _part(folder, "train", femnist_writers), _part(folder, "test", femnist_writers)
    if femnist_domains == "pooled":
        return RawData(CLASSES, {"femnist": make_domain("femnist", _joined(train), _joined(test), len(CLASSES))})
    # A writer of one part only (LEAF can divide by writer, too) could not be trained on and tested.
    both = [writer for writer in train if writer in test]
    if not both:
        raise UserError(f"{folder}: no writer is in both train and test; use --set data.femnist_domains=pooled")
    left = len(train.keys() | test.keys()) - len(both)
    warnings = (f"{left} writers are left out, because they are only in train or only in test",) if left else ()
    domains: dict[str, Domain] = {
        writer: make_domain(writer, train[writer], test[writer], len(CLASSES)) for writer in both
    }
    return RawData(CLASSES, domains, warnings=warnings)


def _part(folder: Path, part: str, most: int) -> dict[str, Images]:
    """The samples of each writer, sorted by name; one file at a time becomes bytes, so that memory stays bounded."""
    writers: dict[str, Images] = {}
    for path in sorted((folder / part).glob("*.json")):
        try:
            users = json.loads(path.read_bytes())["user_data"]
            for writer, samples in users.items():
                writers[writer] = make_images(_pixels(samples["x"]), samples["y"], f"{path}, writer {writer}")
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as problem:
            raise damaged(path, problem) from None
    if not writers:
        raise UserError(f"{folder / part} holds no json files with writers; run LEAF's preprocessing for femnist")
    return {writer: writers[writer] for writer in sorted(writers)[: most or None]}


def _pixels(rows: list[list[float]]) -> NDArray[np.uint8]:
    return from_unit(np.asarray(rows, dtype=np.float32).reshape(-1, _SIDE, _SIDE))


def _joined(writers: dict[str, Images]) -> Images:
    return Images(join([part.x for part in writers.values()]), torch.cat([part.y for part in writers.values()]))

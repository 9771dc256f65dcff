"""Class probabilities of test images, as a run keeps them in `predictions.npz`.

Rows are `labels` [n], `samples` [n] (which image of the data it is) and `probabilities` [n, C], float32. A view
(`global`, `personal`) has the names of its parts (domains, clients) and where the rows of each begin and end; parts
that say the same of the same images share their rows. Plain arrays only: nothing in the file is ever unpickled.
"""

import io
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protofed.errors import UserError

Labels = NDArray[np.int64]
Probabilities = NDArray[np.floating[Any]]

_VIEWS = ("global", "personal")


@dataclass(frozen=True, eq=False)
class PredictedSet:
    """One test set as one model sees it."""

    labels: Labels
    probabilities: Probabilities
    """[n, C]"""
    samples: Labels
    """Which images of the data they are, so that models can be compared on the same ones."""

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def classes(self) -> int:
        """How many classes there are, whether or not images of all of them are here."""
        return int(self.probabilities.shape[1])

    @cached_property
    def images(self) -> str:
        """Names the images, in their order: the same for every model that was tested on them."""
        return blake2b(self.samples.tobytes() + self.labels.tobytes(), digest_size=16).hexdigest()

    @cached_property
    def content(self) -> str:
        """Names the images and what is predicted for them."""
        held = np.ascontiguousarray(self.probabilities).tobytes()
        return blake2b(self.images.encode() + held, digest_size=16).hexdigest()

    @cached_property
    def in_order(self) -> "PredictedSet":
        """The same with the images in the order of their numbers."""
        order = np.argsort(self.samples, kind="stable")
        return PredictedSet(self.labels[order], self.probabilities[order], self.samples[order])


@dataclass(frozen=True)
class KeptPredictions:
    """What predictions.npz holds."""

    classes: tuple[str, ...]
    views: Mapping[str, Mapping[str, PredictedSet]]

    def encoded(self) -> bytes:
        """The content of the file; equal predictions are equal bytes."""
        starts: dict[int, int] = {}
        sets: list[PredictedSet] = []
        arrays: dict[str, NDArray[Any]] = {"classes": np.array(self.classes, dtype=np.str_)}
        total = 0
        for view, parts in self.views.items():
            for part in parts.values():
                if id(part.probabilities) not in starts:
                    starts[id(part.probabilities)] = total
                    sets.append(part)
                    total += len(part)
            start = np.array([starts[id(part.probabilities)] for part in parts.values()], dtype=np.int64)
            arrays[f"{view}_names"] = np.array(list(parts), dtype=np.str_)
            arrays[f"{view}_start"] = start
            arrays[f"{view}_stop"] = start + np.array([len(part) for part in parts.values()], dtype=np.int64)
        empty = PredictedSet(np.zeros(0, np.int64), np.zeros((0, len(self.classes)), np.float32), np.zeros(0, np.int64))
        rows = sets or [empty]
        arrays["labels"] = np.concatenate([each.labels for each in rows]).astype(np.int32)
        arrays["samples"] = np.concatenate([each.samples for each in rows]).astype(np.int64)
        arrays["probabilities"] = np.concatenate([each.probabilities for each in rows]).astype(np.float32)
        file = io.BytesIO()
        np.savez(file, **arrays)  # type: ignore[arg-type]  # an array is never taken for allow_pickle
        return file.getvalue()

    @classmethod
    def read(cls, path: Path) -> "KeptPredictions":
        """From the file; one that is damaged is refused."""
        try:
            with np.load(path, allow_pickle=False) as file:
                return cls._of({name: file[name] for name in file.files})
        except (ValueError, KeyError, EOFError, OSError, zipfile.BadZipFile) as problem:
            raise UserError(f"{path} is damaged ({problem})") from None

    @classmethod
    def _of(cls, arrays: Mapping[str, NDArray[Any]]) -> "KeptPredictions":
        labels, samples = arrays["labels"].astype(np.int64), arrays["samples"].astype(np.int64)
        probabilities, classes = arrays["probabilities"], tuple(str(name) for name in arrays["classes"])
        rows = len(labels)
        if samples.shape != (rows,) or probabilities.shape != (rows, len(classes)) or probabilities.dtype.kind != "f":
            raise ValueError("its arrays do not fit together")
        if rows and not 0 <= labels.min() <= labels.max() < len(classes):
            raise ValueError("it has labels that are not classes")
        whole = PredictedSet(labels, probabilities, samples)
        views = {view: cls._view(arrays, view, whole) for view in _VIEWS if f"{view}_names" in arrays}
        return cls(classes, views)

    @staticmethod
    def _view(arrays: Mapping[str, NDArray[Any]], view: str, rows: PredictedSet) -> dict[str, PredictedSet]:
        parts = {}
        bounds = zip(arrays[f"{view}_names"], arrays[f"{view}_start"], arrays[f"{view}_stop"], strict=True)
        for name, start, stop in bounds:
            if not 0 <= start <= stop <= len(rows):
                raise ValueError(f"the rows of {name} are not there")
            own = slice(int(start), int(stop))
            parts[str(name)] = PredictedSet(rows.labels[own], rows.probabilities[own], rows.samples[own])
        return parts

"""A federation of a published table without its images: right shapes, right sizes, a few generated pictures.

What depends on how many images there are is asked of the declared sizes; what depends on pixels, of a few of them.
"""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from protofed.clients.trial import trial_batch
from protofed.data import Dataset, Domain, Images, Normalise, Partition, make_partition
from protofed.data.catalog import data_options
from protofed.runs.assembly import Assembly, assemble
from protofed.runs.options import Options, make_options
from protofed.studies.tables.preset import Preset, Scale

_OF_THE_PARTITION = ("protocol", "clients", "fraction", "samples_per_client")


@dataclass(frozen=True)
class Fixture:
    """A method ready to run on generated images, and what it would be on the real ones."""

    assembly: Assembly
    partition: Partition
    """Who would hold how many of the real images."""
    test_images: int

    @property
    def sizes(self) -> dict[str, int]:
        """Training images of every client in the real federation."""
        return {client: len(indices) for client, indices in self.partition.train.items()}


@contextmanager
def fixture(preset: Preset, dataset: str, scale: Scale, method: str, options: Mapping[str, Any]) -> Iterator[Fixture]:
    """Inside: a method of a table, assembled; the options are those of its run, of which the data are replaced."""
    declared, classes = preset.images(dataset, scale), preset.suite.data[dataset].classes
    chosen = make_options({**options, "method": method})
    partition = real_partition(preset, dataset, scale, chosen)
    own = [f"data.{key}" for key in data_options(chosen.data)]
    per_domain = _clients_per_domain(partition, list(declared.images))
    each = max(classes, trial_batch(declared.shape, chosen.batch))
    with tempfile.TemporaryDirectory(prefix="protofed-fixture-") as temporary:
        folder = Path(temporary) / dataset
        folder.mkdir()
        for domain, clients in per_domain.items():
            _write(folder / f"{domain}.npz", classes, each * max(1, clients), declared.shape)
        replaced = {
            "data": str(folder),
            "data_root": None,
            "weights": None,
            "labels": None,
            "fraction": None,
            "samples_per_client": None,
            "image_size": None,
            "engine": "loop",
            "set": {key: value for key, value in chosen.set.items() if key not in own},
        }
        # A few pictures cannot be dealt out with strong skew so that every client has some of them.
        if partition.protocol.startswith(("dirichlet", "shards")):
            replaced |= {"protocol": f"iid={len(partition.clients)}", "clients": None}
        few = make_options({**chosen.model_dump(), **replaced})
        assembly = assemble(few, Path(temporary) / "clients")
        pooled = partition.pooled() if assembly.context.method.pools_data else partition
        yield Fixture(assembly, pooled, sum(test for _, test in declared.images.values()))


def real_partition(preset: Preset, dataset: str, scale: Scale, options: Options) -> Partition:
    """The declared images, dealt out: labels in turn, and a single black pixel for every image."""
    classes = preset.suite.data[dataset].classes

    def black(count: int) -> Images:
        return Images(torch.zeros(count, 1, 1, 1, dtype=torch.uint8), torch.arange(count) % classes)

    domains = {
        name: Domain(name, black(train), black(test))
        for name, (train, test) in preset.images(dataset, scale).images.items()
    }
    named = tuple(f"class{k}" for k in range(classes))
    holdout = float(options.settings_for("data").get("holdout", 0.2))
    chosen = {key: getattr(options, key) for key in _OF_THE_PARTITION}
    blank = Dataset(dataset, named, domains, Normalise.default(1))
    return make_partition(blank, **chosen, holdout=holdout, seed=options.seed)


def _clients_per_domain(partition: Partition, domains: list[str]) -> dict[str, int]:
    """By how many clients the pictures of each domain must suffice."""
    served = list(partition.domain.values())
    return {name: served.count(name) or (0 if any(served) else len(served)) for name in domains}


def _write(path: Path, classes: int, count: int, shape: tuple[int, int, int]) -> None:
    """A domain of noise, with every class in turn."""
    rng = np.random.default_rng(0)
    channels, height, width = shape
    y = np.arange(count) % classes
    x = rng.integers(0, 256, (count, height, width, channels), dtype=np.uint8)
    tested = x[: 2 * classes], y[: 2 * classes]
    names = np.array([f"class{k}" for k in range(classes)])
    np.savez(path, x_train=x, y_train=y, x_test=255 - tested[0], y_test=tested[1], classes=names)

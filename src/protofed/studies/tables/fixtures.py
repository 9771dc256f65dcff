"""A federation of a published table without its images: right shapes, right sizes, a few generated pictures.

What depends on how many images there are is asked of the declared sizes; what depends on pixels, of a few of them.
"""

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from protofed.clients.trial import trial_batches
from protofed.data import Dataset, Domain, Images, Normalise, Partition, make_partition
from protofed.data.catalog import data_options
from protofed.registry import find_method, knobs
from protofed.runs.assembly import Assembly, assemble
from protofed.runs.options import Options, make_options
from protofed.studies.compare import scaled_plan
from protofed.studies.schema import Scale
from protofed.studies.tables.preset import Preset, PublishedRow


@dataclass(frozen=True)
class _Fixture:
    """A method ready to run on generated images, and what it would be on the real ones."""

    assembly: Assembly
    sizes: dict[str, int]
    """Training images of every client in the real federation."""
    test_images: int


_PARTITION_OPTIONS = ("protocol", "clients", "fraction", "samples_per_client", "seed")


@contextmanager
def fixture(
    preset: Preset, row: PublishedRow, dataset: str, scale: Scale, overrides: Mapping[str, Any]
) -> Iterator[_Fixture]:
    """Inside: a row of a table, assembled with its first condition and the user's options, on generated images."""
    declared, classes = preset.images(dataset, scale), preset.suite.data[dataset].classes
    options = row_options(preset, row, dataset, scale, overrides)
    partition = real_partition(preset, dataset, scale, options)
    own = [f"data.{key}" for key in data_options(options.data)]
    per_domain = _clients_per_domain(partition, list(declared.images))
    shape = shape_in_runs(declared.shape, options)
    each = max(classes, *trial_batches(shape, options.batch))
    with tempfile.TemporaryDirectory(prefix="protofed-fixture-") as temporary:
        folder = Path(temporary) / dataset
        folder.mkdir()
        for domain, clients in per_domain.items():
            _write(folder / f"{domain}.npz", classes, each * max(1, clients), shape)
        replaced = {
            "data": str(folder),
            "data_root": None,
            "weights": None,
            "labels": None,
            "fraction": None,
            "samples_per_client": None,
            "engine": "loop",
            "set": {key: value for key, value in options.set.items() if key not in own},
        }
        # A few pictures cannot be dealt out with strong skew so that every client has some of them.
        if partition.protocol.startswith(("dirichlet", "shards")):
            replaced |= {"protocol": f"iid={len(partition.clients)}", "clients": None}
        generated = make_options({**options.model_dump(), **replaced})
        assembly = assemble(generated, Path(temporary) / "clients")
        yield _Fixture(assembly, training_sizes(partition, options.method), declared.test_images)


def training_sizes(partition: Partition, method: str) -> dict[str, int]:
    """Training images of every client; of one that has all where the method pools them."""
    dealt = partition.pooled() if find_method(method).pools_data else partition
    return {client: len(indices) for client, indices in dealt.train.items()}


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
    return partition_of(Dataset(dataset, named, domains, Normalise.default(1)), options, holdout)


def partition_of(dataset: Dataset, options: Options, holdout: float) -> Partition:
    """Images dealt out as the options say; clients keep the share `holdout` for tests of their own."""
    return make_partition(dataset, **{key: getattr(options, key) for key in _PARTITION_OPTIONS}, holdout=holdout)


def row_options(
    preset: Preset,
    row: PublishedRow,
    dataset: str,
    scale: Scale,
    overrides: Mapping[str, Any],
    condition: Mapping[str, Any] | None = None,
) -> Options:
    """The options of a run of one row under a condition, which is the first unless it is given."""
    if condition is None:
        condition = next(iter(preset.conditions(dataset, scale).values()))
    options = preset.run_options(dataset, scale, condition, overrides, row.options_at(scale))
    cls = find_method(row.method)
    known = {knob.name for knob in knobs(cls)}
    settings = {key.removeprefix(f"{row.method}."): value for key, value in options["set"].items()}
    own = {key: value for key, value in settings.items() if key in known or key.startswith(("model.", "data."))}
    options["set"] = {**scaled_plan(cls, known, {**options, "set": {}}), **own}
    named = preset.suite.data[dataset].preset
    return make_options({**({"preset": named} if named in cls.presets else {}), **options, "method": row.method})


def shape_in_runs(declared: tuple[int, int, int], options: Options) -> tuple[int, int, int]:
    """Of the images as networks get them."""
    channels, height, width = declared
    return (channels, height, width) if options.image_size is None else (channels, *2 * (options.image_size,))


def run_key(options: Options) -> str:
    """The same for runs that differ in their seed only."""
    return json.dumps(options.model_dump(exclude={"seed"}), sort_keys=True)


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

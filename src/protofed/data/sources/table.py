"""The published data sets by name: the facts of `sources.toml`, joined to the functions that read the files."""

import tomllib
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

from protofed.data.sources.cifar import read_cifar10
from protofed.data.sources.digits import read_emnist, read_mnist, read_mnist_m, read_svhn, read_syn, read_usps
from protofed.data.sources.femnist import read_femnist
from protofed.data.sources.medical import (
    medmnist_reader,
    read_busi,
    read_covid_qu_ex,
    read_india,
    read_montgomery,
    read_neojaundice,
    read_shenzhen,
)
from protofed.data.sources.office import read_office_caltech10, read_pacs
from protofed.data.sources.pictures import EIGHTY_TWENTY, EVERY_TENTH
from protofed.data.sources.retina import read_aptos, read_eyepacs, read_idrid, read_kaggle_dr, read_retino
from protofed.data.sources.source import Benchmark, Original, Reader, Source

_SPLITS = {
    "80/20": EIGHTY_TWENTY,
    "80/20 by patient": f"{EIGHTY_TWENTY}, all images of a patient on one side",
    "80/20, folders joined": f"{EIGHTY_TWENTY}; its own two folders are merged",
    "every tenth": EVERY_TENTH,
    "validation trained on": "official; validation images join the training images",
}
_READERS: dict[str, Reader] = {
    "mnist": read_mnist,
    "emnist": read_emnist,
    "usps": read_usps,
    "svhn": read_svhn,
    "syn": read_syn,
    "mnist_m": read_mnist_m,
    "cifar10": read_cifar10,
    "office_caltech10": read_office_caltech10,
    "pacs": read_pacs,
    "femnist": read_femnist,
    "aptos": read_aptos,
    "idrid": read_idrid,
    "retino": read_retino,
    "kaggle_dr": read_kaggle_dr,
    "eyepacs": read_eyepacs,
    "montgomery": read_montgomery,
    "shenzhen": read_shenzhen,
    "india": read_india,
    "covid_qu_ex": read_covid_qu_ex,
    "busi": read_busi,
    "neojaundice": read_neojaundice,
}


def _original(name: str, facts: dict[str, Any], read: Reader) -> Original:
    facts["split"] = _SPLITS.get(facts["split"], facts["split"])
    facts["counts"] = {domain: tuple(counts) for domain, counts in facts.get("counts", {}).items()}
    lists = {key: tuple(value) for key, value in facts.items() if isinstance(value, list)}
    return Original(name, read=read, **(facts | lists))


def _medmnist(stem: str, facts: dict[str, Any]) -> Original:
    train, validation, test = facts["counts"]
    return Original(
        f"medmnist_{stem}",
        f"MedMNIST: {facts['content']}, {len(facts['classes'])} classes, 28x28 to 224x224",
        publisher="J. Yang and others",
        download=f"{stem}.npz (or {stem}_64.npz, _128, _224) from https://zenodo.org/records/10519652",
        terms=facts.get("licence", "CC BY 4.0"),
        layout=(f"medmnist/{stem}.npz", "the smallest file that has the --image-size asked for is read"),
        split=_SPLITS["validation trained on"],
        needs=(f"{stem}.npz|{stem}_64.npz|{stem}_128.npz|{stem}_224.npz",),
        read=medmnist_reader(stem, facts["classes"]),
        places=("medmnist",),
        counts={stem: (train + validation, test)},
        md5={f"{stem}.npz": facts["md5"]},
    )


def _sources() -> Iterator[Source]:
    facts = tomllib.loads(files(__package__).joinpath("sources.toml").read_text(encoding="utf-8"))
    originals = {name: _original(name, facts["originals"][name], read) for name, read in _READERS.items()}
    for name, benchmark in facts["benchmarks"].items():
        members, others = tuple(benchmark["members"]), tuple(benchmark.get("others", ()))
        choices = {member: originals[member] for member in (*members, *others)}
        yield Benchmark(name, benchmark["description"], members, choices)
    yield from originals.values()
    for stem, medmnist in facts["medmnist"].items():
        yield _medmnist(stem, medmnist)


SOURCES: dict[str, Source] = {source.name: source for source in _sources()}

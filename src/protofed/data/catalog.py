"""Finds data by name, folder or manifest, and brings it into the shape a run needs."""

import os
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from hashlib import blake2b
from math import prod
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from protofed.data import digits, lesions
from protofed.data.archives import npz_files, read_npz
from protofed.data.folders import FOLDER_LAYOUT, read_folder, visible_folders
from protofed.data.images import DataPlace, Dataset, Domain, Images, RawData, square, unify
from protofed.data.labels import alike_classes, held_classes, regroup
from protofed.data.listing import ReadOptions
from protofed.data.manifest import read_manifest
from protofed.data.normalise import Normalise
from protofed.data.pixels import StoredPixels, digest_of, pieces, pixel_digest
from protofed.data.sources import SOURCES, Reader
from protofed.errors import UserError, unknown_name
from protofed.settings import SettingInfo, checked, keyword_settings
from protofed.text import counted

ROOT_VARIABLE = "PROTOFED_DATA"
MANIFEST_SUFFIXES = (".csv", ".tsv")

_AS_READ = {key: value for key, value in vars(ReadOptions()).items() if key != "undecoded"}
"""Choices that may change what is read."""

Form = Literal["original", "npz", "folders", "registered", "absent"]


@dataclass(frozen=True)
class DataInfo:
    """One line of the list of data sets."""

    name: str
    description: str
    domains: tuple[str, ...] = ()
    licence: str = ""


@dataclass(frozen=True)
class DomainSummary:
    """How much a domain holds; images per class are in the order of the classes."""

    name: str
    train: int
    test: int
    train_per_class: tuple[int, ...]
    test_per_class: tuple[int, ...]
    validation: int = 0
    validation_per_class: tuple[int, ...] = ()


@dataclass(frozen=True)
class DataSummary:
    """The description of one data set."""

    name: str
    description: str
    source: str
    licence: str
    classes: tuple[str, ...]
    image_shape: tuple[int, int, int]
    domains: tuple[DomainSummary, ...]
    warnings: tuple[str, ...]


class _Registered(NamedTuple):
    info: DataInfo
    loader: Reader
    options: Mapping[str, SettingInfo]


_REGISTRY: dict[str, _Registered] = {}


def register_data(
    name: str, loader: Reader, description: str, *, domains: tuple[str, ...] = (), licence: str = ""
) -> None:
    """Register a data set by name; `loader` is called on demand, and should cache what is slow.

    Keyword-only arguments of the loader, with a type and a default, are settings: `--set data.KEY=VALUE`.
    """
    options = keyword_settings(loader, f"data {name}")
    _REGISTRY[name] = _Registered(DataInfo(name, description, domains, licence), loader, options)


def available(data_root: str | Path | None = None) -> list[DataInfo]:
    """The registered data sets and those in the data root, which hide registered ones of the same name."""
    infos = {name: entry.info for name, entry in _REGISTRY.items()}
    root = data_root_of(data_root)
    if root is None:
        return list(infos.values())
    originals = {name: place for name, source in SOURCES.items() if (place := source.locate(root))}
    for folder in visible_folders(root):
        # A folder of original files goes by the names of the sets in it.
        if form_of(folder.name, root) == "original" or folder in originals.values():
            continue
        archives = npz_files(folder)
        names = tuple(path.stem for path in archives) or tuple(path.name for path in visible_folders(folder))
        if names:
            form = "npz files" if archives else "image folders"
            infos[folder.name] = DataInfo(folder.name, f"{form} in the data root", names)
    for name in originals:
        if form_of(name, root) == "original":
            source = SOURCES[name]
            infos[name] = DataInfo(name, f"{source.description}; original files", source.domains, source.licence)
    return list(infos.values())


def form_of(name: str, data_root: str | Path | None = None) -> Form:
    """The form in which data of this name would be read: the data root first, our own forms before original files."""
    root = data_root_of(data_root)
    folder = root / name if root and (root / name).is_dir() else None
    if folder and npz_files(folder):
        return "npz"
    if root and name in SOURCES and SOURCES[name].locate(root):
        return "original"
    if folder and (name not in SOURCES or any((domain / "train").is_dir() for domain in visible_folders(folder))):
        return "folders"
    # A folder of the set's name with something missing should be completed rather than passed over.
    return "registered" if name in _REGISTRY and not folder else "absent"


def data_options(spec: str) -> dict[str, SettingInfo]:
    """The settings of the reader of a data set, besides those that every data set takes."""
    options = SOURCES[spec].options if spec in SOURCES else {}
    return {**options, **(_REGISTRY[spec].options if spec in _REGISTRY else {})}


def describe(spec: str, data_root: str | Path | None = None, reading: ReadOptions | None = None) -> DataSummary:
    """Counts per domain and class, origin and licence of anything that `load` takes."""
    dataset = load(spec, data_root=data_root, reading=reading)
    known = {info.name: info.description for info in available(data_root)}
    return DataSummary(
        name=dataset.name,
        description=known.get(spec, dataset.source),
        source=dataset.source,
        licence=dataset.licence,
        classes=dataset.classes,
        image_shape=dataset.image_shape,
        domains=tuple(summary_of(domain, len(dataset.classes)) for domain in dataset.domains.values()),
        warnings=dataset.warnings,
    )


def load(
    spec: str,
    *,
    data_root: str | Path | None = None,
    domains: str | None = None,
    labels: str | None = None,
    image_size: int | tuple[int, int] | None = None,
    channels: int | None = None,
    normalise: str | None = None,
    options: Mapping[str, object] | None = None,
    reading: ReadOptions | None = None,
) -> Dataset:
    """Data by registered name, by name of a folder in the data root, by folder, npz file or manifest.

    `domains` picks some (`a,b`), `labels` regroups classes (`0=healthy,1-4=diseased`, or a file), `image_size` and
    `channels` override what is found in the data, `normalise` names a normalisation, `options` are settings of the data
    set, `reading` says how image files are grouped and divided.
    """
    raw, name, place = _read(spec, data_root_of(data_root), square(image_size), options or {}, reading or ReadOptions())
    if domains is not None:
        raw = _select(raw, domains)
    if labels is not None:
        raw = regroup(raw, labels)
    shaped = unify(raw.domains, channels, image_size)
    shown_channels = next(iter(shaped.values())).train.channels
    normalisation = Normalise.named(normalise, shown_channels) if normalise else Normalise.default(shown_channels)
    alike = map(str, alike_classes(held_classes(raw)))
    warnings = (*raw.warnings, *_gaps(raw), *alike, *leaks(raw))
    return Dataset(name, raw.classes, shaped, normalisation, raw.source, warnings, licence=raw.licence, place=place)


def locate(spec: str, data_root: str | Path | None = None) -> Path | None:
    """The folder, manifest or archive that a name or a path stands for; None for what is registered or original."""
    root = data_root_of(data_root)
    form = _form(spec, root)
    if form in ("original", "registered"):
        return None
    path = root / spec if form != "absent" and root else Path(spec).expanduser()
    return path if path.exists() else None


def data_root_of(data_root: str | Path | None) -> Path | None:
    """The folder that holds data sets by name: as given, or from the environment."""
    given = data_root or os.environ.get(ROOT_VARIABLE)
    if not given:
        return None
    root = Path(given).expanduser()
    if not root.is_dir():
        origin = "" if data_root else f" (from {ROOT_VARIABLE})"
        raise UserError(f"the data root {root}{origin} is not a folder; give the folder that contains the data sets")
    return root


def _form(spec: str, root: Path | None) -> Form:
    """A path that says where it leads is never taken for a name."""
    return form_of(spec, root) if _is_plain(spec) else "absent"


def _is_plain(spec: str) -> bool:
    return Path(spec).name == spec and not spec.startswith((".", "~"))


def _read(
    spec: str,
    root: Path | None,
    image_size: tuple[int, int] | None,
    options: Mapping[str, object],
    reading: ReadOptions,
) -> tuple[RawData, str, DataPlace]:
    """What `spec` names, its short name and its place: the data root comes first, then registered names, then paths."""
    if not spec.strip():
        raise UserError(f"no data given; give a name ({', '.join(_REGISTRY)}), a folder or a manifest")
    form = _form(spec, root)
    settings = _own_settings(spec, form, options)
    path = None
    if form == "original" and root:
        raw, name = SOURCES[spec].load(root, image_size, settings), spec
    elif form == "registered":
        raw, name = _load_registered(spec, root, settings), spec
    else:
        path = root / spec if form != "absent" and root else Path(spec).expanduser()
        if not path.exists():
            _refuse_unknown(spec, root, _is_plain(spec))
        raw, name = _read_path(path, image_size, reading)
    chosen = {key: value for key, value in vars(reading).items() if value not in (None, _AS_READ.get(key, value))}
    if chosen.keys() & {"test_share", "group_by", "pages"} and (
        path is None or npz_files(path) or path.suffix == ".npz"
    ):
        note = f"{', '.join(chosen)}: {name} has its own split and no files, so this is not used"
        raw = replace(raw, warnings=(*raw.warnings, note))
    record = {"asked": chosen, "sites": dict(raw.reading)}
    place = DataPlace(
        None if path is None else str(path.resolve()),
        str(root.resolve()) if root and form not in ("registered", "absent") else None,
        raw.fingerprint or _count_mark(raw),
        record,
    )
    return raw, name, place


def _count_mark(raw: RawData) -> str:
    """A fingerprint of data that does not come from files of its own: classes and labels."""
    digest = blake2b(repr(raw.classes).encode(), digest_size=16)
    for name, domain in raw.domains.items():
        digest.update(name.encode())
        digest.update(domain.train.y.numpy().tobytes() + b"/" + domain.test.y.numpy().tobytes())
    return digest.hexdigest()


def _load_registered(name: str, root: Path | None, settings: Mapping[str, Any]) -> RawData:
    raw = _REGISTRY[name].loader(**settings)
    if not root:
        return raw
    note = f"the data root has no folder {name}; the embedded data of that name is used"
    return replace(raw, warnings=(*raw.warnings, note))


def _read_path(path: Path, image_size: tuple[int, int] | None, reading: ReadOptions) -> tuple[RawData, str]:
    """A manifest, an archive of arrays or a folder, and its short name."""
    if path.is_file() and path.suffix.lower() in MANIFEST_SUFFIXES:
        return read_manifest(path, image_size, reading), path.stem
    if path.is_file() and path.suffix.lower() == ".npz":
        return read_npz([path], source=f"file {path.name}"), path.stem
    return read_folder(path, image_size, reading), path.resolve().name


def _refuse_unknown(spec: str, root: Path | None, plain_name: bool) -> None:
    """Say what is wrong with a name or file that is nowhere; `read_folder` refuses a missing folder."""
    if spec in SOURCES:
        raise SOURCES[spec].missing(root)
    suffix = Path(spec).suffix
    if plain_name and not suffix:
        known = (
            {*_REGISTRY, *SOURCES, *(folder.name for folder in visible_folders(root) if root)} if root else _REGISTRY
        )
        raise UserError(f"{unknown_name('data', spec, known)}; or give a folder: {FOLDER_LAYOUT}")
    if suffix.lower() in (*MANIFEST_SUFFIXES, ".npz"):
        raise UserError(f"the file {spec} does not exist; give a manifest, a folder or a name ({', '.join(_REGISTRY)})")


def _own_settings(spec: str, form: Form, given: Mapping[str, object]) -> dict[str, Any]:
    """The settings of what is read, checked; those of original files mean nothing where something else is read."""
    original = SOURCES[spec].options if spec in SOURCES else {}
    taken = original if form == "original" else _REGISTRY[spec].options if form == "registered" else {}
    for key in given:
        if key in original and key not in taken:
            raise UserError(f"data.{key} is a setting for the original files of {spec}, which are not read here")
    return checked(taken, given, f"the data {spec}", "data.")


def _select(raw: RawData, wanted: str) -> RawData:
    names = [name.strip() for name in wanted.split(",") if name.strip()]
    if not names:
        raise UserError(f"domains {wanted!r} names none; known: {', '.join(raw.domains)}")
    for name, times in Counter(names).items():
        if name not in raw.domains:
            raise unknown_name("domain", name, raw.domains)
        if times > 1:
            raise UserError(f"domains {wanted!r} names {name} more than once; name every domain once")
    return replace(raw, domains={name: raw.domains[name] for name in names})


def _gaps(raw: RawData) -> list[str]:
    """Warnings for classes of which a domain has no training or no test images; neither is an error."""
    warnings: list[str] = []
    for domain in raw.domains.values():
        counts = summary_of(domain, len(raw.classes))
        for part, per_class in (("training", counts.train_per_class), ("test", counts.test_per_class)):
            absent = [name for name, count in zip(raw.classes, per_class, strict=True) if not count]
            if absent:
                warnings.append(f"domain {domain.name} has no {part} images of class {', '.join(absent)}")
    return warnings


def leaks(raw: RawData) -> list[str]:
    """Warnings for test images that are also training images of the same domain, byte by byte."""
    warnings: list[str] = []
    for domain in raw.domains.values():
        suspects = domain.train
        if not (_recognised(domain.train) and _recognised(domain.test)):
            # Few training images can equal a test image at all; only these are worth a digest.
            suspects = suspects.take(np.flatnonzero(np.isin(_keys(domain.train), _keys(domain.test))))
        train_digests = set(_digests(suspects))
        shared = sum(digest in train_digests for digest in _digests(domain.test))
        if shared:
            overlap = f"{shared} of {counted(len(domain.test), 'test image')}"
            warnings.append(f"domain {domain.name}: the training images include {overlap}")
    return warnings


def _keys(images: Images) -> NDArray[np.uint64]:
    """A hash of every image: equal images have equal hashes, different ones hardly ever."""
    count = prod(images.x.shape[1:]) // 8
    factors = np.random.default_rng(0).integers(2**64, size=count, dtype=np.uint64) | np.uint64(1)
    keys = []
    for part in pieces(images.x):
        flat = part.numpy().reshape(len(part), -1)
        keys.append(np.ascontiguousarray(flat[:, : count * 8]).view(np.uint64) @ factors)
    return np.concatenate(keys)


def _recognised(images: Images) -> bool:
    """Whether the digests of images are known without their pixels."""
    x = images.x
    return isinstance(x, StoredPixels) and all(x.digest(index) is not None for index in range(len(x)))


def _digests(images: Images) -> Iterator[bytes]:
    if _recognised(images):
        return (digest_of(images.x, index) for index in range(len(images)))
    return (pixel_digest(picture) for part in pieces(images.x) for picture in part.numpy())


def summary_of(domain: Domain, classes: int) -> DomainSummary:
    """How much a domain holds of every class."""
    train, test = (part.y.bincount(minlength=classes) for part in (domain.train, domain.test))
    return DomainSummary(
        domain.name,
        len(domain.train),
        len(domain.test),
        tuple(train.tolist()),
        tuple(test.tolist()),
        0 if domain.validation is None else len(domain.validation),
        () if domain.validation is None else tuple(domain.validation.y.bincount(minlength=classes).tolist()),
    )


register_data("digits", digits.load_digits, digits.DESCRIPTION, domains=digits.DOMAINS, licence=digits.LICENCE)
register_data("lesions", lesions.load_lesions, lesions.DESCRIPTION, domains=lesions.DOMAINS, licence="as protofed")

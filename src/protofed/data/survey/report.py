"""What there is to say about some data before it is trained on, all of it at once."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from protofed.data.archives import npz_files
from protofed.data.catalog import MANIFEST_SUFFIXES, DataSummary, DomainSummary, load, locate, summary_of
from protofed.data.decoding import ImageHeader, Picture, decode, decoder_warnings, headers_of
from protofed.data.files import LabelledFile, common_size, depth
from protofed.data.folders import check_folder, list_folder
from protofed.data.images import Dataset
from protofed.data.labels import alike_classes, renaming
from protofed.data.listing import PARTS, Listing, ReadOptions, SettledFiles, settle
from protofed.data.manifest import list_manifest
from protofed.data.names import is_site_name
from protofed.data.problems import Problem, error, warning
from protofed.data.survey.findings import ImageTable, findings
from protofed.data.survey.looks import Look, LookIndex, Progress
from protofed.data.survey.rows import table_of_arrays, table_of_files
from protofed.system import without_garbage_collection

SAMPLES = 4
"""Pictures of every class of every site."""

_SAMPLE_SIDE = 96
_MOST_ADVICE = 8
_URGENT = (
    "patient-on-both-sides",
    "copy-in-test",
    "two-labels",
    "near-copy-in-test",
    "size-shortcut",
    "brightness-shortcut",
    "format-shortcut",
    "one-class",
    "spelling",
    "burned-in",
    "one-brightness",
    "outside",
    "empty-folder",
    "imbalance",
    "few",
)
"""Kinds of problems in the order in which they spoil a result."""


@dataclass(frozen=True)
class SiteFacts:
    """What the images of a site are."""

    name: str
    sizes: Mapping[str, int]
    channels: Mapping[str, int]
    bits: Mapping[str, int]
    formats: Mapping[str, int]
    brightness: Mapping[str, Sequence[int]]
    """Of every class: how many images have a mean brightness in each of 16 steps from 0 to 255."""
    split: Mapping[str, Any]
    """How the site was divided, where it had not decided itself."""


@dataclass(frozen=True, eq=False)
class DataReport:
    """Counts, facts, problems, and a few pictures."""

    summary: DataSummary
    sites: tuple[SiteFacts, ...]
    problems: tuple[Problem, ...]
    pictures: Mapping[tuple[str, str], Sequence[NDArray[np.uint8]]]
    """Some of each site and class, [H, W] or [H, W, 3]."""

    @property
    def errors(self) -> list[Problem]:
        """What keeps it from being trained on."""
        return [problem for problem in self.problems if problem.severity == "error"]

    @property
    def advice(self) -> list[str]:
        """What to look at before training, the worst first."""
        wrong = self.errors
        listed = [_blocked(wrong)] if wrong else []
        for kind in _URGENT:
            listed += [str(problem) for problem in self.problems if problem.kind == kind and problem not in wrong]
        alone = [site.name for site in self.sites if site.split and not site.split["grouped_by"]]
        if alone:
            listed.append(
                f"no patients are known in {', '.join(alone)}, so images of one person may be in both training "
                "and test; --group-by folder, or a regular expression for file names, keeps them together"
            )
        return listed[:_MOST_ADVICE]

    def as_dict(self) -> dict[str, Any]:
        """For machines."""
        return {
            **asdict(self.summary),
            "wrong_files": [],
            "sites": [asdict(site) for site in self.sites],
            "problems": [problem.as_dict() for problem in self.problems],
            "look_at_first": self.advice,
        }


def survey(
    spec: str,
    *,
    data_root: str | Path | None = None,
    labels: str | None = None,
    reading: ReadOptions | None = None,
    tell: Progress | None = None,
    pictures: bool = True,
) -> DataReport:
    """Look at all images of anything that `load` takes; files that cannot be read are told, not refused."""
    reading = reading or ReadOptions()
    path = locate(spec, data_root)
    with without_garbage_collection():
        if path is not None and path.is_file() and path.suffix.lower() in MANIFEST_SUFFIXES:
            return _survey_files(list_manifest(path), path.stem, labels, reading, tell, pictures)
        if path is not None and path.suffix != ".npz" and not npz_files(path):
            check_folder(path)
            return _survey_files(list_folder(path), path.resolve().name, labels, reading, tell, pictures)
    return _survey_arrays(load(spec, data_root=data_root, labels=labels, reading=reading))


def _survey_files(
    listing: Listing, name: str, labels: str | None, reading: ReadOptions, tell: Progress | None, pictures: bool
) -> DataReport:
    paths = [file.path for file in listing.files]
    looks = dict(zip(paths, LookIndex(listing.place).looks(paths, tell), strict=True))
    settled = settle(listing, reading, lambda wanted: [_told(path, looks[path]) for path in wanted])
    if labels is not None:
        settled = _regrouped(settled, labels)
    table = table_of_files(listing, settled, looks)
    summary = DataSummary(
        name=name,
        description=listing.source,
        source=listing.source,
        licence="",
        classes=settled.classes,
        image_shape=_shape(settled),
        domains=tuple(_counts(site, files, settled.classes) for site, files in settled.files.items()),
        warnings=(),
    )
    shown = _sample_files(settled, looks) if pictures else {}
    return _report(summary, table, settled.problems, settled.splits, shown)


def _told(path: str, look: Look) -> list[ImageHeader] | Problem:
    """From the index; of DICOM files the tags are read each time, for the index knows no patients."""
    told = look.told(path)
    return headers_of(Path(path)) if isinstance(told, list) and told[0].format == "DICOM" else told


def _survey_arrays(dataset: Dataset) -> DataReport:
    summary = DataSummary(
        name=dataset.name,
        description=dataset.source,
        source=dataset.source,
        licence=dataset.licence,
        classes=dataset.classes,
        image_shape=dataset.image_shape,
        domains=tuple(summary_of(domain, len(dataset.classes)) for domain in dataset.domains.values()),
        warnings=(),
    )
    told = [warning("data", "", text) for text in dataset.warnings]
    return _report(summary, table_of_arrays(dataset), told, {}, _sample_arrays(dataset))


def _report(
    summary: DataSummary,
    table: ImageTable,
    problems: Sequence[Problem],
    splits: Mapping[str, Mapping[str, Any]],
    pictures: Mapping[tuple[str, str], Sequence[NDArray[np.uint8]]],
) -> DataReport:
    held = {site: set(table.label[table.site == site].tolist()) for site in table.sites()}
    strange = [error("name", name, f"domain {name!r} needs another name") for name in held if not is_site_name(name)]
    found = [*problems, *strange]
    known = {problem.text for problem in found}
    found += [problem for problem in _gaps(summary) if str(problem) not in known]
    found += [problem for problem in alike_classes(held) if str(problem) not in known]
    found += findings(table)
    sites = tuple(_facts(table, site, splits.get(site, {})) for site in table.sites())
    warnings = tuple(str(problem) for problem in found if problem.severity == "warning")
    return DataReport(replace(summary, warnings=warnings), sites, tuple(found), pictures)


def _gaps(summary: DataSummary) -> list[Problem]:
    """Classes of which a site has no training or no test images: fine, and said."""
    gaps = []
    for domain in summary.domains:
        for part, per_class in (("training", domain.train_per_class), ("test", domain.test_per_class)):
            absent = [name for name, count in zip(summary.classes, per_class, strict=True) if not count]
            if absent:
                text = f"domain {domain.name} has no {part} images of class {', '.join(absent)}"
                gaps.append(warning("no-class", "", text))
    return gaps


def _regrouped(settled: SettledFiles, labels: str) -> SettledFiles:
    held = {site: {file.label for file in files} for site, files in settled.files.items()}
    new = renaming(labels, settled.classes, held)
    files = {
        site: [
            file._replace(label=new.new_class[site][file.label])
            for file in members
            if file.label in new.new_class[site]
        ]
        for site, members in settled.files.items()
    }
    notes = (warning("labels", "", note) for note in new.notes)
    return SettledFiles(files, new.classes, (*settled.problems, *notes), settled.splits)


def _shape(settled: SettledFiles) -> tuple[int, int, int]:
    """What the images would be brought to; zeros where there are none."""
    headers = {site: [file.header for file in files if file.header] for site, files in settled.files.items()}
    sizes = [common_size([header.size for header in own]) for own in headers.values() if own]
    if not sizes:
        return 0, 0, 0
    colour = any(header.colour for own in headers.values() for header in own)
    return 3 if colour else 1, max(height for height, _ in sizes), max(width for _, width in sizes)


def _counts(site: str, files: Sequence[LabelledFile], classes: Sequence[str]) -> DomainSummary:
    counted = Counter((file.part, file.label) for file in files)
    per_class = {part: tuple(counted[part, name] for name in classes) for part in PARTS}
    return DomainSummary(
        site,
        sum(per_class["train"]),
        sum(per_class["test"]),
        per_class["train"],
        per_class["test"],
        sum(per_class["validation"]),
        per_class["validation"] if any(per_class["validation"]) else (),
    )


def _facts(table: ImageTable, site: str, split: Mapping[str, Any]) -> SiteFacts:
    rows = table.site == site
    kinds = [kind.split(", ") for kind in table.kind[rows].tolist()]
    brightness = {}
    for label in sorted(set(table.label[rows].tolist())):
        means = table.mean[rows & (table.label == label) & table.seen]
        brightness[label] = np.histogram(means, bins=16, range=(0, 256))[0].tolist()
    channels, bits, formats = (dict(Counter(kind[place] for kind in kinds).most_common()) for place in range(3))
    return SiteFacts(
        site, dict(Counter(table.size[rows].tolist()).most_common()), channels, bits, formats, brightness, dict(split)
    )


def _spread(count: int) -> list[int]:
    """Some places, evenly spaced."""
    return sorted({number * (count - 1) // max(SAMPLES - 1, 1) for number in range(min(SAMPLES, count))})


def _sample_files(settled: SettledFiles, looks: Mapping[str, Look]) -> dict[tuple[str, str], list[NDArray[np.uint8]]]:
    samples: dict[tuple[str, str], list[NDArray[np.uint8]]] = {}
    for site, files in settled.files.items():
        bits = depth(
            max((looks[str(file.path)].peak for file in files if file.header and file.header.deep), default=0.0)
        )
        for label in settled.classes:
            own = [file for file in files if file.label == label and not file.page]
            samples[site, label] = [_thumbnail(own[place].picture, bits) for place in _spread(len(own))]
    return samples


def _thumbnail(picture: Picture, bits: int) -> NDArray[np.uint8]:
    header = picture.header or headers_of(picture.path)[picture.page]
    shrink = min(1.0, _SAMPLE_SIDE / max(header.size))
    size = max(1, round(header.size[0] * shrink)), max(1, round(header.size[1] * shrink))
    with decoder_warnings():
        _, values = decode(picture, size)
    scaled = values * (255 / (2**bits - 1)) if header.deep else values
    shown: NDArray[np.uint8] = np.clip(np.rint(scaled), 0, 255).astype(np.uint8).transpose(1, 2, 0).squeeze()
    return shown


def _sample_arrays(dataset: Dataset) -> dict[tuple[str, str], list[NDArray[np.uint8]]]:
    samples = {}
    for site, domain in dataset.domains.items():
        for number, label in enumerate(dataset.classes):
            places = (domain.train.y == number).nonzero()[:, 0]
            chosen = domain.train.x[places[torch.tensor(_spread(len(places)), dtype=torch.int64)]]
            samples[site, label] = [picture.permute(1, 2, 0).numpy().squeeze() for picture in chosen]
    return samples


def _blocked(wrong: Sequence[Problem]) -> str:
    """How many problems are in the way, and the first of them."""
    many = "1 problem prevents" if len(wrong) == 1 else f"{len(wrong)} problems prevent"
    return f"{many} training on this data; the first: {wrong[0]}"
